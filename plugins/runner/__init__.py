"""Runners."""

from turnout.core import ModelRunner, Register, hookimpl
from turnout.plugins.runner.model import LocalRunner


@hookimpl
def register_runners(register: Register[ModelRunner]) -> None:
    register("local", LocalRunner)
