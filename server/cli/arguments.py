"""The words of a command line as Hydra should get them: conventional flags as keys, a prompt told from an override.

    --port 9000  -m  scheduler=fcfs     ─▶  server.port=9000 scheduler=fcfs -m
    "-1 + 1 =" sampling.max_tokens=4    ─▶  the prompt, and an override

It composes nothing but a command's defaults, to learn its keys.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from turnout.compose.plugins import SLOTS, Plugins
from turnout.server.cli.keys import did_you_mean, keys_of
from turnout.server.cli.overrides import MANY, WITH_VALUE, Usage, try_composing
from turnout.server.config import GenerateConfig

HELP = ("-h", "--help")
ALONE = (
    *MANY,
    *HELP,
    "--hydra-help",
    "--version",
    "-r",
    "--run",
    "-sc",
    "--shell-completion",
    "-i",
    "--info",
    "--resolve",
)
ALIASES = {  # what other servers call it -> our key
    "attention_backend": "attention",
    "context_length": "limits.max_model_len",
    "ctx_size": "limits.max_model_len",
    "enable_prefix_caching": "blocks.prefix_cache",
    "enforce_eager": "enforce_eager",
    "max_new_tokens": "sampling.max_tokens",
    "max_running_requests": "limits.max_num_seqs",
    "mem_fraction_static": "limits.gpu_memory_utilization",
    "model_path": "model",
    "num_gpu_blocks_override": "blocks.num_blocks",
    "quantization": "quant",
    "scheduling_policy": "scheduler",
}
NEUTRAL = {  # flag -> the value that asks for nothing, and what is so
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "tp", "tp_size", "pp", "dp"),
        ("1", "an engine runs on one device; start a server for each device and balance between them"),
    ),
    "trust_remote_code": (
        "false",
        "code that lies beside a model is never run; transformers must know its architecture",
    ),
}
FLAG = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w-]*)([\w./@:-]*)=(.*)", re.DOTALL)


def ordered(args: Iterable[str], command: str, found: Plugins) -> list[str]:
    """Overrides first, then Hydra's flags with their values: its parser takes them in no other order.

    Raises Usage for a flag that names no key.
    """
    overrides: list[str] = []
    flags: list[str] = []
    words = deque(args)
    while words:
        word = words.popleft()
        name = word.partition("=")[0]
        if name in WITH_VALUE:
            flags += [word, *([words.popleft()] if word == name and words else [])]
        elif name in ALONE:
            flags.append(word)
        elif word == "--":
            raise Usage(f"turnout {command} takes no text, so nothing can stand behind --")
        elif FLAG.fullmatch(word):
            overrides += _meant(word, words, _kinds(command, found))
        else:
            overrides.append(word)
    return overrides + flags


def _meant(word: str, words: deque[str], kinds: dict[str, str]) -> list[str]:
    """The override that a flag stands for; its value is taken from `words` unless it is in `word`."""
    flag, equals, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    wanted = name.removeprefix("no_")
    key = name if name in NEUTRAL else _key(name, kinds) or _key(wanted, kinds)
    if key is None:
        near = did_you_mean(wanted, kinds)
        raise Usage(f"there is no flag {flag}{near or '; options are written KEY=VALUE, and --help lists them'}")
    switch = kinds.get(key) == "bool" or key in ("enforce_eager", "trust_remote_code")
    if not equals:
        if switch and not (words and words[0].lower() in ("true", "false")):
            value = "false" if key != name and name.startswith("no_") and _key(name, kinds) is None else "true"
        elif words:
            value = words.popleft()
        else:
            raise Usage(f"{flag} needs a value: {flag} VALUE, or {key}=VALUE")
    if key in NEUTRAL:
        neutral, why = NEUTRAL[key]
        if value.lower() != neutral:
            raise Usage(f"{flag} {value} is not supported: {why}. Leave it out")
        return []
    return [f"{key}={value}"]


def _key(name: str, kinds: dict[str, str]) -> str | None:
    """The one key that a flag's name is, or ends."""
    if name in kinds:
        return name
    if ALIASES.get(name) in kinds:
        return ALIASES[name]
    ending = [key for key in kinds if key.rpartition(".")[2] == name]
    return ending[0] if len(ending) == 1 else None


def _kinds(command: str, found: Plugins) -> dict[str, str]:
    """Every key of a command as it is by default, with its type; "" for those that take the name of a choice."""
    composed = try_composing(command, [], found)
    slots = dict.fromkeys((slot for slot in SLOTS if slot in composed), "")
    return slots | {key.name: key.kind for key in keys_of(composed)} | {"enforce_eager": "bool", "experiment": ""}


def split_prompt(args: list[str], found: Plugins) -> tuple[list[str], str | None]:
    """The arguments of `turnout generate` in Hydra's order, and the prompt among them, if one is.

    What stands behind `--` is a prompt whatever it looks like. Raises Usage for more than one.
    """
    end = args.index("--") if "--" in args else len(args)
    texts, words = args[end + 1 :], ordered(args[:end], "generate", found)
    flags = next(
        (i for i, word in enumerate(words) if word in ALONE or word.partition("=")[0] in WITH_VALUE), len(words)
    )
    heads = {
        *SLOTS,
        *(spec.name for spec in dataclasses.fields(GenerateConfig)),
        "experiment",
        "enforce_eager",
        "hydra",
    }
    kept: list[str] = []
    for word in words[:flags]:
        (kept if is_override(word, heads) else texts).append(word)
    if not texts and not any(word.startswith("prompt=") for word in kept):
        doubtful = [word for word in kept if _reads_as_text(word)]
        if len(doubtful) == 1:  # model=2 means: no such model, and nothing else to complete
            logging.getLogger("turnout").warning(
                "%r is taken for the prompt: a value with spaces is quoted", doubtful[0]
            )
            texts = doubtful
            kept.remove(doubtful[0])
    if len(texts) > 1:
        raise Usage(f"there is one prompt, in one pair of quotes; {len(texts)} arguments are no overrides: {texts}")
    looks_set = bool(texts) and end == len(args) and re.fullmatch(r"[\w.]+=\S+", texts[0])
    if looks_set and (near := did_you_mean(texts[0].partition("=")[0], heads)):
        raise Usage(f"{texts[0]!r} sets nothing{near} A prompt that looks so stands behind --")
    return kept + words[flags:], texts[0] if texts else None


def is_override(word: str, heads: Collection[str]) -> bool:
    """Whether a word sets, adds or deletes one of the keys below `heads`."""
    found = OVERRIDE.fullmatch(word) or re.fullmatch(r"~([A-Za-z_]\w*)([\w./@:]*)", word)
    return bool(found and found.group(1) in heads)


def _reads_as_text(word: str) -> bool:
    value = word.partition("=")[2]
    return bool(re.search(r"\s", value)) and value[:1] not in "'\"[{" and not Path(value).exists()
