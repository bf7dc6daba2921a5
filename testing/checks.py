"""The rules of each contract as checks with a name, run by `turnout plugins check SLOT=NAME`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from turnout.core.plugins import SLOTS
from turnout.core.types import Request, Sampling
from turnout.testing.attention import attention_cases, run_attention
from turnout.testing.fake import check_balance, continuation, make_engine, serve_all


@dataclass(frozen=True)
class Checked:
    """One rule, and what was wrong; None: it holds."""

    rule: str
    fault: str | None


def check_component(slot: str, component: type) -> list[Checked]:
    """Run every rule of the slot's contract against a component with its default options."""
    results = [_checked("its methods take the arguments of the contract", lambda: _signatures(slot, component))]
    results.append(_checked("its defaults are valid options", component))
    if all(r.fault is None for r in results):
        results += [_checked(rule, check) for rule, check in _RULES[slot](component)]
    return results


def _checked(rule: str, check: Callable[[], object]) -> Checked:
    try:
        check()
    except Exception as error:  # noqa: BLE001  any fault of the plugin is the answer
        return Checked(rule, f"{type(error).__name__}: {error}".strip())
    return Checked(rule, None)


def _signatures(slot: str, component: type) -> None:
    for name, wanted in inspect.getmembers(SLOTS[slot][1], inspect.isfunction):
        if name.startswith("_"):
            continue
        given = inspect.signature(getattr(component, name))
        names = list(inspect.signature(wanted).parameters)
        try:
            given.bind(*names)
        except TypeError as error:
            raise TypeError(f"{name}{given} must take {', '.join(names[1:]) or 'nothing'}: {error}") from error


def _requests(seed: int, num: int = 12) -> list[Request]:
    dice = random.Random(seed)
    shared = [dice.randrange(900) for _ in range(9)]
    return [
        Request(
            str(i),
            shared[: dice.randrange(10)] + [dice.randrange(900) for _ in range(dice.randrange(1, 30))],
            Sampling(0, max_tokens=dice.randrange(1, 12)),
        )
        for i in range(num)
    ]


def _serves(make: Callable[[], Any], **options: Any) -> None:
    for seed in range(8):
        requests = _requests(seed)
        wanted = {r.id: continuation(r.tokens, r.sampling.max_tokens) for r in requests}
        got = serve_all(
            make_engine(**({"scheduler": _Plain()} | {k: v() for k, v in make().items()} | options)), requests
        )
        assert got == wanted, "the tokens differ from those of each request alone"


class _Plain:
    """First come, first served; the newest gives way."""

    def schedule(self, waiting: Any, running: Any, draft: Any) -> None:
        queue = list(running)
        while queue and not draft.full:
            request = queue.pop(0)
            while not draft.take(request, 16):
                victim = queue.pop() if queue else request
                draft.preempt(victim)
                if victim is request:
                    return
        for request in waiting:
            if draft.preempted or draft.full or not draft.take(request, 16):
                return


def _scheduler_rules(component: type) -> Iterator[tuple[str, Callable[[], object]]]:
    def build() -> dict[str, type]:
        return {"scheduler": component}

    yield "it serves every request, with room to spare", lambda: _serves(build)
    yield "it serves every request when the cache holds two of them", lambda: _serves(build, num_blocks=14)
    yield (
        "it serves every request one token and one seat at a time",
        lambda: _serves(build, max_num_batched_tokens=3, max_num_seqs=1),
    )
    yield "it copes with aborts at any moment", lambda: _aborts(component)


def _aborts(component: type) -> None:
    for seed in range(8):
        dice = random.Random(seed)
        engine = make_engine(component(), num_blocks=16)
        for request in _requests(seed):
            engine.add(request)
        while engine.busy:
            engine.step()
            engine.abort(str(dice.randrange(12)))
            check_balance(engine)
        assert engine.stats.num_blocks_free == engine.info.num_blocks, "blocks are missing at the end"


def _attention_rules(component: type) -> Iterator[tuple[str, Callable[[], object]]]:
    capabilities = component.capabilities  # type: ignore[attr-defined]
    device = "cpu" if capabilities.devices is None or "cpu" in capabilities.devices else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        yield "its device is here", lambda: (_ for _ in ()).throw(RuntimeError("it needs a GPU, and there is none"))
        return

    def compare(case: Any) -> None:
        got, want = run_attention(component(), case)
        error = (got.double() - want).abs().max().item()
        assert error < 1e-4, f"off by {error:.2g}"

    for case in attention_cases(capabilities, device):
        yield case.name, lambda case=case: compare(case)  # type: ignore[misc]


def _blocks_rules(component: type) -> Iterator[tuple[str, Callable[[], object]]]:
    def build() -> dict[str, Callable[[], Any]]:
        return {"blocks": lambda: component(block_size=4)}

    yield "requests sharing prefixes get their own tokens", lambda: _serves(build)
    yield "blocks balance when the cache is small", lambda: _serves(build, num_blocks=14)


def _preemption_rules(component: type) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "preempted requests go on where they were", lambda: _serves(lambda: {"preemption": component}, num_blocks=14)


def _quant_rules(component: type) -> Iterator[tuple[str, Callable[[], object]]]:
    def linear() -> None:
        generator = torch.Generator().manual_seed(0)
        weight, bias = torch.randn(192, 576, generator=generator), torch.randn(192, generator=generator)
        x = torch.randn(5, 576, generator=generator)
        with torch.inference_mode():
            got = component().linear("layer", {"weight": weight, "bias": bias})(x)
        want = torch.nn.functional.linear(x, weight, bias)
        error = ((got - want).norm() / want.norm()).item()
        assert error < 0.2, f"relative error {error:.2g}"

    yield "its linear layer is close to the float one", linear


_RULES: dict[str, Callable[[type], Iterator[tuple[str, Callable[[], object]]]]] = {
    "scheduler": _scheduler_rules,
    "attention": _attention_rules,
    "blocks": _blocks_rules,
    "preemption": _preemption_rules,
    "quant": _quant_rules,
}

__all__ = ["Checked", "check_component"]
