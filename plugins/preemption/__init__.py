"""What happens to a preempted request's keys and values."""

from turnout.core import Preemption, Register, hookimpl
from turnout.plugins.preemption.auto import Auto
from turnout.plugins.preemption.recompute import Recompute
from turnout.plugins.preemption.swap import Swap


@hookimpl
def register_preemptions(register: Register[Preemption]) -> None:
    register("recompute", Recompute)
    register("swap", Swap)
    register("auto", Auto)
