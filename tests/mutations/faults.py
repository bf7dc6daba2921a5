"""Faults to plant in the sources one at a time: what the tests must find. It is data; `run.py` plants them."""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS = ("tests/plugins/blocks", "tests/core/test_engine.py", "tests/fuzz")
POLICIES = ("tests/plugins/scheduler", "tests/plugins/preemption", "tests/faults/test_preemption_faults.py")
CORE = ("tests/core", "tests/fuzz/test_fuzz.py", "tests/plugins/preemption")
ATTENTION = (
    "tests/testing/test_attention_contract.py",
    "tests/plugins/runner",
    "tests/faults/test_attention_faults.py",
)
QUANT = ("tests/plugins/quant",)
SAMPLER = ("tests/plugins/runner/test_sampler.py", "tests/faults/test_sampling_faults.py")
TEXT = ("tests/server/test_text.py", "tests/faults/test_text_faults.py")
API = ("tests/server/api",)
PROCESS = ("tests/server/test_bridge.py", "tests/server/test_worker.py", "tests/server/test_serve.py")


@dataclass(frozen=True)
class Fault:
    """`before` stands in `file` exactly once, and becomes `after`."""

    kind: str
    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "blocks",
        "a release forgets the request's first block",
        "plugins/blocks/shared.py",
        "        for block in reversed(blocks):\n            refs[block] -= 1",
        "        for block in reversed(blocks[1:]):\n            refs[block] -= 1",
        BLOCKS,
    ),
    Fault(
        "blocks",
        "two may write into a block they share",
        "plugins/blocks/shared.py",
        "held = block >= 0 and self._refs[block] > 1",
        "held = block >= 0 and self._refs[block] > 2",
        BLOCKS,
    ),
    Fault(
        "blocks",
        "a copy on write is forgotten",
        "plugins/blocks/shared.py",
        "            self._moves.copy(block, copy)\n",
        "",
        BLOCKS,
    ),
    Fault(
        "prefix cache",
        "a salt does not keep prefixes apart",
        "plugins/blocks/paged.py",
        "        before: int | str | None = salt\n",
        "        before: int | str | None = next((s for s, _ in self._by_key if isinstance(s, str)), salt)\n",
        BLOCKS,
    ),
    Fault(
        "prefix cache",
        "a prompt found whole leaves no token to compute",
        "plugins/blocks/shared.py",
        "len(request.tokens) - 1, request.salt)",
        "len(request.tokens), request.salt)",
        BLOCKS,
    ),
    Fault(
        "prefix cache",
        "blocks are published before they are computed",
        "plugins/blocks/paged.py",
        "        full = request.num_computed // size\n",
        "        full = len(request.tokens) // size\n",
        BLOCKS,
    ),
    Fault(
        "preemption",
        "the oldest gives way instead of the newest",
        "plugins/preemption/victims.py",
        "max(reversed(candidates)",
        "min(reversed(candidates)",
        POLICIES,
    ),
    Fault(
        "preemption",
        "a swapped request forgets how far it was computed",
        "core/swap.py",
        "        request.num_computed = computed\n",
        "",
        CORE,
    ),
    Fault(
        "preemption",
        "host blocks are given away before they are read",
        "core/swap.py",
        "            self._back.append(request)\n",
        "            self.drop(request)\n",
        CORE,
    ),
    Fault(
        "engine",
        "a request that does not fit keeps the prefix it was given",
        "core/builder.py",
        '            if not running:\n                self._withdraw(request)\n            self.reasons[rid] = "out of blocks"',
        '            self.reasons[rid] = "out of blocks"',
        CORE,
    ),
    Fault(
        "engine",
        "a request that was kept gives its blocks back",
        "core/engine.py",
        "            self._kept[request.id] = request\n        else:\n            self._blocks.release(request)",
        "            self._kept[request.id] = request\n        self._blocks.release(request)\n        if not request.keep:",
        CORE,
    ),
    Fault(
        "engine",
        "an answer ends one token early",
        "core/engine.py",
        "return Finish.LENGTH if request.num_generated >= request.sampling.max_tokens else None",
        "return Finish.LENGTH if request.num_generated >= request.sampling.max_tokens - 1 else None",
        CORE,
    ),
    Fault(
        "schedulers",
        "priority counts the wrong way round",
        "plugins/scheduler/priority.py",
        "return (request.arrived + self.ageing * request.priority",
        "return (request.arrived - self.ageing * request.priority",
        POLICIES,
    ),
    Fault(
        "schedulers",
        "chunks of a prompt exceed what a step has for prompts",
        "plugins/scheduler/chunked_prefill.py",
        "return min(self.chunk, left)",
        "return self.chunk if left > 0 else 0",
        POLICIES,
    ),
    Fault(
        "schedulers",
        "fair charges long prompts like short ones",
        "plugins/scheduler/fair.py",
        "self.input_weight * request.num_prompt",
        "self.input_weight",
        POLICIES,
    ),
    Fault(
        "attention",
        "a decode sees one key more than its window",
        "plugins/attention/torch_sdpa.py",
        "at >= (lens - layer.window)[:, None]",
        "at >= (lens - layer.window - 1)[:, None]",
        ATTENTION,
    ),
    Fault(
        "attention",
        "what others left in a block reaches the answer",
        "plugins/attention/torch_sdpa.py",
        "return found if stale is None else found.index_fill_(0, stale, 0.0)",
        "return found",
        ATTENTION,
    ),
    Fault(
        "attention",
        "every chunk of a prompt starts at position 0",
        "plugins/runner/layout.py",
        " - query_start[owner] + start_[owner]",
        " - query_start[owner]",
        ATTENTION,
    ),
    Fault(
        "quantized layers",
        "codes come out of a byte in the other order",
        "plugins/quant/grouped.py",
        "(packed >> (place * size))",
        "(packed >> ((8 // size - 1 - place) * size))",
        QUANT,
    ),
    Fault(
        "quantized layers",
        "zero points of GPTQ stay one too small",
        "plugins/quant/gptq.py",
        "(stored + 1) & ((1 << bits) - 1)",
        "stored & ((1 << bits) - 1)",
        QUANT,
    ),
    Fault(
        "quantized layers",
        "joined int8 layers share the first one's scales",
        "plugins/quant/int8_linear.py",
        "        out = _product(codes, self.codes) * (scales[:, None] * self.scales)\n",
        "        out = _product(codes, self.codes) * (scales[:, None] * self.scales[:1])\n",
        QUANT,
    ),
    Fault(
        "sampling",
        "top_p keeps one token too many",
        "plugins/runner/sampler.py",
        "s.top_p * (mass[-1] if ranked else total))) + 1)",
        "s.top_p * (mass[-1] if ranked else total))) + 2)",
        SAMPLER,
    ),
    Fault(
        "sampling",
        "the prompt's length changes what a seed draws",
        "plugins/runner/sampler.py",
        "+ (done + 1) * _GOLDEN",
        "+ (done + request.num_prompt) * _GOLDEN",
        SAMPLER,
    ),
    Fault(
        "sampling",
        "frequency penalties count the prompt's tokens",
        "plugins/runner/sampler.py",
        "np.unique(request.tokens[request.num_prompt :], return_counts=True)",
        "np.unique(request.tokens, return_counts=True)",
        SAMPLER,
    ),
    Fault(
        "text",
        "of two stop strings that end at once the shorter counts",
        "server/text/stop.py",
        "place + len(stop) < first[1]",
        "place + len(stop) <= first[1]",
        TEXT,
    ),
    Fault(
        "text",
        "what was held back is lost at the end",
        "server/text/detokenizer.py",
        "self._passed(self._source.finish()) + self._held",
        "self._passed(self._source.finish())",
        TEXT,
    ),
    Fault(
        "text",
        "a stop string within min_tokens ends the text",
        "server/text/detokenizer.py",
        "self.num_tokens_used > self._min_tokens",
        "self.num_tokens_used >= self._min_tokens",
        TEXT,
    ),
    Fault(
        "api",
        "usage leaves out the choices that are not returned",
        "server/api/generation.py",
        "sum(choice.num_tokens for choice in self.choices)\n        cached",
        "sum(choice.num_tokens for choice in self.answers)\n        cached",
        API,
    ),
    Fault(
        "api",
        "best_of returns the worst",
        "server/api/generation.py",
        "key=lambda choice: -choice.mean_logprob",
        "key=lambda choice: choice.mean_logprob",
        API,
    ),
    Fault(
        "api",
        "a choice ended by a stop string computes on",
        "server/api/generation.py",
        "                            client.abort(choice.id)\n",
        "                            pass\n",
        API,
    ),
    Fault(
        "engine process",
        "a reader that leaves lets its request run on",
        "server/engine/bridge.py",
        "                self._send(Abort(asked.id if isinstance(asked, BeamSearch) else name))\n",
        "                pass\n",
        PROCESS,
    ),
    Fault(
        "engine process",
        "an id in use is taken again",
        "server/engine/bridge.py",
        "            if name in self._streams:\n",
        "            if name not in self._streams and False:\n",
        PROCESS,
    ),
    Fault(
        "engine process",
        "a server that drains takes new requests",
        "server/engine/bridge.py",
        '        self._trouble = self._trouble or "draining"\n',
        "        pass\n",
        PROCESS,
    ),
)
