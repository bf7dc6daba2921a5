"""What most plugins import.

More modules are public, for those who need them: `turnout.core.model`, the contracts of loaders, runners and formats;
`turnout.core.optional`, what a component may offer besides its contract; `turnout.core.structured` and
`turnout.core.parsers`, the form of answers and what they are read by.
"""

from turnout.core.draft import Draft
from turnout.core.hooks import Register, RegisterPresets, hookimpl
from turnout.core.interfaces import AttentionBackend, BlockManager, Capabilities, Preemption, Quantizer, Scheduler
from turnout.core.model import ModelInfo
from turnout.core.policy import Policy
from turnout.core.types import (
    PENDING,
    Batch,
    Chunk,
    ContractError,
    Finish,
    KVSpec,
    LayerSpec,
    ModelError,
    PreemptMode,
    Request,
    RequestView,
    Sampling,
    Step,
    StepReport,
)

__all__ = [
    "PENDING", "AttentionBackend", "Batch", "BlockManager", "Capabilities", "Chunk", "ContractError", "Draft", "Finish",
    "KVSpec", "LayerSpec", "ModelError", "ModelInfo", "Policy", "PreemptMode", "Preemption", "Quantizer", "Register",
    "RegisterPresets", "Request", "RequestView", "Sampling", "Scheduler", "Step", "StepReport", "hookimpl",
]  # fmt: skip
