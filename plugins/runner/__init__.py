"""Runners."""

from turnout.core import Register, hookimpl
from turnout.core.model import ModelRunner
from turnout.plugins.runner.model import LocalRunner


@hookimpl
def register_runners(register: Register[ModelRunner]) -> None:
    register("local", LocalRunner)
