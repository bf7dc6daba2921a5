"""Compiles our Triton kernels for a GPU that is not here, through the code that launches them: `python compiling.py 90`.

Prints one JSON object for each kernel: its name, shared memory in bytes, whether matrix units are used. Triton's
compiler, NVIDIA's assembler among it, comes with the package and needs no GPU; only a driver would ask for one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from turnout.core import Batch, KVSpec, LayerSpec
from turnout.kernels.triton import layers, scaled
from turnout.plugins.attention import triton as attention
from turnout.plugins.quant.grouped import Grouped

META = torch.device("meta")  # tensors without memory: nothing is launched


class NoDriver:
    """What the compiler asks a driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def attend(dtype: torch.dtype, layer: LayerSpec, form: str = "auto", **options: int) -> None:
    """One prompt and one decode, its keys split."""
    backend = attention.TritonAttention(num_splits=4, **options)
    (cache,) = backend.allocate(KVSpec((layer,), 16, 64, form), dtype, META)
    long, short = torch.int64, torch.int32
    batch = Batch(
        of(long, 101), of(long, 101), of(long, 101), of(short, 2, 256), of(short, 3), of(short, 2), of(long, 2),
        (1, 100), (100, 100),
    )  # fmt: skip
    heads, v_dim = layer.num_kv_heads, layer.v_head_dim or layer.head_dim
    q, k, v = (
        of(dtype, 101, n, d) for n, d in ((layer.num_heads, layer.head_dim), (heads, layer.head_dim), (heads, v_dim))
    )
    backend.run(q, k, v, cache, backend.plan(batch, layer, 16), of(dtype, layer.num_heads) if layer.sinks else None)


def jobs(capability: int) -> Iterator[object]:
    """Each is a call that compiles something. Ampere: what is compiled otherwise than on Hopper."""
    half = torch.bfloat16 if capability >= 90 else torch.float16
    x = of(half, 5, 4096)
    yield attend(half, LayerSpec(32, 8, 128, 0.1))
    yield attend(half, LayerSpec(32, 8, 80, 0.1, window=100, softcap=30.0, sinks=True, v_head_dim=64), "fp8")
    yield eight_bit(torch.float8_e4m3fn, x, 128)
    if capability >= 90:
        yield attend(half, LayerSpec(28, 4, 256, 0.1), "int8", block_n=16)
        yield attend(torch.float32, LayerSpec(8, 2, 64, 0.1))
        yield eight_bit(torch.int8, x, None)
        yield layers.rms_norm(x, of(half, 4096), 1e-5, residual=of(half, 5, 4096))
        yield layers.silu_mul(x)
        yield layers.rotate(of(half, 5, 14, 80), of(half, 5, 2, 80), of(half, 5, 48), of(half, 5, 48))
        for bits in (4, 8):
            codes, scales = of(torch.uint8, 512, 4096 * bits // 8), of(torch.float16, 512, 32)
            yield Grouped(codes, scales, scales, bits, 128, kernel="triton")(x)


def eight_bit(dtype: torch.dtype, x: torch.Tensor, block: int | None) -> torch.Tensor:
    codes, scales = of(dtype, 512, x.shape[1]), of(torch.float32, 512, x.shape[1] // block if block else 1)
    return scaled.product(scaled.encode(x, dtype, block), codes, scales, block, x.dtype)


def main(capability: int) -> None:
    driver.set_active(NoDriver(capability))
    for module in (attention, scaled):
        module.has_fp8 = lambda device: capability >= 89  # type: ignore[attr-defined]
    compile_and_launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        made = compile_and_launch(self, *args, grid=grid, warmup=True, **more)
        units = "mma" in made.asm["ptx"]
        print(json.dumps({"name": self.__name__, "shared": made.metadata.shared, "matrix_units": units}), flush=True)
        return made

    JITFunction.run = compile_only
    for _ in jobs(capability):
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
