"""What is compared on: prompts cut to given lengths from text every Python brings along, questions, or a file.

The text is the source of standard-library modules: English sentences and code, the same in every run of one Python. Both
sides get the same prompts, so that another Python has others takes nothing from the comparison.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from turnout.lab.compare.sides import Item
from turnout.lab.workload.files import opened
from turnout.server.text.tokenizer import Text

MODULES = (
    "argparse",
    "asyncio.events",
    "datetime",
    "difflib",
    "doctest",
    "email.message",
    "heapq",
    "logging",
    "optparse",
    "pathlib",
    "pickletools",
    "random",
    "statistics",
    "string",
    "tarfile",
    "textwrap",
    "typing",
    "uuid",
)
LENGTHS = {  # tokens; drawn evenly on a logarithmic scale
    "short": (8, 128),
    "mixed": (16, 1024),
    "long_context": (512, 8192),
}
ATTENTION = ((8, 64), (320, 1024))  # of three quarters, and of the rest: faults of attention show in long contexts
FACTS = (
    ("The capital of France is", "Paris"),
    ("The capital of Italy is", "Rome"),
    ("The capital of Japan is", "Tokyo"),
    ("The capital of Germany is", "Berlin"),
    ("The capital of Spain is", "Madrid"),
    ("The opposite of hot is", "cold"),
    ("The opposite of up is", "down"),
    ("Two plus two equals", "4"),
    ("Monday, Tuesday, Wednesday,", "Thursday"),
    ("January, February, March,", "April"),
    ("one, two, three, four,", "five"),
    ("a, b, c, d, e,", "f"),
    ("The sun rises in the", "east"),
    ("Water freezes at zero degrees", "Celsius"),
    ("The largest planet of the solar system is", "Jupiter"),
    ("The author of Romeo and Juliet is William", "Shakespeare"),
    ("The first president of the United States was George", "Washington"),
    ("A triangle has three", "sides"),
    ("The chemical symbol of gold is", "Au"),
    ("The past tense of go is", "went"),
    ("The plural of mouse is", "mice"),
    ("A year has twelve", "months"),
    ("The language spoken in Brazil is", "Portuguese"),
    ("The Pacific is the largest", "ocean"),
)
BUILT_IN = (*LENGTHS, "attention", "facts")
AUTO = "auto"


def chosen(workload: str, attention: bool, otherwise: str) -> str:
    """`auto` as the workload it stands for; `attention`: whether sides differ in what attends or in how keys are kept."""
    if workload != AUTO:
        return workload
    return "attention" if attention else otherwise


def load(workload: str, text: Text, num_prompts: int, longest: int, max_tokens: int, seed: int) -> list[Item]:
    """Up to `num_prompts` items that fit into a context of `longest` tokens and leave room for `max_tokens`. Raises
    ValueError for a workload that is neither built in nor a readable file, naming the line that is wrong."""
    room = longest - max_tokens
    if room < 1:
        raise ValueError(f"max_tokens={max_tokens} leaves no room for a prompt in a context of {longest} tokens")
    if workload == "facts":
        return list(itertools.islice(_facts(text, room), num_prompts))
    if workload == "attention":
        num_long = -(-num_prompts // 4)
        kinds = ((num_prompts - num_long, ATTENTION[0], seed), (num_long, ATTENTION[1], seed + 1))
        cut = [
            item for num, (low, high), dice in kinds for item in _cuts(text, num, min(low, room), min(high, room), dice)
        ]
        return [replace(item, id=f"text {number}") for number, item in enumerate(cut)]
    if workload in LENGTHS:
        least, most = LENGTHS[workload]
        facts = list(itertools.islice(_facts(text, room), num_prompts // 3 if workload == "mixed" else 0))
        return [*facts, *_cuts(text, num_prompts - len(facts), min(least, room), min(most, room), seed)]
    path = Path(workload)
    if not path.is_file():
        raise ValueError(f"workload={workload}: there is no such file, and built in are {', '.join(BUILT_IN)}")
    items = list(itertools.islice(_from_file(path, text), num_prompts))
    for item in items:
        need = len(item.prompt) + max(len(item.continuation), max_tokens)
        if need > longest:
            raise ValueError(
                f"{path}: {item.id} needs room for {need} tokens, max_tokens={max_tokens} included, but the shortest "
                f"context of a side has {longest}"
            )
    if len({item.id for item in items}) < len(items):
        raise ValueError(f"{path}: two items have one id")
    return items


def _facts(text: Text, room: int) -> Iterator[Item]:
    for number, (question, answer) in enumerate(FACTS):
        ids = text.encode(question)
        if len(ids) <= room:
            yield Item(f"fact {number}", tuple(ids), text=question, answer=answer)


def _cuts(text: Text, num: int, least: int, most: int, seed: int) -> Iterator[Item]:
    dice = random.Random(seed)
    source = "\n".join(map(_source, MODULES))
    for number in range(num):
        share = number / max(num - 1, 1)
        length = round(least * (most / least) ** share)
        start = source.index("\n", dice.randrange(len(source) - 8 * most)) + 1
        ids = text.encode(source[start : start + 8 * length])[:length]
        yield Item(f"text {number}", tuple(ids), text=text.decode(ids))


def _source(name: str) -> str:
    """A module's text, without running it."""
    spec = importlib.util.find_spec(name)
    found = getattr(spec.loader, "get_source", lambda name: None)(name) if spec else None
    if not isinstance(found, str):
        raise ValueError(f"this Python has no source of its module {name}: give workload=FILE")  # noqa: TRY004
    return found


def _from_file(path: Path, text: Text) -> Iterator[Item]:
    """JSON lines, or a recording."""
    if _is_recording(path):
        yield from _recorded(path, text)
        return
    with opened(str(path)) as file:
        for number, line in enumerate(file, 1):
            try:
                fields = json.loads(line)
                prompt = _ids(fields.get("prompt", []), text, start=True)
                continuation = _ids(fields.get("continuation", []), text, start=False)
                if not prompt:
                    raise ValueError("it has no prompt")
                if not isinstance(fields.get("answer", ""), str):
                    raise ValueError(f"an answer is a text, got {fields['answer']!r:.60}")  # noqa: TRY004
            except (ValueError, AttributeError, TypeError) as error:
                raise ValueError(f'{path}, line {number}: {error}; a line is {{"prompt": text or ids, …}}') from error
            shown = fields["prompt"] if isinstance(fields["prompt"], str) else text.decode(prompt)
            name = str(fields.get("id", f"line {number}"))
            yield Item(name, tuple(prompt), tuple(continuation), shown, fields.get("answer"))


def _is_recording(path: Path) -> bool:
    with opened(str(path)) as file:
        try:
            first = json.loads(file.readline())
        except ValueError:
            return False
    return isinstance(first, dict) and "turnout" in first


def _ids(value: object, text: Text, *, start: bool) -> list[int]:
    """`start`: with the tokens that the tokenizer puts before a text."""
    if isinstance(value, str):
        return text.encode(value, add_special_tokens=start)
    if isinstance(value, list) and all(isinstance(token, int) for token in value):
        return value
    raise ValueError(f"a prompt or continuation is a text or a list of token ids, got {value!r:.60}")


def _recorded(path: Path, text: Text) -> Iterator[Item]:
    from turnout.lab.workload.recorded import arrivals

    for arrival, _ in arrivals(str(path)):
        prompt = arrival.request.tokens
        yield Item(arrival.request.id, tuple(prompt), tuple(arrival.answer or ()), text.decode(prompt))
