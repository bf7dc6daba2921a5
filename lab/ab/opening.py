"""From what was asked for to sides that answer: everything is composed and checked before the first weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from hydra.core.config_store import ConfigStore

from turnout.compose import plugins
from turnout.compose.build import build_engine
from turnout.compose.config import Config
from turnout.compose.plugins import Plugins
from turnout.core.model import ModelLoader
from turnout.lab.ab import workload
from turnout.lab.ab.asked import Asked, EngineAsked, Line, ServerAsked, TruthAsked
from turnout.lab.ab.config import AbConfig
from turnout.lab.ab.remote import ServerSide
from turnout.lab.ab.truth import TransformersSide
from turnout.lab.compare.sides import EngineSide, Item, Side
from turnout.server.cli.overrides import checked, objects, try_composing
from turnout.server.text.tokenizer import Text

OnProgress = Callable[[str, float], None]
SPARE = 8  # blocks beyond what the prompts need


class Opened(NamedTuple):
    """All that a comparison needs."""

    a: Side
    others: list[Side]
    items: list[Item]
    text: Text


@dataclass(frozen=True)
class Composed:
    """One side, checked. `config` None: a server."""

    asked: Asked
    config: Config | None


def compose(overrides: Sequence[str], command: str, places: Sequence[str], found: Plugins) -> Config:
    """The configuration as objects. Raises Usage, PluginError, ValueError."""
    with _no_group("workload"):
        composed = try_composing(command, [*places, *checked(list(overrides), found)], found)
    return objects(composed, found)


@contextmanager
def _no_group(name: str) -> Iterator[None]:
    """Here `workload` is an option. In a process that composed a simulation before, Hydra would take it for a group."""
    groups = ConfigStore.instance().repo
    hidden = groups.pop(name, None)
    try:
        yield
    finally:
        if hidden is not None:
            groups[name] = hidden


def composed(line: Line, places: Sequence[str], found: Plugins) -> tuple[AbConfig, list[Composed]]:
    """The comparison's options, and every side, the baseline first. Raises what `compose` raises."""
    config = compose([*line.common, *line.own], "ab", places, found)
    assert isinstance(config, AbConfig)
    sides = [
        Composed(asked, None if isinstance(asked, ServerAsked) else compose(asked.overrides, "engine", places, found))
        for asked in (line.a, *line.others)
    ]
    return config, sides


@contextmanager
def opened(config: AbConfig, sides: Sequence[Composed], on_progress: OnProgress) -> Iterator[Opened]:
    """Load every side; give back what they hold afterwards. Raises ModelError, PluginError, ValueError, SideError."""
    with ExitStack() as stack:
        first = next(side.config for side in sides if side.config is not None)
        loader: ModelLoader = first.loader
        text = Text.load(loader.find(first.model, plugins.load().formats(), lambda stage: on_progress(stage, 0.0)))
        longest = _longest(sides)
        config.workload = workload.chosen(config.workload, _attention_differs(sides), "mixed")
        items = workload.load(config.workload, text, config.num_prompts, longest, config.max_tokens, config.seed)
        made: list[Side] = []
        for number, side in enumerate(sides):
            share = number / len(sides)
            on_progress(f"{'B' if number else 'A'}, {side.asked.name}: starting", share)
            made.append(_open(side, config, text, items, lambda stage, _: on_progress(stage, share), stack))  # noqa: B023
        yield Opened(made[0], made[1:], items, text)


def _open(
    side: Composed, config: AbConfig, text: Text, items: Sequence[Item], on_progress: OnProgress, stack: ExitStack
) -> Side:
    match side.asked:
        case ServerAsked(name, url, model, dtype):
            server = ServerSide(name, url, text, model=model, api_key=config.api_key, dtype=dtype)
            stack.callback(server.close)
            return server
        case TruthAsked(name):
            assert side.config is not None
            return TransformersSide(name, side.config)
        case EngineAsked(name):
            assert side.config is not None
            fit(side.config, items, config.max_tokens)
            return EngineSide(name, build_engine(side.config, on_progress))


def _attention_differs(sides: Sequence[Composed]) -> bool:
    """Whether sides attend with different backends, or keep keys differently; servers may do anything."""
    own = [side.config for side in sides]
    kinds = {None if c is None else (type(c.attention), str(vars(c.attention)), c.kv_cache_dtype) for c in own}
    truth = any(isinstance(side.asked, TruthAsked) for side in sides)
    return truth or len(kinds) > 1


def fit(config: Config, items: Sequence[Item], max_tokens: int) -> None:
    """Make the cache hold the work and no more, unless its size was asked for: several engines share the memory."""
    if config.blocks.num_blocks is None:
        size = config.blocks.block_size
        lengths = [len(item.prompt) + max(len(item.continuation), max_tokens) for item in items]
        config.blocks.num_blocks = sum(-(-length // size) for length in lengths) + SPARE


def _longest(sides: Sequence[Composed]) -> int:
    """Tokens that fit into the context of every side that is here."""
    found = []
    for config in (side.config for side in sides if side.config is not None):
        loader: ModelLoader = config.loader
        path = loader.find(config.model, plugins.load().formats(), lambda stage: None)
        found.append(config.limits.max_model_len or loader.inspect(path, config.dtype, config.device).max_len)
    return min(found)
