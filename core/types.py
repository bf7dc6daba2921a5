"""The data that flows through the core. It imports nothing of ours and knows no text, no queue and no device."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Literal, NamedTuple, NoReturn, Protocol, get_args

from torch import Tensor

NO_BIAS: Mapping[int, float] = {}
PENDING = -1  # stands for a token that is being computed


class ContractError(Exception):
    """A plugin broke a rule of its contract. The message names the rule and what was done."""


class ModelError(ValueError):
    """The model can't be served; the message says why and what to do."""


class Finish(Enum):
    """Why a request ended."""

    STOP = "stop"  # a stop token
    COMPLETE = "complete"  # it has its form whole: nothing may follow
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the caller asked
    ERROR = "error"  # this request failed; Output.error says how
    REFUSED = "refused"  # the form it asked for can't be served; Output.error says why


class PreemptMode(Enum):
    """What happens to the keys and values of a preempted request."""

    RECOMPUTE = "recompute"  # thrown away, computed again
    SWAP = "swap"  # copied to host memory, copied back


Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
Whitespace = Literal["compact", "any"]


@dataclass(frozen=True, slots=True)
class StructuredSpec:
    """The form of an answer. Raises ValueError naming the field that is wrong.

    What `value` holds: json_schema: the schema as JSON. json_object: nothing. regex: the expression, for the whole answer.
    choice: a JSON list of texts. grammar: a grammar in Lark, whose first rule is `start`, or in GBNF, with a rule `root`.
    structural_tag: `{"structures": [{"begin": text, "schema": schema, "end": text}], "triggers": [text]}` as JSON: free
    text until a trigger, with which a `begin` starts; from there on one of the structures whole, then free text again.
    `"at_least_one": true`: the answer begins with a structure and holds nothing else; `"stop_after_first": true`: and ends
    with it. Special tokens in `begin` and `end` stand for themselves.
    """

    kind: Kind
    value: str = ""
    whitespace: Whitespace = "compact"  # between the parts of JSON: none, or as the model likes
    after: str = ""  # the form holds for what follows this text, the end of the reasoning; "": for the whole answer

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"structured.kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.whitespace not in get_args(Whitespace):
            raise ValueError(f"structured.whitespace must be compact or any, got {self.whitespace!r}")
        if (self.kind == "json_object") != (not self.value):
            raise ValueError(f"structured.value must {'be empty' if self.value else 'not be empty'} for {self.kind}")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How logits become tokens, and when to stop. Raises ValueError naming the field that is out of range.

    Order of the filters: penalties and bias on the logits, then temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # relative to the likeliest token
    presence_penalty: float = 0.0  # over generated tokens only
    frequency_penalty: float = 0.0  # over generated tokens only
    repetition_penalty: float = 1.0  # over prompt and generated tokens (CTRL, arXiv 1909.05858)
    logit_bias: Mapping[int, float] = field(default_factory=lambda: NO_BIAS)
    seed: int | None = None
    max_tokens: int = 16  # 0: compute (and score) the prompt only
    min_tokens: int = 0  # stop_ids are banned until so many tokens exist
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None  # this many alternatives beside each sampled token; None: no log-probabilities
    prompt_logprobs: int | None = None  # likewise for each prompt token but the first
    forced: tuple[int, ...] = ()  # the first tokens generated, whatever the logits say: to compare engines
    structured: StructuredSpec | None = None  # the form the answer must have
    fitting_tops: bool = False  # the alternatives beside a token are of those its form allows: for beams
    plain: bool = field(init=False, repr=False, compare=False)  # greedy, nothing else asked: the sampler's fast path

    def __post_init__(self) -> None:
        rules = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "be between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "be above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "be 0 (all) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "be between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "be between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "be between -2 and 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "be above 0 and at most 100"),
            ("max_tokens", self.max_tokens >= 0, "be 0 or more"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "be between 0 and max_tokens"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "fit in 64 bits"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "be 0 or more"),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= 0, "be 0 or more"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} must {rule}, got {getattr(self, name)}")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias must be between -100 and 100, got {bias} for token {token}")
        changed = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.logit_bias
        banned = self.min_tokens and self.stop_ids
        if self.structured is not None and self.forced:
            raise ValueError("forced must be empty where the answer's form is given: its tokens may not have that form")
        special = self.logprobs is not None or self.forced or self.structured is not None
        object.__setattr__(self, "plain", self.greedy and not changed and not banned and not special)

    @property
    def greedy(self) -> bool:
        """The likeliest token is taken: dividing by so small a temperature would leave nothing else."""
        return self.temperature <= 1e-5


@dataclass(slots=True, eq=False)
class Request:
    """One generation. The engine and its block manager change it; policies see its `view`."""

    id: str
    tokens: list[int]  # the prompt, then what was generated
    sampling: Sampling = field(default_factory=Sampling)
    arrived: float = 0.0  # seconds on the engine's clock; the engine sets it when it is 0
    priority: int = 0  # lower runs earlier, where a scheduler looks at it
    labels: Mapping[str, str] = field(default_factory=dict)  # from the client, for policies: tenant, tier
    salt: str | None = None  # requests share cached prefixes only with requests of the same salt
    # id of a request that begins alike: this one runs after its prompt and shares its blocks, even part-full ones
    parent: str | None = None
    # its blocks stay after its end, for requests it is the parent of, until dropped or blocks are short
    keep: bool = False
    num_begun: int = 0  # so many tokens at the prompt's end are of the answer already: a beam extends another
    num_prompt: int = field(init=False)
    num_computed: int = 0  # tokens whose keys and values are in the cache
    blocks: array[int] = field(default_factory=lambda: array("i"))  # block ids, written by the block manager
    host_blocks: list[int] = field(default_factory=list)  # where its blocks lie in host memory while swapped out
    num_cached: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    num_slots: int = 0  # tokens its own blocks are known to hold; below it no block need be asked for
    peak_computed: int = 0  # the most `num_computed` ever was; a scheduler must let somebody pass it now and then
    num_scored: int = 0  # prompt tokens whose log-probability was delivered
    num_preemptions: int = 0
    scheduled_at: float | None = None  # first time in a step, seconds on the engine's clock
    first_token_at: float | None = None
    finish: Finish | None = None
    view: RequestView = field(init=False, repr=False)  # made when the engine takes it in

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"request {self.id!r} has an empty prompt")
        self.num_prompt = len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed: the rest of the prompt, or the one last sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


class RequestView:
    """A request as policies see it: read it, hand it to the draft, write nothing. What is asked stays; progress is now's."""

    __slots__ = ("_request", "arrived", "id", "labels", "max_tokens", "num_prompt", "parent", "priority", "salt")
    _request: Request
    id: str
    arrived: float  # seconds on the engine's clock
    priority: int  # lower runs earlier, where a scheduler looks at it
    labels: Mapping[str, str]
    salt: str | None
    parent: str | None
    num_prompt: int
    max_tokens: int  # to be generated, at most

    def __init__(self, request: Request) -> None:
        for name in ("id", "arrived", "priority", "salt", "parent", "num_prompt"):
            object.__setattr__(self, name, getattr(request, name))
        object.__setattr__(self, "labels", MappingProxyType(dict(request.labels)))
        object.__setattr__(self, "max_tokens", request.sampling.max_tokens)
        object.__setattr__(self, "_request", request)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ContractError(f"request.{name} can't be written: policies read requests, the engine changes them")

    def __delattr__(self, name: str) -> NoReturn:
        raise ContractError(f"request.{name} can't be deleted: policies read requests, the engine changes them")

    def __repr__(self) -> str:
        return f"RequestView({self.id!r}, {self.num_computed} of {self.num_tokens} tokens)"

    @property
    def tokens(self) -> tuple[int, ...]:
        """A copy of the prompt and what was generated. To count them, `num_tokens` is cheaper."""
        return tuple(self._request.tokens)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and what was generated."""
        return len(self._request.tokens)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the cache, or in host memory."""
        return self._request.num_computed

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed: the rest of the prompt, or the one last sampled."""
        request = self._request
        return len(request.tokens) - request.num_computed

    @property
    def num_generated(self) -> int:
        request = self._request
        return len(request.tokens) - request.num_prompt

    @property
    def num_blocks(self) -> int:
        """Blocks it holds; some may be shared."""
        return len(self._request.blocks)

    @property
    def scheduled_at(self) -> float | None:
        """When it first was in a step, seconds on the engine's clock."""
        return self._request.scheduled_at

    @property
    def first_token_at(self) -> float | None:
        return self._request.first_token_at


class Chunk(NamedTuple):
    """`num_tokens` tokens of one request, starting at position `start`."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # reaches the end of the request's tokens, so it yields a new one

    @property
    def end(self) -> int:  # position after the last
        return self.start + self.num_tokens


class Move(NamedTuple):
    """One block to copy between the cache and host memory."""

    source: int
    target: int


class BlockMoves(NamedTuple):
    """What a block manager wants copied before the step computes; host blocks counted from its own first one."""

    out: tuple[Move, ...] = ()  # cache block -> host block
    copies: tuple[Move, ...] = ()  # cache block -> cache block
    back: tuple[Move, ...] = ()  # host block -> cache block


class Constraint(Protocol):
    """What the samples of a step may be. A runner must ask it before it samples, and tell it what it sampled."""

    rows: tuple[int, ...]  # the samples that it is about, ascending

    def fill(self) -> Tensor:
        """int32 [len(rows), ceil(vocab_size / 32)] on the host: bit t % 32 of word t // 32 says whether token t may be
        sampled. Stop tokens may where the answer may end."""

    def take(self, tokens: Sequence[int], failed: Collection[int] = ()) -> None:
        """What was sampled, of all the step's samples in order; `failed`: those that have no token."""

    def judged(self, result: Result) -> Result:
        """For the engine: the result with the errors found in `take`. Raises ContractError for a runner that did not ask."""

    @property
    def complete(self) -> Collection[int]:
        """For the engine: the samples after which nothing may follow."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass computes. Moves happen first: all of `swap_out`, then `copies`, then `swap_in`; within each,
    every source is read before any target is written."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[Request, ...] = ()
    swap_out: tuple[Move, ...] = ()  # cache block -> host block
    copies: tuple[Move, ...] = ()  # cache block -> cache block: a shared block is about to be written
    swap_in: tuple[Move, ...] = ()  # host block -> cache block
    constraint: Constraint | None = field(default=None, compare=False)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What the attention of one layer needs. Layers with equal specs form a group, planned once a step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q @ k
    window: int | None = None  # each query sees this many keys, itself included; None: all before it
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks: bool = False  # a learned logit per head joins each softmax; passed to `run`
    v_head_dim: int | None = None  # None: as head_dim


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of the key/value cache."""

    layers: tuple[LayerSpec, ...]
    block_size: int  # tokens per block
    num_blocks: int
    cache_dtype: str = "auto"  # how keys and values are kept: as the model computes, or a name the backend declares


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors: B requests laid end to end, T tokens in all, no padding."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]; token t's keys and values go to slots[t] = block * block_size + offset
    block_table: Tensor  # int32 [B, W], padded with 0
    query_start: Tensor  # int32 [B + 1]; request b owns rows query_start[b]:query_start[b + 1]
    kv_lens: Tensor  # int32 [B]; keys request b attends to, this step's included
    logit_rows: Tensor  # int64 [S]; the rows to take logits from
    query_lens_host: tuple[int, ...]  # [B], on the host for planners
    kv_lens_host: tuple[int, ...]  # [B]


class Logprobs(NamedTuple):
    """One token's log-probability under the raw model distribution: before temperature, penalties, bias, filters."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (token, logprob), best first


class Result(NamedTuple):
    """What a runner returns for a step. The three mappings hold only what is there."""

    tokens: list[int]  # one per chunk that samples, in order
    logprobs: Mapping[int, Logprobs] = {}  # by index into `tokens`
    errors: Mapping[int, str] = {}  # by index into `tokens`: this request failed, the others did not
    scores: Mapping[str, list[Logprobs]] = {}  # by request id: the prompt tokens scored in this step, in order


class StepReport(NamedTuple):
    """What else is known of a finished step; times are seconds on the engine's clock."""

    number: int  # of the step, counted from 1
    began: float  # scheduling; what `draft.now` was
    scheduled: float
    ended: float
    tokens: Sequence[int]  # one per chunk that samples, in order; none when the step failed
    reasons: Mapping[str, str]  # by request id: why it waits, why it was preempted that way
    num_waiting: int
    num_running: int
    num_blocks_free: int
    error: str | None = None


class Timing(NamedTuple):
    """When a request passed its stations, seconds on the engine's clock (monotonic, shared by all processes)."""

    arrived: float
    scheduled: float | None
    first_token: float | None
    finished: float


class Output(NamedTuple):
    """What a step gave one request."""

    request_id: str
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None
    logprobs: tuple[Logprobs, ...] = ()  # one per token, when asked for
    prompt_logprobs: tuple[Logprobs, ...] = ()  # of the prompt tokens scored in this step; the first token has none
    error: str | None = None
    num_cached: int = 0  # prompt tokens that came from the prefix cache
    timing: Timing | None = None  # with the last output


@dataclass(slots=True)
class BlockStats:
    """A block manager's counters; they only grow."""

    copied: int = 0  # blocks copied since they were shared and about to be written
    evicted: int = 0  # cached blocks that gave way
    expired: int = 0  # of these, since their time to live was over
    evicted_age: float = 0.0  # seconds from last use to eviction, summed; 0 where the manager sees no clock
    tier_out: int = 0  # evicted blocks that went to the host tier
    tier_in: int = 0  # and came back for a hit


@dataclass(slots=True)
class GrammarStats:
    """What is counted of forms of answers; it only grows."""

    compiled: int = 0  # forms
    reused: int = 0  # requests whose form was compiled, or being compiled, already
    refused: int = 0  # requests
    failed: int = 0  # requests that sampled what their form does not allow
    compile_seconds: float = 0.0
    masks: int = 0  # rows of bits
    mask_seconds: float = 0.0


@dataclass(slots=True)
class Stats:
    """The engine's gauges and counters; counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0  # waiting requests whose blocks lie in host memory
    num_blocks: int = 0
    num_blocks_free: int = 0
    host_blocks: int = 0
    host_blocks_free: int = 0
    num_steps: int = 0
    step_tokens: int = 0  # of the last step
    prompt_tokens: int = 0  # prompt tokens admitted for the first time, cached ones included
    cached_tokens: int = 0  # of these, found in the prefix cache
    generated_tokens: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    swap_fallbacks: int = 0  # swaps that became recomputes since host memory was full
    recomputed_tokens: int = 0  # computed again after a preemption threw them away
    swapped_blocks_out: int = 0
    swapped_blocks_in: int = 0
    blocks: BlockStats = field(default_factory=BlockStats)  # what the block manager counts
    finished: dict[str, int] = field(default_factory=dict)  # by Finish value
    grammars: GrammarStats = field(default_factory=GrammarStats)
    num_compiling: int = 0  # waiting requests whose form is being compiled
    scheduler_failures: int = 0  # steps the scheduler broke off, or broke a rule in; they were undone
    observer_failures: int = 0  # hooks of plugins that raised
    step_seconds: float = 0.0  # of the last step
    schedule_seconds: float = 0.0  # of the last step


@dataclass
class Limits:
    """Budgets of the engine. Raises ValueError naming the option."""

    max_num_batched_tokens: int = 2048  # tokens computed in one step
    max_num_seqs: int = 64  # requests running at once
    max_model_len: int | None = None  # tokens of prompt and answer; null: what the model was made for
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory this process may use
    cpu_memory_utilization: float = 0.3  # share of the free memory the key/value cache may take, on a CPU
    max_grammar_size: int = 1 << 18  # characters of the form an answer must have
    grammar_timeout: float = 10.0  # seconds that compiling it may take

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"limits.{name} must be at least 1, got {value}")
        if self.max_grammar_size < 1 or not self.grammar_timeout > 0:
            wrong = "max_grammar_size" if self.max_grammar_size < 1 else "grammar_timeout"
            raise ValueError(f"limits.{wrong} must be above 0, got {getattr(self, wrong)}")
        for name in ("gpu_memory_utilization", "cpu_memory_utilization"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"limits.{name} must be above 0 and at most 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is served and what it is made of; known once the engine is ready."""

    model: str  # as the user named it
    path: str  # the folder with config and tokenizer
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and answer together
    num_blocks: int
    block_size: int
    capacity: int  # tokens the whole cache holds; one request may not need more
    max_num_seqs: int
    max_num_batched_tokens: int
    fingerprint: str  # of composition, versions and kernels; two different stacks never share one
    composition: Mapping[str, object]  # the resolved configuration, plain JSON values
    plugins: Mapping[str, Mapping[str, str]]  # slot -> {name, package, version}
    versions: Mapping[str, str]  # python, torch, transformers, turnout
    notes: tuple[str, ...] = ()  # what was chosen for the user and why: dtype, cache size, ...
