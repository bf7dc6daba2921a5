"""How fast attention backends are beside the card's own copy bandwidth and matrix rate, and tokens/s with each of them.

    python tests/gpu/bench.py --out FOLDER      writes results.json and results.md; needs a GPU
    python tests/gpu/bench.py --out FOLDER --device cpu --small      the same code in miniature, to test it

Times are medians. A backend that can't be had, or refuses a case, is listed with its reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from turnout.compose import plugins
from turnout.core import Batch, KVSpec, LayerSpec
from turnout.core.interfaces import Auto

TARGETS = {"decode": 0.8, "prefill": 0.6}  # shares of copy bandwidth and of the matrix rate that issue 3 asks for


@dataclass
class Bench:
    """What was measured, and on what."""

    device: torch.device
    small: bool
    only: tuple[str, ...] = ()  # backends; none: every one
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def seconds(self, call: Callable[[], object], repeat: int = 20) -> float:
        """The median of some calls."""
        for _ in range(3):
            call()
        found = []
        for _ in range(3 if self.small else repeat):
            if self.device.type == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                found.append(begin.elapsed_time(end) / 1e3)
            else:
                started = time.perf_counter()
                call()
                found.append(time.perf_counter() - started)
        return statistics.median(found)

    def copy_rate(self) -> float:
        """Bytes read and written a second by a copy of 1 GiB."""
        source = torch.zeros((1 << 20) if self.small else (1 << 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

    def matrix_rate(self) -> float:
        """Floating-point operations a second of a large product."""
        size = 256 if self.small else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=self.dtype) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: a @ b)


def backends(bench: Bench) -> dict[str, Any]:
    """Name -> choice, of those asked for that run on such a device."""
    found = [c for c in plugins.load().choices.values() if c.slot == "attention" and c.component is not Auto]
    return {
        c.name: c
        for c in sorted(found, key=lambda choice: choice.name)
        if bench.device.type in (c.component.capabilities.devices or {bench.device.type})  # type: ignore[attr-defined]
        and (not bench.only or c.name in bench.only)
    }


def batch_of(lens: list[tuple[int, int]], block_size: int, device: torch.device) -> Batch:
    """(queries, keys) of each request, with blocks of its own."""
    width = max(-(-keys // block_size) for _, keys in lens)
    table = torch.arange(len(lens) * width).view(len(lens), width)[torch.randperm(len(lens))]
    positions = [torch.arange(keys - queries, keys) for queries, keys in lens]
    slots = [table[b, p // block_size] * block_size + p % block_size for b, p in enumerate(positions)]
    starts = torch.tensor([0, *(queries for queries, _ in lens)]).cumsum(0)
    host = [torch.tensor([pair[side] for pair in lens]) for side in (0, 1)]
    return Batch(
        torch.zeros(int(starts[-1]), dtype=torch.int64, device=device),
        torch.cat(positions).to(device),
        torch.cat(slots).to(device),
        table.to(torch.int32).to(device),
        starts.to(torch.int32).to(device),
        host[1].to(torch.int32).to(device),
        (starts[1:] - 1).to(device),
        tuple(host[0].tolist()),
        tuple(host[1].tolist()),
    )


def attention(bench: Bench, choice: Any, lens: list[tuple[int, int]], cache_dtype: str = "auto") -> tuple[float, int]:
    """(seconds of one `run`, bytes of keys and values read). 32 heads, 8 key heads of 128. Raises ValueError with the
    reasons where the backend refuses it."""
    layer = LayerSpec(4, 2, 64, 0.125) if bench.small else LayerSpec(32, 8, 128, 128**-0.5)
    size, device, dtype = 16, bench.device, bench.dtype
    why = choice.obstacles() + choice.component.capabilities.refusals([layer], size, dtype, device, cache_dtype)
    if why:
        raise ValueError("; ".join(why))
    backend, batch = choice.component(), batch_of(lens, size, device)
    (cache,) = backend.allocate(KVSpec((layer,), size, batch.block_table.numel(), cache_dtype), dtype, device)
    total = int(batch.query_start[-1])
    q = torch.randn(total, layer.num_heads, layer.head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(total, layer.num_kv_heads, layer.head_dim, device=device, dtype=dtype) for _ in range(2))
    plan = backend.plan(batch, layer, size)

    def call() -> object:
        return backend.run(q, k, v, cache, plan, None)

    tensors = cache if isinstance(cache, tuple) else (cache,)
    read = sum(t.nbytes for t in tensors) * sum(keys for _, keys in lens) // (batch.block_table.numel() * size)
    if device.type == "cuda" and backend.capabilities.graphs and all(queries == 1 for queries, _ in lens):
        call()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()
        return bench.seconds(graph.replay), read
    return bench.seconds(call), read


def kernels(bench: Bench, copy: float, matrix: float) -> None:
    """Decode and prefill of every backend and form of its cache."""
    decode = [(1, 64)] * 4 if bench.small else [(1, 4096)] * 64
    prompt = [(128, 128)] if bench.small else [(8192, 8192)]
    heads, dim = (4, 64) if bench.small else (32, 128)
    for name, choice in backends(bench).items():
        for form in ("auto", *sorted(choice.component.capabilities.cache_dtypes)):
            for kind, lens in (("decode", decode), ("prefill", prompt)):
                row: dict[str, Any] = {"what": kind, "backend": name, "cache": form}
                try:
                    seconds, read = attention(bench, choice, lens, form)
                except (ValueError, RuntimeError, ImportError) as error:
                    bench.rows.append(row | {"not run": f"{type(error).__name__}: {error}"[:200]})
                    continue
                num = prompt[0][0]
                rate = read / seconds if kind == "decode" else 2 * num * num * heads * dim / seconds
                share = rate / (copy if kind == "decode" else matrix)
                bench.rows.append(row | {"seconds": seconds, "rate": rate, "share": share, "target": TARGETS[kind]})


def serving(bench: Bench, model: str) -> None:
    """Output tokens/s of the whole engine: one stream, and 64 at once; eager, and replayed where a backend can be."""
    modes = ("eager",) if bench.device.type == "cpu" else ("eager", "graphs")
    for name, choice in backends(bench).items():
        for mode in modes if choice.component.capabilities.graphs else modes[:1]:
            row: dict[str, Any] = {"what": "tokens/s", "backend": name, "mode": mode}
            try:
                bench.rows.append(row | served(bench, model, [f"attention={name}", f"runner.mode={mode}"]))
            except (ValueError, RuntimeError, ImportError) as error:
                bench.rows.append(row | {"not run": f"{type(error).__name__}: {error}"[:200]})


def served(bench: Bench, model: str, overrides: list[str]) -> dict[str, float]:
    from hydra import compose, initialize_config_module

    import turnout.server.config  # noqa: F401  stores the schemas
    from turnout.compose.build import build_engine
    from turnout.compose.config import resolve
    from turnout.core import Request, Sampling

    with initialize_config_module("turnout.conf", version_base=None):
        composed = compose("serve", [f"model='{model}'", f"device={bench.device.type}", *overrides])
    engine = build_engine(resolve(composed))
    found = {}
    for streams in (1, 2 if bench.small else 64):
        length = 4 if bench.small else 128
        for _ in range(2):  # the first compiles
            sampling = Sampling(0, max_tokens=length, stop_ids=frozenset())
            asked = [
                Request(
                    f"{streams}-{i}-{time.monotonic_ns()}", [(17 * i + j) % 900 + 3 for j in range(length)], sampling
                )
                for i in range(streams)
            ]
            started = time.perf_counter()
            made = sum(len(output.tokens) for output in engine.generate(asked))
            found[f"{streams} streams"] = made / (time.perf_counter() - started)
    return found


def markdown(report: dict[str, Any]) -> str:
    """The tables of the report."""
    lines = [
        f"# {report['device']}",
        "",
        f"torch {report['torch']}, {report['date']}: {report['copy'] / 1e9:,.0f} GB/s copied, "
        + f"{report['matrix'] / 1e12:,.1f} TFLOP/s in a product.",
        "",
        "| what | backend | cache or mode | measured | share of the card's | target |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        how = row.get("cache") or row.get("mode")
        if "not run" in row:
            measured, share, target = f"not run: {row['not run']}", "", ""
        elif row["what"] == "tokens/s":
            measured, share, target = ", ".join(f"{k}: {v:,.0f}" for k, v in row.items() if "streams" in k), "", ""
        else:
            unit = "GB/s" if row["what"] == "decode" else "TFLOP/s"
            rate = row["rate"] / (1e9 if unit == "GB/s" else 1e12)
            measured = f"{rate:,.1f} {unit}, {row['seconds'] * 1e6:,.0f} µs"
            share, target = f"{row['share']:.0%}", f"{row['target']:.0%}"
        lines.append(f"| {row['what']} | {row['backend']} | {how} | {measured} | {share} | {target} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="smollm2", help="served for tokens/s; none: leave that out")
    parser.add_argument("--only", default="", help="backends, with commas between")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU: the numbers mean nothing")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --device cpu --small tries the script itself")
    bench = Bench(torch.device(asked.device), asked.small, tuple(filter(None, asked.only.split(","))))
    copy, matrix = bench.copy_rate(), bench.matrix_rate()
    kernels(bench, copy, matrix)
    if asked.model != "none":
        serving(bench, asked.model)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    report = {
        "device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "copy": copy, "matrix": matrix,
        "rows": bench.rows,
    }  # fmt: skip
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "results.json").write_text(json.dumps(report, indent=1))
    (asked.out / "results.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
