"""The hooks a plugin may implement. Mark yours with `@hookimpl`; take only the arguments you need."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Protocol, TypeVar

import pluggy

from turnout.core.interfaces import ENTRY_POINTS, AttentionBackend, BlockManager, Preemption, Quantizer, Scheduler
from turnout.core.model import Format, ModelLoader, ModelRunner
from turnout.core.parsers import ReasoningParser, ToolParser
from turnout.core.structured import Structured
from turnout.core.types import ContractError, Request, Stats, Step, StepReport

Hooks = pluggy.PluginManager
hookspec = pluggy.HookspecMarker(ENTRY_POINTS)
hookimpl = pluggy.HookimplMarker(ENTRY_POINTS)

log = logging.getLogger("turnout.engine")

T_contra = TypeVar("T_contra", contravariant=True)


class Register(Protocol[T_contra]):
    """`register("sjf", SJF)` makes `scheduler=sjf` a choice on the command line, and `scheduler=PACKAGE:sjf` in any case.

    A name of Turnout's own stays Turnout's: with `replaces="fcfs"`, `register("fcfs", Mine, replaces="fcfs")` offers another
    to users who choose `scheduler=PACKAGE:fcfs`.
    """

    def __call__(self, name: str, component: type[T_contra], /, *, replaces: str | None = None) -> None: ...


class RegisterPresets(Protocol):
    """`register_presets("my_package.conf")` puts that package's YAML folder on Hydra's search path."""

    def __call__(self, package: str, /) -> None: ...


# slot -> (the hook that offers its components, `def register_…(register: Register[CONTRACT])`; their contract)
SLOTS: Mapping[str, tuple[str, type]] = {
    "loader": ("register_loaders", ModelLoader),
    "attention": ("register_attention", AttentionBackend),
    "scheduler": ("register_schedulers", Scheduler),
    "preemption": ("register_preemptions", Preemption),
    "blocks": ("register_block_managers", BlockManager),
    "quant": ("register_quantizers", Quantizer),
    "runner": ("register_runners", ModelRunner),
    "tool_parser": ("register_tool_parsers", ToolParser),
    "reasoning_parser": ("register_reasoning_parsers", ReasoningParser),
    "structured": ("register_structured", Structured),
    "format": ("register_formats", Format),  # chosen by a file's suffix, not by the configuration
}
CONTRACTS = dict.fromkeys(SLOTS, 1)  # the current version of each slot's contract; docs/contracts.md says what changed


@hookspec
def register_presets(register: RegisterPresets) -> None:
    """Offer YAML presets, found as `experiment=NAME` and the like."""


@hookspec
def request_added(request: Request) -> None:
    """A request was accepted and waits."""


@hookspec
def step_finished(step: Step, seconds: float, report: StepReport) -> None:
    """A step was computed, or failed. Called once per step, on the engine's thread."""


@hookspec
def request_finished(request: Request) -> None:
    """A request ended; `request.finish` says why."""


@hookspec
def request_dropped(request: Request) -> None:
    """What a finished request kept was given back since its owner asked."""


def new_hooks() -> Hooks:
    """A manager that knows the hooks above and no plugin."""
    hooks = Hooks(ENTRY_POINTS)
    hooks.add_hookspecs(sys.modules[__name__])
    offers = {hook: staticmethod(hookspec(lambda register: None)) for hook, _ in SLOTS.values()}
    hooks.add_hookspecs(type("Offers", (), offers))
    return hooks


class Notifier:
    """Tells the plugins that listen what happens. One that raises costs a line in the log and a count, nothing else."""

    def __init__(self, hooks: Hooks, stats: Stats) -> None:
        self._stats = stats
        self._failed: set[tuple[str, str]] = set()
        names = ("request_added", "request_finished", "request_dropped", "step_finished")
        self._listening = {name: getattr(hooks.hook, name).get_hookimpls() for name in names}
        for name, plugins in self._listening.items():
            for plugin in plugins:
                if plugin.hookwrapper or plugin.wrapper:
                    raise ContractError(f"the plugin {plugin.plugin_name} wraps the hook {name}, which only tells")
        self.of_steps = bool(self._listening["step_finished"])  # whether a report must be made of each step

    def tell(self, hook: str, **known: object) -> None:
        """Call each plugin by itself: pluggy would stop at the first that raises."""
        for plugin in reversed(self._listening[hook]):
            try:
                plugin.function(*[known[name] for name in plugin.argnames])
            except Exception:
                self._stats.observer_failures += 1
                if (plugin.plugin_name, hook) not in self._failed:
                    self._failed.add((plugin.plugin_name, hook))
                    what = "the plugin %s failed in its hook %s; further failures are only counted"
                    log.exception(what, plugin.plugin_name, hook)
