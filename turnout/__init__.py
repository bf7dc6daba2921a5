"""A plugin-based framework for serving large language models.

In a checkout this folder is the package: its links name the folders beside it, as `pyproject.toml` maps them for wheels.
"""
