"""Schedulers."""

from turnout.core import Register, Scheduler, hookimpl
from turnout.plugins.scheduler.chunked_prefill import ChunkedPrefill
from turnout.plugins.scheduler.deadline import Deadline
from turnout.plugins.scheduler.fair import Fair
from turnout.plugins.scheduler.fcfs import FCFS
from turnout.plugins.scheduler.prefix_aware import PrefixAware
from turnout.plugins.scheduler.priority import Priority


@hookimpl
def register_schedulers(register: Register[Scheduler]) -> None:
    register("fcfs", FCFS)
    register("chunked_prefill", ChunkedPrefill)
    register("priority", Priority)
    register("fair", Fair)
    register("deadline", Deadline)
    register("prefix_aware", PrefixAware)
