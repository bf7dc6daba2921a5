"""What `turnout quantize` asks for. Importing it stores the schema for Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

METHODS = {  # name -> what it makes
    "rtn": "integers of 2 to 8 bits in groups, rounded to nearest (compressed-tensors, pack-quantized)",
    "int8": "8-bit integers, one scale an output; activations rounded per token (compressed-tensors, int-quantized)",
    "fp8": "8-bit floats, one scale an output; activations rounded per token (compressed-tensors, float-quantized)",
    "gptq": "integers of 2, 3, 4 or 8 bits in groups, fitted to calibration text by GPTQModel (gptq)",
    "awq": "4-bit integers in groups with scales fitted to calibration text by GPTQModel (awq, gemm)",
}
CALIBRATED = ("gptq", "awq")
GROUPED = ("rtn", *CALIBRATED)
WIDTHS = {"rtn": (2, 3, 4, 5, 6, 8), "gptq": (2, 3, 4, 8), "awq": (4,)}


@dataclass
class QuantizeConfig:
    """Makes a smaller checkpoint of a model. Raises ValueError naming the option."""

    loader: Any = MISSING
    model: str = "smollm2"  # of floats: the demo model, a Hugging Face folder, or a name on the hub
    method: str = MISSING
    out: str = MISSING  # the folder to write
    bits: int | None = None  # of a weight; null: 4
    group_size: int | None = None  # inputs that share a scale, or -1 for a whole row; null: 64
    symmetric: bool | None = None  # without zero points; null: true, but false for awq
    act_order: bool | None = None  # gptq: the inputs that matter most are rounded first; null: false
    skip: list[str] = field(default_factory=lambda: ["lm_head"])  # layers that stay float: a layer's name or its end
    calibration: str | None = None  # gptq, awq: a text file; empty lines divide its samples
    samples: int = 128  # gptq, awq: of the calibration text, at most
    shard_size: int = 2**28  # bytes of a file; what an interruption leaves done is counted in files

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method}")
        if not self.out:
            raise ValueError("out must name a folder to write")
        self._check_meaning()
        if self.bits is not None and self.bits not in WIDTHS[self.method]:
            widths = ", ".join(map(str, WIDTHS[self.method]))
            raise ValueError(f"bits must be one of {widths} with method={self.method}, got {self.bits}")
        if self.group_size is not None and self.group_size != -1 and self.group_size < 8:
            raise ValueError(f"group_size must be -1 (a whole row) or at least 8, got {self.group_size}")
        for name in ("samples", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def _check_meaning(self) -> None:
        """An option that the method does not read must not be set."""
        readers = {
            "bits": GROUPED,
            "group_size": GROUPED,
            "symmetric": GROUPED,
            "act_order": ("gptq",),
            "calibration": CALIBRATED,
        }
        for name, methods in readers.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no meaning with method={self.method}; it is for "
                    f"method={' and method='.join(methods)}"
                )


ConfigStore.instance().store(name="quantize_schema", node=QuantizeConfig, provider="turnout")
