"""Forms of answers in the engine: who waits for what, how answers end, and that each token fits wherever a request may be.

The form of these tests: the answer's first token may be any that is 0 modulo 3, the next 1, then 2, and so on; it is
complete with `LENGTH` tokens, and may end from `LEAST` on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import Tensor

from turnout.core import ContractError, Finish, Request, Sampling
from turnout.core.model import Limits
from turnout.core.structured import Grammar, GrammarState, StructuredSpec
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.testing import check_balance, make_engine
from turnout.testing.fake import VOCAB

LENGTH, LEAST, END = 9, 6, 1


def spec(name: str = "a", **options: Any) -> StructuredSpec:
    return StructuredSpec("regex", name, **options)


@dataclass
class Turns:
    """A state of that form."""

    tokens: list[int] = field(default_factory=list)

    @property
    def accepting(self) -> bool:
        return len(self.tokens) >= LEAST

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= LENGTH

    def advance(self, tokens: Sequence[int]) -> int:
        for place, token in enumerate(tokens):
            if self.finished or token == END or token % 3 != len(self.tokens) % 3:
                return place
            self.tokens.append(token)
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def copy(self) -> GrammarState:
        return Turns(self.tokens.copy())

    def fill(self, row: Tensor) -> None:
        row.zero_()
        for token in range(len(self.tokens) % 3, VOCAB, 3) if not self.finished else ():
            if token != END:
                bit = 1 << token % 32
                row[token // 32] |= bit - (1 << 32) if token % 32 == 31 else bit


class TurnsGrammar:
    def start(self) -> GrammarState:
        return Turns()


@dataclass
class Compiler:
    """Compiles at once, or when told; what is called "bad" it refuses."""

    gate: threading.Event | None = None
    asked: list[str] = field(default_factory=list)

    def prepare(self, path: str, vocab_size: int) -> None: ...

    def compile(self, spec: StructuredSpec) -> Grammar:
        self.asked.append(spec.value)
        if self.gate is not None and spec.value != "quick":
            assert self.gate.wait(30)
        if spec.value == "bad":
            raise ValueError("can't be enforced at #/properties/a")
        if spec.value == "broken":
            raise RuntimeError("a bug")
        return TurnsGrammar()


def asked(rid: str = "x", prompt: Sequence[int] = (5, 6, 7), form: str = "a", **options: Any) -> Request:
    sampling = {"max_tokens": 20, "structured": spec(form), **options}
    return Request(rid, list(prompt), Sampling(0, **sampling))


def served(
    engine: Any, *requests: Request, gate: threading.Event | None = None, most: int = 2000
) -> dict[str, tuple[list[int], Finish, str | None]]:
    """What each got; `gate` opens when all are asked."""
    found: dict[str, Any] = {request.id: ([], None, None) for request in requests}
    for request in requests:
        engine.add(request)
    if gate is not None:
        gate.set()
    for _ in range(most):
        if not engine.busy:
            return found
        for output in engine.step():
            tokens = found[output.request_id][0] + list(output.tokens)
            found[output.request_id] = (tokens, output.finish, output.error)
        check_balance(engine)
    raise AssertionError("it does not end")


def fits(tokens: Sequence[int]) -> bool:
    return all(token % 3 == place % 3 for place, token in enumerate(tokens))


class TestHowAnswersEnd:
    def test_a_complete_answer_ends_at_once(self) -> None:
        tokens, finish, _ = served(make_engine(FCFS(), structured=Compiler()), asked())["x"]
        assert finish is Finish.COMPLETE and len(tokens) == LENGTH and fits(tokens)

    def test_max_tokens_in_the_middle_is_length(self) -> None:
        tokens, finish, _ = served(make_engine(FCFS(), structured=Compiler()), asked(max_tokens=4))["x"]
        assert finish is Finish.LENGTH and len(tokens) == 4 and fits(tokens)

    def test_an_end_token_may_follow_only_where_the_answer_may_end(self) -> None:
        request = asked(stop_ids=frozenset({END}))
        tokens, finish, _ = served(make_engine(FCFS(), structured=Compiler()), request)["x"]
        assert (END in tokens) == (finish is Finish.STOP)
        assert END not in tokens[:LEAST] and fits(tokens[:LEAST])

    def test_stop_tokens_wait_for_min_tokens_unless_nothing_else_may_follow(self) -> None:
        from turnout.core.grammars import Followed, Row, StepConstraint
        from turnout.core.types import GrammarStats

        def allowed(num: int, min_tokens: int) -> bool:
            state = Turns([place % 3 + 3 for place in range(num)])
            request = asked(stop_ids=frozenset({END}), min_tokens=min_tokens)
            bits = StepConstraint([Row(0, request, Followed(state, num), num)], VOCAB, GrammarStats()).fill()
            return bool(bits[0, 0] >> END & 1)

        assert [allowed(num, 0) for num in (LEAST - 1, LEAST, LENGTH)] == [False, True, True]
        assert [allowed(num, 20) for num in (LEAST - 1, LEAST, LENGTH)] == [False, False, True]


class TestWhoWaits:
    def test_a_form_that_is_compiling_lets_its_own_request_wait_and_nobody_else(self) -> None:
        compiler = Compiler(threading.Event())
        engine = make_engine(FCFS(), structured=compiler)
        engine.add(asked("slow"))
        plain = Request("plain", [1, 2, 3], Sampling(0, max_tokens=3))
        engine.add(plain)
        while plain.finish is None:
            engine.step()
        assert engine.busy and engine.stats.num_compiling == 1 and [r.id for r in engine.waiting] == ["slow"]
        assert compiler.gate is not None
        compiler.gate.set()
        outputs = [output for _ in range(500) if engine.busy for output in engine.step()]
        assert outputs[-1].finish is Finish.COMPLETE and engine.stats.num_compiling == 0

    def test_an_engine_that_only_compiles_is_no_scheduler_that_runs_nothing(self) -> None:
        compiler = Compiler(threading.Event())
        engine = make_engine(FCFS(), structured=compiler)
        engine.add(asked())
        for _ in range(300):
            assert engine.step() == []
        assert compiler.gate is not None
        compiler.gate.set()

    def test_a_form_is_compiled_once_for_all_who_ask_for_it(self) -> None:
        compiler = Compiler()
        engine = make_engine(FCFS(), structured=compiler)
        served(engine, *(asked(f"{number}") for number in range(5)), asked("other", form="b"))
        served(engine, asked("later"))
        assert sorted(compiler.asked) == ["a", "b"]
        assert (engine.stats.grammars.compiled, engine.stats.grammars.reused) == (2, 5)

    def test_a_waiting_request_can_be_aborted(self) -> None:
        compiler = Compiler(threading.Event())
        engine = make_engine(FCFS(), structured=compiler)
        engine.add(asked())
        engine.abort("x")
        assert not engine.busy and compiler.gate is not None
        compiler.gate.set()


class TestRefusals:
    @pytest.mark.parametrize("form, why", [("bad", "#/properties/a"), ("broken", "RuntimeError: a bug")])
    def test_a_form_that_does_not_compile_ends_its_request_and_nobody_else(self, form: str, why: str) -> None:
        gate = threading.Event()
        engine = make_engine(FCFS(), structured=Compiler(gate))
        plain = Request("z", [1, 2], Sampling(0, max_tokens=2))
        found = served(engine, asked("x", form=form), asked("y"), plain, gate=gate)
        assert found["x"][1] is Finish.REFUSED and why in str(found["x"][2])
        assert found["y"][1] is Finish.COMPLETE and found["z"][1] is Finish.LENGTH
        with pytest.raises(ValueError, match=why):  # it is known by now
            engine.add(asked("again", form=form))
        assert engine.stats.grammars.refused == 2 and not engine.busy

    def test_one_that_takes_too_long_is_refused_and_served_once_it_is_there(self) -> None:
        seconds, compiler = [0.0], Compiler(threading.Event())
        engine = make_engine(FCFS(), structured=compiler, limits=Limits(grammar_timeout=2.0), clock=lambda: seconds[0])
        engine.add(asked())
        assert engine.step() == []
        seconds[0] = 2.5
        (output,) = engine.step()
        assert output.finish is Finish.REFUSED and "limits.grammar_timeout" in str(output.error)
        assert compiler.gate is not None
        compiler.gate.set()
        assert served(engine, asked("later"))["later"][1] is Finish.COMPLETE

    def test_one_that_is_too_large_is_refused_at_once(self) -> None:
        engine = make_engine(FCFS(), structured=Compiler(), limits=Limits(max_grammar_size=100))
        with pytest.raises(ValueError, match="limits.max_grammar_size is 100"):
            engine.add(asked(form="a" * 101))

    def test_an_engine_without_anything_that_enforces_says_so(self) -> None:
        with pytest.raises(ValueError, match="no form"):
            make_engine(FCFS()).add(asked())

    def test_a_runner_that_does_not_heed_the_form_breaks_its_contract(self) -> None:
        engine = make_engine(FCFS(), structured=Compiler())
        run = engine._runner.run
        engine._runner.run = lambda step: run(replace(step, constraint=None))  # type: ignore[method-assign]
        with pytest.raises(ContractError, match="constraint"):
            served(engine, asked())

    def test_a_state_that_fails_ends_its_request_and_nobody_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill = Turns.fill

        def failing(self: Turns, row: Tensor) -> None:
            if len(self.tokens) == 3:
                raise RuntimeError("too complex")
            fill(self, row)

        engine = make_engine(FCFS(), structured=Compiler())
        monkeypatch.setattr(Turns, "fill", failing)
        found = served(engine, asked(), Request("plain", [1, 2], Sampling(0, max_tokens=8)))
        assert found["x"][1] is Finish.ERROR and "RuntimeError: too complex" in str(found["x"][2])
        assert found["plain"][1] is Finish.LENGTH and engine.stats.grammars.failed == 1


class TestWhereverARequestMayBe:
    @pytest.mark.parametrize("policy", [Recompute(), Swap(8)], ids=["recompute", "swap"])
    def test_preemption_changes_nothing(self, policy: Any) -> None:
        requests = [asked(f"{number}", range(number, number + 6)) for number in range(6)]
        alone = {
            r.id: served(make_engine(FCFS(), structured=Compiler()), asked(r.id, r.tokens))[r.id] for r in requests
        }
        engine = make_engine(FCFS(), structured=Compiler(), num_blocks=9, preemption=policy)
        assert served(engine, *requests) == alone
        assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap > 0

    def test_prompts_in_pieces_and_cached_ones_change_nothing(self) -> None:
        alone = served(make_engine(FCFS(), structured=Compiler()), asked(prompt=range(20)))["x"]
        engine = make_engine(ChunkedPrefill(chunk=3), structured=Compiler())
        assert served(engine, asked(prompt=range(20)))["x"] == alone
        assert served(engine, asked("again", prompt=range(20)))["again"] == alone and engine.stats.cached_tokens > 0

    def test_children_have_answers_of_their_own(self) -> None:
        engine = make_engine(FCFS(), structured=Compiler())
        first, second = asked("first"), asked("second")
        second.parent = "first"
        found = served(engine, first, second)
        assert found["first"] == found["second"] and fits(found["second"][0])

    def test_one_that_goes_on_with_anothers_answer_copies_its_state_up_to_where_they_differ(self) -> None:
        engine = make_engine(FCFS(), structured=Compiler())
        parent = asked("parent", max_tokens=4)
        parent.keep = True
        tokens = served(engine, parent)["parent"][0]
        other = (tokens[3] + 3) % VOCAB or 3
        child = asked("child", [5, 6, 7, *tokens[:3], other], max_tokens=2)
        child.num_begun, child.parent = 4, "parent"
        said = served(engine, child)["child"][0]
        assert [token % 3 for token in said] == [1, 2]
        assert not engine._grammars._followed.keys() - {"parent"}
        engine.drop("parent")
        assert not engine._grammars._followed

    def test_a_step_with_and_one_without_forms_stand_side_by_side(self) -> None:
        plain = Request("plain", [1, 2, 3], Sampling(0, max_tokens=8))
        alone = served(make_engine(FCFS()), Request("plain", [1, 2, 3], Sampling(0, max_tokens=8)))["plain"]
        found = served(make_engine(FCFS(), structured=Compiler()), asked("x"), plain, asked("y", [9, 9]))
        assert found["plain"] == alone and fits(found["x"][0]) and fits(found["y"][0])
