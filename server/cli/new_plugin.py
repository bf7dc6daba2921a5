"""`turnout plugins new SLOT NAME`: a package with a plugin that works, its tests and what CI runs. It imports no plugin."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import NamedTuple

from turnout.compose.choices import ALL_SLOTS
from turnout.compose.plugins import PluginError


class Kind(NamedTuple):
    contract: str  # what register() takes, for type checkers
    kit: str
    imports: str
    code: str


SCHEDULER = '''
@dataclass
class $Class(Policy):
    """Short prompts first; a second of waiting is worth `ageing` tokens, so that long ones get their turn."""

    ageing: float = 64.0  # tokens per second

    def __post_init__(self) -> None:
        if self.ageing < 0:
            raise ValueError(f"scheduler.ageing must not be negative, got {self.ageing}")

    def score(self, request: RequestView, draft: Draft) -> float:
        """Who is admitted first. `order`, `filter` and `victim` may be overridden too; or write `schedule` instead."""
        return self.ageing * (draft.now - request.arrived) - request.num_pending
'''
PREEMPTION = '''
@dataclass
class $Class:
    """Whoever has generated least makes room; its keys and values are computed again."""

    num_host_blocks: int = 0  # blocks of host memory for swapped requests

    def victim(self, candidates: Sequence[RequestView], draft: Draft) -> RequestView:
        return min(reversed(candidates), key=lambda request: request.num_generated)

    def mode(self, request: RequestView, draft: Draft) -> PreemptMode:
        return PreemptMode.SWAP if self.num_host_blocks else PreemptMode.RECOMPUTE
'''
ATTENTION = '''
Cache = tuple[Tensor, Tensor]  # keys, values: each [num_blocks, block_size, kv_heads, head_dim]


class Plan(NamedTuple):
    batch: Batch
    layer: LayerSpec


@dataclass
class $Class:
    """Gathers each request's keys and values, and calls PyTorch's scaled_dot_product_attention."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}), window=True, v_head_dim=True
    )

    def allocate(self, spec: KVSpec, dtype: torch.dtype, device: torch.device) -> list[Cache]:
        def side(layer: LayerSpec, size: int) -> Tensor:
            return torch.zeros(spec.num_blocks, spec.block_size, layer.num_kv_heads, size, dtype=dtype, device=device)

        return [(side(one, one.head_dim), side(one, one.v_head_dim or one.head_dim)) for one in spec.layers]

    def plan(self, batch: Batch, layer: LayerSpec, block_size: int) -> Plan:
        return Plan(batch, layer)

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, plan: Plan, sinks: Tensor | None) -> Tensor:
        batch, layer = plan
        for side, new in zip(cache, (k, v), strict=True):
            side.flatten(0, 1)[batch.slots] = new
        out, first = q.new_empty(*q.shape[:2], v.shape[-1]), 0
        for row, (num_q, num_k) in enumerate(zip(batch.query_lens_host, batch.kv_lens_host, strict=True)):
            blocks = batch.block_table[row, : -(-num_k // cache[0].shape[1])].long()
            keys, values = (side[blocks].flatten(0, 1)[:num_k].transpose(0, 1) for side in cache)
            seen = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
            if layer.window is not None:
                seen = seen.triu(num_k - num_q - layer.window + 1)
            group = layer.num_heads // layer.num_kv_heads
            keys, values = keys.repeat_interleave(group, 0).float(), values.repeat_interleave(group, 0).float()
            queries = q[first : first + num_q].transpose(0, 1).float()
            got = F.scaled_dot_product_attention(queries, keys, values, seen, scale=layer.scale)
            out[first : first + num_q] = got.transpose(0, 1).to(q.dtype)
            first += num_q
        return out
'''
QUANT = '''
class $Class8(nn.Module):
    """A layer whose weights are 8-bit integers with a scale for each output."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        self.register_buffer("codes", (weight.float() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        return self.codes * self.scales

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@dataclass
class $Class:
    """Weights rounded to 8 bits."""

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset()  # it reads floats only

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        return $Class8(tensors["weight"], tensors.get("bias"))
'''
KINDS = {
    "scheduler": Kind(
        "Scheduler", "SchedulerContract", "from turnout.core import Draft, Policy, RequestView", SCHEDULER
    ),
    "preemption": Kind(
        "Preemption",
        "PreemptionContract",
        "from collections.abc import Sequence\n\nfrom turnout.core import Draft, PreemptMode, RequestView",
        PREEMPTION,
    ),
    "attention": Kind(
        "AttentionBackend[Any, Any]",
        "AttentionContract",
        "from typing import ClassVar, NamedTuple\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import Tensor\n\n"
        "from turnout.core import Batch, Capabilities, KVSpec, LayerSpec",
        ATTENTION,
    ),
    "quant": Kind(
        "Quantizer",
        "QuantizerContract",
        "from collections.abc import Mapping\nfrom typing import ClassVar\n\nimport torch\nimport torch.nn.functional as F\n"
        "from torch import Tensor, nn",
        QUANT,
    ),
}
FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "$dist"
version = "0.1.0"
description = "$slot=$name for Turnout"
requires-python = ">=3.11"
dependencies = ["turnout"]

[project.optional-dependencies]
test = ["pytest>=8"$extra]

[project.entry-points.turnout]
$name = "$name"
""",
    "README.md": """\
# $dist

    pip install --editable '.[test]'
    turnout plugins check $slot=$name
    turnout serve $slot=$name
    pytest
""",
    "$name/__init__.py": '''\
"""`$slot=$name` for Turnout."""

from typing import Any

from turnout.core import $core, Register, hookimpl

from $name.$slot import $Class


@hookimpl
def $hook(register: Register[$contract]) -> None:
    register("$name", $Class)
''',
    "$name/$slot.py": '''\
"""What `$slot=$name` is."""

from __future__ import annotations

from dataclasses import dataclass
$imports

$code''',
    "tests/test_$name.py": '''\
"""The rules of the $slot contract, one test for each."""

from turnout.testing import $kit

from $name.$slot import $Class


class Test$Class($kit):
    make = $Class
''',
    ".github/workflows/test.yml": """\
on: [push, pull_request]
jobs:
  test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.11"}
      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: pip install '.[test]'
      - run: pytest
""",
}


def write(slot: str, name: str, folder: str = "") -> str:
    """Write the package into `folder`, by default one named like it; what to do next. Raises PluginError."""
    if slot not in KINDS:
        known = f"a package can be written for {', '.join(KINDS)}"
        where = "docs/plugins.md says what its contract asks for" if slot in ALL_SLOTS else "there is no such slot"
        raise PluginError(f"{slot}: {known}; {where}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in ("turnout", "tests"):
        raise PluginError(f"{name!r} must be a Python module's name in small letters, such as my_policy")
    root, kind = Path(folder or name.replace("_", "-")), KINDS[slot]
    if root.exists() and any(root.iterdir() if root.is_dir() else [root]):
        raise PluginError(f"{root} is there already; name another folder: turnout plugins new {slot} {name} FOLDER")
    words = {
        "slot": slot,
        "name": name,
        "dist": f"turnout-{name.replace('_', '-')}",
        "Class": "".join(part.capitalize() for part in name.split("_")),
        "hook": ALL_SLOTS[slot][0],
        "contract": kind.contract,
        "core": kind.contract.partition("[")[0],
        "kit": kind.kit,
        "imports": kind.imports,
        "extra": ', "turnout[serve]"' if slot == "quant" else ', "psutil"' if slot == "attention" else "",
    }
    words["code"] = Template(kind.code.replace("$Class8", "${Class}Linear")).substitute(words)
    for path, text in FILES.items():
        file = root / Template(path).substitute(words)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(text).substitute(words))
    return f"{root}: a package with {slot}={name}. Next: cd {root} && pip install --editable '.[test]' && pytest"
