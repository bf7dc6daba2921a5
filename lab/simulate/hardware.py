"""Numbers of devices and models, from data sheets and model cards; a CPU is measured. It knows no step."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    """One device. Rates are what the data sheet promises for dense 16-bit matrices, not what is reached."""

    title: str
    memory: float  # bytes
    bandwidth: float  # bytes/s between memory and units
    flops: float  # 1/s, a multiplication and an addition count as two
    link: float  # bytes/s to other devices, one direction
    host_link: float  # bytes/s to host memory, one direction
    overhead: float  # seconds a step takes before anything is computed: launches, sampling, the engine
    link_latency: float = 10e-6  # seconds of one all-reduce of nothing


HARDWARE = {
    "h200": Hardware("NVIDIA H200 SXM", 141e9, 4.8e12, 989e12, 450e9, 64e9, 2e-3),
    "h100": Hardware("NVIDIA H100 SXM", 80e9, 3.35e12, 989e12, 450e9, 64e9, 2e-3),
    "a100": Hardware("NVIDIA A100 SXM 80 GB", 80e9, 2.039e12, 312e12, 300e9, 32e9, 2e-3),
}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with grouped queries and a gated feed-forward layer."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_len: int
    tied: bool = False  # input and output embeddings are one matrix

    @property
    def layer_parameters(self) -> int:
        """Of all layers, embeddings left out: what every token multiplies with."""
        attention = self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def embedding(self) -> int:
        """Parameters of one embedding matrix."""
        return self.vocab_size * self.hidden

    @property
    def num_parameters(self) -> int:
        return self.layer_parameters + self.embedding * (1 if self.tied else 2)

    @property
    def kv_per_token(self) -> int:
        """Elements of one token's keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


MODELS = {
    "llama-3-70b": ModelShape(80, 8192, 28672, 64, 8, 128, 128256, 131072),
    "llama-3-8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "smollm2-135m": ModelShape(30, 576, 1536, 9, 3, 64, 49152, 8192, tied=True),
}
FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def hardware_of(name: str) -> Hardware:
    """Raises ValueError listing the names there are."""
    if name == "cpu":
        return measured_cpu()
    if name not in HARDWARE:
        raise ValueError(
            f"latency.hardware={name}: there is no such description; there are {', '.join(HARDWARE)} and cpu (measured "
            f"here). Others: set latency.bandwidth, latency.flops, latency.memory and latency.link beside one of them"
        )
    return HARDWARE[name]


def model_of(name: str) -> ModelShape:
    """One of MODELS, or that of a Hugging Face folder's config.json. Raises ValueError with what is missing."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"latency.model={name}: neither a description ({', '.join(MODELS)}) nor a folder with a config.json"
        )
    config = json.loads(path.read_text())
    missing = [field for field in FIELDS if field not in config]
    experts = [field for field in config if "expert" in field]
    if missing or experts:
        why = f"lacks {', '.join(missing)}" if missing else f"has {experts[0]}: only dense models are described"
        raise ValueError(f"latency.model={name}: its config.json {why}; use latency=fitted with a log of a live run")
    layers, hidden, intermediate, heads, vocab_size, max_len = (int(config[field]) for field in FIELDS)
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    tied = bool(config.get("tie_word_embeddings"))
    return ModelShape(layers, hidden, intermediate, heads, kv_heads, head_dim, vocab_size, max_len, tied)


def measured_cpu() -> Hardware:
    """This machine: 32-bit rates of a matrix product and of a sum over more than any cache holds, the best of three."""
    import numpy as np
    import psutil

    side, big = np.ones((1024, 1024), np.float32), np.ones(64 << 20, np.float32)
    product = min(_seconds(lambda: side @ side) for _ in range(3))
    read = min(_seconds(lambda: big.sum()) for _ in range(3))
    bandwidth = big.nbytes / read
    memory = float(psutil.virtual_memory().total)
    return Hardware("this CPU", memory, bandwidth, 2 * 1024**3 / product, bandwidth, bandwidth, 1e-3)


def _seconds(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - began
