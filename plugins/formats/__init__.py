"""Readers of model files of other kinds, each under the suffix it reads."""

from turnout.core import Register, hookimpl
from turnout.core.model import Format
from turnout.plugins.formats.gguf import GGUF


@hookimpl
def register_formats(register: Register[Format]) -> None:
    register("gguf", GGUF)
