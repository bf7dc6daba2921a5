"""What a plugin may import."""

from turnout.core.cost import StepCost
from turnout.core.draft import Draft
from turnout.core.hooks import Register, RegisterPresets, hookimpl
from turnout.core.interfaces import (
    AsyncRunner,
    Attend,
    AttentionBackend,
    BlockManager,
    Capabilities,
    Model,
    ModelInfo,
    ModelLoader,
    ModelRunner,
    Preemption,
    PreparedQuantizer,
    Progress,
    Quantizer,
    RefreshingPlans,
    Runner,
    Scheduler,
    SharingBlocks,
)
from turnout.core.parsers import (
    BrokenCall,
    CallDelta,
    CallForm,
    ParameterForm,
    ReasoningParser,
    ReasoningStream,
    Thought,
    Tool,
    ToolParser,
    ToolStream,
    overlap,
)
from turnout.core.policy import Policy
from turnout.core.structured import Grammar, GrammarState, Structured
from turnout.core.types import (
    PENDING,
    Batch,
    BlockMoves,
    BlockStats,
    Chunk,
    ContractError,
    Finish,
    KVSpec,
    LayerSpec,
    Limits,
    Logprobs,
    ModelError,
    Move,
    Output,
    PreemptMode,
    Request,
    Result,
    Sampling,
    Step,
    StepReport,
    StructuredSpec,
)

__all__ = [
    "PENDING", "AsyncRunner", "Attend", "AttentionBackend", "Batch", "BlockManager", "BlockMoves", "BlockStats",
    "BrokenCall", "CallDelta", "CallForm", "Capabilities", "Chunk", "ContractError", "Draft", "Finish", "Grammar",
    "GrammarState", "KVSpec", "LayerSpec", "Limits", "Logprobs", "Model", "ModelError", "ModelInfo", "ModelLoader",
    "ModelRunner", "Move", "Output", "ParameterForm", "Policy", "PreemptMode", "Preemption", "PreparedQuantizer",
    "Progress", "Quantizer", "ReasoningParser", "ReasoningStream", "RefreshingPlans", "Register", "RegisterPresets",
    "Request", "Result", "Runner", "Sampling", "Scheduler", "SharingBlocks", "Step", "StepCost", "StepReport",
    "Structured", "StructuredSpec", "Thought", "Tool", "ToolParser", "ToolStream", "hookimpl", "overlap",
]  # fmt: skip
