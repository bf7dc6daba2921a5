"""The attention libraries that need a GPU, emulated on the CPU from what their documentation and sources say.

Each stands in for the real module, so that an adapter's own code runs: a wrong argument, two lengths swapped or a layout
misread gives a wrong answer here, as it would there. Their signatures are those recorded from the packages.
"""
