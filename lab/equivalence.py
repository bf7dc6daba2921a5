"""`assert_equivalent`: two engines say the same, or a test fails with the reasons in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from turnout.compose import plugins
from turnout.core.engine import Engine

if TYPE_CHECKING:
    from turnout.compose.config import Config
    from turnout.lab.compare.run import Comparison
    from turnout.lab.compare.sides import Item, Side

    Compared = Engine | Side | Sequence[str]
    Workload = str | Sequence[Item] | Sequence[Sequence[int]]


def assert_equivalent(
    a: Compared,
    b: Compared,
    workload: Workload = "auto",
    *,
    num_prompts: int = 24,
    effects: Mapping[str, float] | None = None,
    **settings: Any,
) -> Comparison:
    """Compare as `turnout ab` does; AssertionError unless the verdict is "equivalent".

    A side is an engine, a list of overrides such as `["model=PATH", "attention=cpu"]`, or anything with the methods of
    `Side`. The workload is prompts as token ids, `Item`s, or a name or file as `turnout ab` takes them; `auto` is `attention`,
    with long contexts, where the sides' attention differs, else `short`. Fewer than 21
    prompts are not enough for the effects that hold by default. `effects` says what matters, by measure; `settings` are
    fields of `Settings`.
    """
    from turnout.lab.compare.run import Settings, compare
    from turnout.lab.compare.verdict import Verdict
    from turnout.lab.compare.words import because

    known = {spec.name for spec in fields(Settings)}
    if strange := settings.keys() - known:
        raise TypeError(f"assert_equivalent takes {', '.join(sorted(known))}, got {', '.join(sorted(strange))}")
    wanted = Settings(effects=effects or {}, **settings)
    items = _items(workload, (a, b), num_prompts, wanted.max_tokens)
    [found] = compare(_side(a, items, wanted.max_tokens), [_side(b, items, wanted.max_tokens)], items, wanted)
    if found.verdict is not Verdict.EQUIVALENT:
        reasons = "\n  ".join(because(found))
        raise AssertionError(f"{found.a} and {found.b}: {found.verdict.name.lower().replace('_', ' ')}\n  {reasons}")
    return found


def open_engine(overrides: Sequence[str]) -> Engine:
    """The engine that `turnout serve OVERRIDE ...` would serve, in this process. Raises what its configuration raises."""
    from turnout.compose.build import build_engine

    return build_engine(_compose(overrides))


def _side(asked: Compared, items: Sequence[Item], max_tokens: int) -> Side:
    from turnout.compose.build import build_engine
    from turnout.lab.ab.opening import fit
    from turnout.lab.compare.sides import EngineSide

    if isinstance(asked, Engine):
        plugins = asked.info.plugins
        return EngineSide(" ".join(f"{slot}={about['name']}" for slot, about in plugins.items()) or "an engine", asked)
    if not isinstance(asked, Sequence):
        return asked
    config = _compose(asked)
    fit(config, items, max_tokens)
    return EngineSide(" ".join(asked) or "the defaults", build_engine(config))


def _compose(overrides: Sequence[str]) -> Config:

    from turnout.lab.ab.opening import compose
    from turnout.server.cli.composing import searchpath

    found = plugins.load()
    return compose(list(overrides), "engine", searchpath(found, []), found)


def _items(workload: Workload, sides: Sequence[Compared], num_prompts: int, max_tokens: int) -> list[Item]:
    from turnout.lab.compare.sides import Item

    if not isinstance(workload, str):
        given: Sequence[Item | Sequence[int]] = workload[:num_prompts]
        return [one if isinstance(one, Item) else Item(f"prompt {n}", tuple(one)) for n, one in enumerate(given)]
    from turnout.lab.ab.workload import chosen, load
    from turnout.server.text.tokenizer import Text

    folder, longest = _folder(sides)
    return load(
        chosen(workload, len({_attention(side) for side in sides}) > 1, "short"),
        Text.load(folder),
        num_prompts,
        longest,
        max_tokens,
        0,
    )


def _attention(side: Compared) -> str:
    """What a side attends with, and how it keeps keys; "" where it doesn't say."""
    if isinstance(side, Engine):
        return f"{side.info.plugins.get('attention', {}).get('name')} {side.info.composition.get('kv_cache_dtype')}"
    if not isinstance(side, Sequence):
        return ""
    config = _compose(side)
    return f"{type(config.attention).__name__} {vars(config.attention)} {config.kv_cache_dtype}"


def _folder(sides: Sequence[Compared]) -> tuple[str, int]:
    """Where the tokenizer lies, and the tokens of the shortest context."""
    found = []
    for side in sides:
        if isinstance(side, Engine):
            found.append((side.info.path, min(side.info.max_model_len, side.info.capacity)))
        elif isinstance(side, Sequence):
            config = _compose(side)
            path = config.loader.find(config.model, plugins.load().formats(), lambda stage: None)
            longest = config.loader.inspect(path, config.dtype, config.device).max_len
            found.append((path, config.limits.max_model_len or longest))
    if not found:
        raise ValueError("a workload by name needs a tokenizer: make one side an engine or a list of overrides")
    return found[0][0], min(room for _, room in found)
