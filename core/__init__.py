"""What a plugin may import."""

from turnout.core.draft import Draft
from turnout.core.hooks import Register, RegisterPresets, hookimpl
from turnout.core.interfaces import AttentionBackend, BlockManager, Capabilities, Preemption, Quantizer, Scheduler
from turnout.core.types import (
    Batch,
    Chunk,
    ContractError,
    Finish,
    KVSpec,
    LayerSpec,
    Logprobs,
    Output,
    PreemptMode,
    Request,
    Sampling,
    Step,
)

__all__ = [
    "AttentionBackend",
    "Batch",
    "BlockManager",
    "Capabilities",
    "Chunk",
    "ContractError",
    "Draft",
    "Finish",
    "KVSpec",
    "LayerSpec",
    "Logprobs",
    "Output",
    "PreemptMode",
    "Preemption",
    "Quantizer",
    "Register",
    "RegisterPresets",
    "Request",
    "Sampling",
    "Scheduler",
    "Step",
    "hookimpl",
]
