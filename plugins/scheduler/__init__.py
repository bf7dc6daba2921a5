"""Schedulers."""

from turnout.core import Register, Scheduler, hookimpl
from turnout.plugins.scheduler.chunked_prefill import ChunkedPrefill
from turnout.plugins.scheduler.fcfs import FCFS


@hookimpl
def register_schedulers(register: Register[Scheduler]) -> None:
    register("fcfs", FCFS)
    register("chunked_prefill", ChunkedPrefill)
