"""The hooks a plugin may implement. Mark yours with `@hookimpl`; take only the arguments you need."""

from __future__ import annotations

import logging
import sys
from typing import Any, Protocol, TypeVar

import pluggy

from turnout.core.interfaces import (
    ENTRY_POINTS,
    AttentionBackend,
    BlockManager,
    Preemption,
    Quantizer,
    Scheduler,
)
from turnout.core.model import Format, ModelLoader, ModelRunner
from turnout.core.parsers import ReasoningParser, ToolParser
from turnout.core.structured import Structured
from turnout.core.types import ContractError, Request, Stats, Step, StepReport

Hooks = pluggy.PluginManager
hookspec = pluggy.HookspecMarker(ENTRY_POINTS)
hookimpl = pluggy.HookimplMarker(ENTRY_POINTS)

log = logging.getLogger("turnout.engine")

T_contra = TypeVar("T_contra", contravariant=True)


def new_hooks() -> Hooks:
    """A manager that knows the hooks below and no plugin."""
    hooks = Hooks(ENTRY_POINTS)
    hooks.add_hookspecs(sys.modules[__name__])
    return hooks


class Register(Protocol[T_contra]):
    """`register("sjf", SJF)` makes `scheduler=sjf` a choice on the command line, and `scheduler=PACKAGE:sjf` in any case.

    A name of Turnout's own stays Turnout's: with `replaces="fcfs"`, `register("fcfs", Mine, replaces="fcfs")` offers another
    to users who choose `scheduler=PACKAGE:fcfs`.
    """

    def __call__(self, name: str, component: type[T_contra], /, *, replaces: str | None = None) -> None: ...


class RegisterPresets(Protocol):
    """`register_presets("my_package.conf")` puts that package's YAML folder on Hydra's search path."""

    def __call__(self, package: str, /) -> None: ...


@hookspec
def register_schedulers(register: Register[Scheduler]) -> None:
    """Offer schedulers."""


@hookspec
def register_attention(register: Register[AttentionBackend[Any, Any]]) -> None:
    """Offer attention backends."""


@hookspec
def register_quantizers(register: Register[Quantizer]) -> None:
    """Offer quantizers."""


@hookspec
def register_block_managers(register: Register[BlockManager]) -> None:
    """Offer block managers."""


@hookspec
def register_preemptions(register: Register[Preemption]) -> None:
    """Offer preemption policies."""


@hookspec
def register_loaders(register: Register[ModelLoader]) -> None:
    """Offer model loaders."""


@hookspec
def register_runners(register: Register[ModelRunner]) -> None:
    """Offer runners."""


@hookspec
def register_tool_parsers(register: Register[ToolParser]) -> None:
    """Offer parsers of tool calls."""


@hookspec
def register_reasoning_parsers(register: Register[ReasoningParser]) -> None:
    """Offer parsers of reasoning."""


@hookspec
def register_formats(register: Register[Format]) -> None:
    """Offer readers of model files, by their suffix."""


@hookspec
def register_structured(register: Register[Structured]) -> None:
    """Offer what compiles and enforces the form of an answer."""


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


class Notifier:
    """Tells the plugins that listen what happens. One that raises costs a line in the log and a count, nothing else."""

    def __init__(self, hooks: Hooks, stats: Stats) -> None:
        self._hooks, self._stats = hooks, stats
        self._failed: set[tuple[str, str]] = set()
        for name in ("request_added", "request_finished", "request_dropped", "step_finished"):
            for plugin in getattr(hooks.hook, name).get_hookimpls():
                if plugin.hookwrapper or plugin.wrapper:
                    raise ContractError(f"the plugin {plugin.plugin_name} wraps the hook {name}, which only tells")
        self.of_steps = bool(hooks.hook.step_finished.get_hookimpls())  # whether a report must be made of each step
        self._of_added = bool(hooks.hook.request_added.get_hookimpls())
        self._of_finished = bool(hooks.hook.request_finished.get_hookimpls())

    def request_added(self, request: Request) -> None:
        if self._of_added:
            self._tell(self._hooks.hook.request_added, {"request": request})

    def request_finished(self, request: Request) -> None:
        if self._of_finished:
            self._tell(self._hooks.hook.request_finished, {"request": request})

    def request_dropped(self, request: Request) -> None:
        self._tell(self._hooks.hook.request_dropped, {"request": request})

    def step_finished(self, step: Step, seconds: float, report: StepReport) -> None:
        self._tell(self._hooks.hook.step_finished, {"step": step, "seconds": seconds, "report": report})

    def _tell(self, caller: pluggy.HookCaller, known: dict[str, object]) -> None:
        """Call each plugin by itself: pluggy would stop at the first that raises."""
        for plugin in reversed(caller.get_hookimpls()):
            try:
                plugin.function(*[known[name] for name in plugin.argnames])
            except Exception:
                self._stats.observer_failures += 1
                if (plugin.plugin_name, caller.name) not in self._failed:
                    self._failed.add((plugin.plugin_name, caller.name))
                    what = "the plugin %s failed in its hook %s; further failures are only counted"
                    log.exception(what, plugin.plugin_name, caller.name)
