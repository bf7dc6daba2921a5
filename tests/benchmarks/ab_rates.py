"""How often the verdict of `turnout ab` is right, on a tiny model: identical compositions, and each planted fault.

    python tests/benchmarks/ab_rates.py --runs 100 --far-runs 20 --out rates.json

Every run has other prompts and another seed. `far` runs have contexts beyond 1,024 tokens; `real` runs are on the demo model.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import torch
from ab_faults import FourBits, Hot, Swapped
from engines import engine_on
from models import save

from turnout.core.interfaces import Quantizer
from turnout.lab.compare.run import Settings, compare
from turnout.lab.compare.sides import EngineSide, Item
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.quant.none import Unquantized

WRONG = "model.layers.1.self_attn.v_proj"
WINDOW = 24
NUM_BLOCKS = 1500


def side(name: str, model: Model, attention: str = "torch", kind: type[EngineSide] = EngineSide) -> EngineSide:
    limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 32}
    return kind(name, engine_on(model, attention=attention, num_blocks=NUM_BLOCKS, **limits))


def prompts(*spans: tuple[int, int, int]) -> Callable[[int], list[Item]]:
    """For each (number, shortest, longest), so many prompts; others for each seed."""

    def make(seed: int) -> list[Item]:
        dice = random.Random(seed)
        lengths = [dice.randrange(low, high) for num, low, high in spans for _ in range(num)]
        return [Item(str(i), tuple(dice.randrange(5, 120) for _ in range(n))) for i, n in enumerate(lengths)]

    return make


def judged(
    a: EngineSide, others: Sequence[EngineSide], runs: int, items: Callable[[int], list[Item]]
) -> dict[str, Counter[str]]:
    """How often each verdict was given for each of `others`."""
    found: dict[str, Counter[str]] = {b.name: Counter() for b in others}
    began = time.perf_counter()
    for number in range(runs):
        settings = Settings(max_tokens=12, num_top=10, seed=number)
        for b, one in zip(others, compare(a, others, items(number), settings), strict=True):
            found[b.name][one.verdict.name] += 1
        print(
            f"\r{number + 1} of {runs} runs, {time.perf_counter() - began:.0f} s", end="", file=sys.stderr, flush=True
        )
    print(file=sys.stderr)
    return found


def real(runs: int) -> dict[str, Counter[str]]:
    """The demo model, on texts."""
    from turnout.compose import plugins
    from turnout.lab.ab import workload
    from turnout.plugins.loader import checkpoint
    from turnout.server.text.tokenizer import Text

    folder = checkpoint.resolve("smollm2", plugins.load().formats())
    text = Text.load(folder)
    model = load(inspect(folder, "float32", "cpu"), Unquantized())
    others = [side("SmolLM2, identical", model), side("SmolLM2, attention scale off by 1 %", model, "scaled")]
    others += [side("SmolLM2, last part-full block dropped", model, "dropped")]
    others += [side("SmolLM2, temperature 0.8 became 1.2", model, kind=Hot)]

    def items(number: int) -> list[Item]:
        return workload.load("short", text, 21, 256, 12, number)

    return judged(side("a", model), others, runs, items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--far-runs", type=int, default=20)
    parser.add_argument("--real-runs", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save("mistral", Path(scratch), sliding_window=WINDOW, max_position_embeddings=2048)
        deep = save("llama", Path(scratch) / "deep", max_position_embeddings=2048)  # sees all of a long context

        def loaded(quantizer: Quantizer, path: Path = folder) -> Model:
            return load(inspect(str(path), "float32", "cpu"), quantizer)

        model, far = loaded(Unquantized()), loaded(Unquantized(), deep)
        rounded, wrong = loaded(FourBits()), loaded(FourBits(WRONG))
    faults = {"scaled": "attention scale off by 1 %", "wider window": "window off by one"}
    faults |= {
        "swapped": f"two blocks swapped beyond {Swapped.beyond} tokens",
        "dropped": "last part-full block dropped",
    }
    near = prompts((14, 4, 60), (10, 84, 119))
    others = [side("identical", model), *(side(text, model, name) for name, text in faults.items())]
    found = judged(side("a", model), [*others, side("temperature 0.8 became 1.2", model, kind=Hot)], asked.runs, near)
    four = [side("identical, four bits", rounded), side("one zero point off by one", wrong)]
    found |= judged(side("a", rounded), four, asked.runs, near)
    swapped = [side("identical, far", far), side("two blocks swapped beyond 1024 tokens", far, "swapped far")]
    found |= judged(side("a", far), swapped, asked.far_runs, prompts((8, 4, 60), (16, 1060, 1150)))
    found |= real(asked.real_runs) if asked.real_runs else {}
    for name, verdicts in found.items():
        print(f"{name:45} {dict(verdicts)}")
    if asked.out is not None:
        asked.out.write_text(json.dumps({name: dict(verdicts) for name, verdicts in found.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
