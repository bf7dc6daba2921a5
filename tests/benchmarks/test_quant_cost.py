"""What quant=int8 gives on the demo model: decode steps and resident memory beside float32, products beside torch's.

Run with `make bench`; times are shown, never asserted. Memory is compared with the arithmetic.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from turnout.compose import plugins
from turnout.core import Request, Sampling
from turnout.core.engine import Engine
from turnout.kernels import cpu as native
from turnout.lab import open_engine
from turnout.plugins.quant import int8_linear
from turnout.plugins.quant.fp8 import Fp8
from turnout.plugins.quant.int8 import Int8
from turnout.plugins.quant.none import Unquantized

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}"),
]
SHAPE = 1536, 576  # outputs, inputs
QUANTIZERS: dict[str, Callable[[], Any]] = {
    "none": Unquantized,
    "int8": Int8,
    "int8-float-head": lambda: Int8(head=False),
    "fp8": Fp8,
}


@cache
def engine(name: str) -> Engine:
    """The demo model."""
    quantizer = {"int8-float-head": ["quant=int8", "quant.head=false"]}.get(name, [f"quant={name}"])
    return open_engine(["dtype=float32", "attention=cpu", "blocks.num_blocks=1024", *quantizer])


def memory(name: str) -> dict[str, float]:
    """MB of the demo model alone: what its sizes say, what its tensors hold, and what this process grew by."""
    from turnout.plugins.loader import Transformers
    from turnout.plugins.loader.model import inspect, load

    path = Transformers().find("smollm2", plugins.load().formats(), lambda stage: None)
    info = inspect(path, "float32", "cpu")
    load(info, QUANTIZERS["none"]())  # what the libraries need for themselves is not counted
    before = resident()
    quantizer = QUANTIZERS[name]()
    made: list[tuple[int, int, int]] = []  # outputs, inputs, bytes of a weight

    class Counting:
        checkpoint_formats = quantizer.checkpoint_formats

        def linear(self, layer: str, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
            module: torch.nn.Module = quantizer.linear(layer, tensors)
            made.append((*tensors["weight"].shape, 4 if type(module) is torch.nn.Linear else 1))  # type: ignore[arg-type]
            return module

    net = load(info, Counting())._net  # type: ignore[arg-type]
    grown = resident() - before
    dim, layers = net.config.hidden_size, net.config.num_hidden_layers
    tied = made[-1][2] == 4  # a float head is the embedding itself
    said = sum(outs * (ins * size + (4 if size == 1 else 0)) for outs, ins, size in made)
    said += 4 * (dim * (2 * layers + 1) + (0 if tied else info.vocab_size * dim))
    tensors = [*net.parameters(), *net.buffers()]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    return {"arithmetic": said / 1e6, "tensors": held / 1e6, "resident": grown / 1e6}


def resident() -> int:
    """Bytes of memory of this process's own, files it has mapped left out; freed memory given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.benchmark(group="memory of the model")
@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_memory(benchmark: Any, name: str) -> None:
    """Each in a process of its own; the time is that of loading, libraries included."""

    def measured() -> dict[str, float]:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    found = benchmark.pedantic(measured, rounds=1)
    benchmark.extra_info |= {key: round(value, 1) for key, value in found.items()}
    assert abs(found["tensors"] - found["arithmetic"]) < 0.01 * found["arithmetic"]


@pytest.mark.benchmark(group="decode step")
@pytest.mark.parametrize("num", [1, 16])
@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_decode_step(benchmark: Any, name: str, num: int) -> None:
    built = engine(name)
    for i in range(num):
        prompt = [(i * 37 + j * 11) % 40_000 + 100 for j in range(32)]
        built.add(Request(f"{name}-{num}-{i}", prompt, Sampling(0, max_tokens=200)))
    built.step()
    benchmark.pedantic(built.step, rounds=40, warmup_rounds=3)
    while built.busy:
        built.step()


@pytest.mark.benchmark(group="product")
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize("kind", ["float32", "torch dynamic int8", "native int8"])
def test_product(benchmark: Any, kind: str, rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(SHAPE), torch.randn(rows, SHAPE[1])
    benchmark.extra_info["flop"] = 2 * rows * SHAPE[0] * SHAPE[1]
    if kind == "float32":
        benchmark(lambda: F.linear(x, weight))
    elif kind == "native int8":
        layer = int8_linear.make("it", *int8_linear.quantized("it", weight), None, None, "native")
        benchmark(lambda: layer(x))
    else:
        benchmark(_torchs_own(weight, x))


def _torchs_own(weight: torch.Tensor, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """fbgemm or oneDNN behind torch's dynamic int8 linear."""
    scale = float(weight.abs().amax()) / 127
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop it some day
        packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(weight, scale, 0, torch.qint8), None)
    return lambda: torch.ops.quantized.linear_dynamic(x, packed)


if __name__ == "__main__":
    print(json.dumps(memory(sys.argv[1])))
