"""What each quantizer does to answers and memory, beside float32, as the table of docs/quantization.md.

    python tests/benchmarks/quantizers.py int8 fp8 gguf kv_cache_dtype=int8 gptq=FOLDER awq=FOLDER

Each argument is a side: a quantizer made on the fly, a Hydra override, or a quantizer with the checkpoint it reads.
Every side runs in a process of its own: perplexity and the likeliest token at every place of one fixed text (Turnout's
license and Python's own, in pieces of several lengths), and the bytes its weights keep in memory. KL divergence is over
the 20 likeliest tokens of float32, all others as one: a lower bound.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

PIECES = (32, 64, 128, 256, 512, 1024, 2048)  # tokens
TOP = 20


def text() -> str:
    import sysconfig

    own = Path(__file__).parents[2] / "LICENSE"
    python = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    return own.read_text() + (python.read_text() if python.exists() else "")


def overrides(side: str) -> list[str]:
    name, equals, value = side.partition("=")
    if not equals:
        return [f"quant={name}"]
    return [side] if name in ("quant", "kv_cache_dtype", "dtype", "attention") else [f"quant={name}", f"model={value}"]


def measure(words: str, changes: list[str]) -> dict[str, Any]:
    """Runs in its own process. `words`: the folder of the tokenizer, one for all sides; empty: the model's own."""
    import psutil
    from hydra import compose, initialize_config_module
    from transformers import AutoTokenizer

    import turnout.lab.ab.config  # noqa: F401  stores the schema
    from turnout.compose import plugins
    from turnout.compose.build import build_engine
    from turnout.compose.config import resolve
    from turnout.core import Request, Sampling

    plugins.load()
    common = ["blocks.prefix_cache=false", "blocks.num_blocks=512", "limits.max_model_len=4096"]
    with initialize_config_module("turnout.conf", version_base=None):
        engine = build_engine(resolve(compose("engine", [*common, *changes])))
    tokens = AutoTokenizer.from_pretrained(words or engine.info.path)(text())["input_ids"]
    places: dict[str, list[Any]] = {}
    start = 0
    for size in PIECES:
        name, piece = f"{size}", tokens[start : start + size]
        start += size
        engine.add(Request(name, piece, Sampling(0, max_tokens=0, prompt_logprobs=TOP)))
        found: list[Any] = []
        while engine.busy:
            found += [mark for output in engine.step() for mark in output.prompt_logprobs]
        places[name] = [(mark.token, mark.logprob, list(mark.top)) for mark in found]
    return {
        "path": engine.info.path,
        "places": places,
        "rss": psutil.Process().memory_info().rss,
        "notes": engine.info.notes,
    }


def compare(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    kl, count, loss, flips = 0.0, 0, 0.0, {}
    for name, marks in one["places"].items():
        flipped = 0
        for (_, _, top), (_, logprob, theirs) in zip(marks, other["places"][name], strict=True):
            seen = dict(map(tuple, theirs))
            lowest = min(seen.values())
            p = [math.exp(value) for _, value in top]
            q = [math.exp(seen.get(token, lowest)) for token, _ in top]
            rest = max(1 - sum(p), 1e-12), max(1 - sum(q), 1e-12)
            kl += sum(a * math.log(a / b) for a, b in zip([*p, rest[0]], [*q, rest[1]], strict=True))
            flipped += top[0][0] != theirs[0][0]
            loss -= logprob
            count += 1
        flips[name] = flipped / len(marks)
    return {"kl": kl / count, "perplexity": math.exp(loss / count), "flips": flips, "tokens": count}


def run(side: str, words: str = "") -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", words, *overrides(side)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side}: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(sides: list[str]) -> None:
    base = run("none")
    print("| | KL | perplexity | " + " | ".join(f"flips, {size}" for size in PIECES) + " | resident |")
    print("|---" * (len(PIECES) + 4) + "|")
    for side in ("none", *sides):
        found = base if side == "none" else run(side, base["path"])
        m = compare(base, found)
        flips = " | ".join(f"{share:.1%}" for share in m["flips"].values())
        print(
            f"| `{side}` | {m['kl']:.2g} | {m['perplexity']:.3f} | {flips} | {found['rss'] / 2**20:.0f} MiB |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3:])))
    else:
        main(sys.argv[1:])
