"""The HTTP front, and the command line."""

import os

# How long a thread of a torch operation waits actively for the others, in turns, before it goes to sleep. A step is
# hundreds of short operations; where threads sleep between them, a busy neighbour costs a scheduler's time slice at each
# (measured: 8 ms). A few milliseconds' worth: between steps of an idle server they do sleep. It must be set before torch
# loads its OpenMP runtime; whoever has set something keeps it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000000")
