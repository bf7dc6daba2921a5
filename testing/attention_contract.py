"""The contract of an attention backend as a suite to inherit. It knows no kernel and no layout.

    class TestMine(AttentionContract):
        make = Mine

`turnout plugins check attention=mine` runs the same rules. Those for what the backend is not able to do are skipped; what
it doesn't claim it must refuse.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import SkipTest

import torch

from turnout.testing.attention import check_attention, scale_error
from turnout.testing.attention_cases import RAGGED, accepted, forms, name_of, unclaimed
from turnout.testing.attention_graphs import replayed
from turnout.testing.attention_memory import MemoryRules
from turnout.testing.attention_scene import AttentionCase, Part, batch_of
from turnout.testing.attention_suite import holds


class AttentionContract(MemoryRules):
    """What every attention backend keeps. Subclass it with `make`."""

    def test_it_errs_at_most_twice_as_much_as_plain_pytorch(self, case: AttentionCase) -> None:
        check_attention(self.make(), case)

    def test_its_scale_is_the_layers_own(self) -> None:
        """To a third of a percent in every dtype, however coarse: the scale that fits the answers best is computed."""
        for case in self.selected()[:1]:
            for dtype, form in ((case.dtype, case.cache_dtype), *forms(self.capabilities)):
                tried = replace(case, lens=((1, 40), (7, 23), (33, 33), (1, 90)), dtype=dtype, cache_dtype=form)
                if accepted(self.capabilities, tried):
                    off = scale_error(self.scene(tried))
                    assert abs(off) < 1 / 300, f"{name_of(dtype)}, cache in {form}: the scale is off by {off:.2%}"

    def test_it_refuses_what_it_does_not_claim(self) -> None:
        for what, reasons in unclaimed(self.capabilities, self.on):
            assert reasons, f"it neither claims nor refuses {what}"

    def test_it_serves_a_plain_model(self) -> None:
        cases = self.selected()
        assert cases and accepted(self.capabilities, cases[0]), "it refuses even a model without any feature"

    def test_a_request_is_answered_alike_alone_and_among_others(self) -> None:
        """Bit for bit where the backend says `batch_invariant`, else each within its bound."""
        for case in self.selected():
            scene = self.scene(replace(case, lens=(*RAGGED, (1, 70), (3, 70), (1, 2))))
            whole, parts = scene.attend(), scene.last
            alone = torch.cat([scene.call([part]) for part in parts])
            turned = torch.split(scene.call(parts[::-1]), [len(part.request.queries) for part in parts[::-1]])
            for how, got in (("alone", alone), ("in another order", torch.cat(turned[::-1]))):
                holds(scene, got, when=how)
                if self.capabilities.batch_invariant:
                    assert torch.equal(got, whole), f"{case.name}: batch_invariant, yet {how} the answers differ"

    def test_a_prompt_in_chunks_of_any_size_is_the_whole_prompt(self) -> None:
        for case in self.selected():
            size = case.block_size
            num = 2 * size + 3
            for chunk in sorted({1, max(size - 1, 1), size, size + 1}):
                scene = self.scene(replace(case, lens=((num, num), (2, 5))))
                prompt, other = scene.requests
                scene.call([Part(other, 0, 3)])
                pieces = [scene.call([Part(prompt, at, min(at + chunk, num))]) for at in range(0, num, chunk)]
                holds(scene, torch.cat([*pieces, scene.call([Part(other, 3, 5)])]), when=f"in chunks of {chunk}")

    def test_a_step_run_twice_gives_the_same(self) -> None:
        for case in self.selected():
            scene = self.scene(case)
            scene.attend()
            holds(scene, scene.call(scene.last), when="run again")

    def test_rows_that_see_no_key_are_zero_and_the_others_right(self) -> None:
        """4 queries on 2 keys, a query without any key, and a prompt; the memory of the output may hold NaN before."""
        for case in self.selected():
            scene = self.scene(replace(case, lens=((4, 4), (1, 1), (3, 3))))
            parts, seen = scene.last, (2, 0, 3)
            batch = replace(
                batch_of(parts, case.block_size, scene.device),
                kv_lens=torch.tensor(seen, dtype=torch.int32, device=scene.device),
                kv_lens_host=seen,
            )
            with fresh_memory_is_nan():
                got = scene.run(batch, parts)
            assert not got[:2].any() and not got[4].any(), f"{case.name}: a row that sees no key is not zero"
            for part, keys in zip(parts, seen, strict=True):
                part.request.keys, part.request.values = part.request.keys[:keys], part.request.values[:keys]
            holds(scene, got)

    def test_a_plan_brought_up_to_date_answers_the_next_step(self) -> None:
        """Where it claims `graphs`; on a GPU the launches are captured once and replayed."""
        if not self.capabilities.graphs:
            raise SkipTest("it does not claim graphs")
        for case in self.selected():
            holds(*replayed(self.make(), case), when="replayed")


def attention_rules(component: type) -> Iterator[tuple[str, Callable[[], object]]]:
    """The rules of a backend made by `component()`: (sentence, check). A check may raise SkipTest."""
    suite = type("Suite", (AttentionContract,), {"make": staticmethod(component)})()
    if why := suite.missing:
        yield "it can run here", partial(_refuse, why)
        return
    for name in dir(suite):
        if name.startswith("test_"):
            check, sentence = getattr(suite, name), name.removeprefix("test_").replace("_", " ")
            if "case" not in inspect.signature(check).parameters:
                yield sentence, check
                continue
            yield from ((f"{sentence}: {case.name}", partial(check, case)) for case in suite.cases())


def _refuse(why: str) -> None:
    raise RuntimeError(why)


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """New memory holds NaN until it is written."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what is not deterministic, which is not asked here
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
