"""`turnout generate` and `turnout chat` with several answers: what is asked of the engine, and what is printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from beam_reference import HashedRunner, asking, hashed, plainly
from grids import every

from turnout.core.engine import Engine
from turnout.core.types import Result, Step
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.scheduler import FCFS
from turnout.server.cli import offline
from turnout.server.config import ChatConfig, GenerateConfig, SamplingConfig
from turnout.server.text.tokenizer import Text
from turnout.testing import check_balance, make_engine

PROMPT = "The sea is"
HEAD = re.compile(r"^--- (\d) of (\d): log-probability (-?[\d.]+), (\d+) tokens$", re.MULTILINE)
BEAM = {"use_beam_search": True, "beam_width": 4}


@pytest.fixture(scope="module")
def text(smollm2: str) -> Text:
    return Text.load(smollm2)


@pytest.fixture
def engine(text: Text) -> Engine:
    made = make_engine(FCFS(), num_blocks=64, block_size=4, blocks=PagedBlocks(4), max_num_seqs=8)
    made.info = replace(made.info, vocab_size=text.vocab_size)
    made._runner = HashedRunner(64, 4)
    return made


@pytest.fixture
def generate(
    engine: Engine, text: Text, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`turnout generate` with these sampling options: what it prints. The engine is left as it was."""
    monkeypatch.setattr(offline, "open_engine", lambda config: (engine, text))

    def run(**sampling: Any) -> str:
        options = {"max_tokens": 8, "generation_config": "none"} | sampling
        assert offline.generate(GenerateConfig(prompt=PROMPT, sampling=SamplingConfig(**options))) == 0
        check_balance(engine)
        assert not engine.busy and not engine._kept and engine.stats.num_blocks_free == 64
        return capsys.readouterr().out

    return run


def answers_in(printed: str) -> list[str]:
    """The texts under the heads."""
    pieces = HEAD.split(printed)
    assert not pieces[0]
    return [piece.removeprefix("\n").removesuffix("\n") for piece in pieces[5::5]]


def searched(text: Text, num: int, **options: Any) -> list[str]:
    """What a search written down plainly finds."""
    asked = asking(text.encode(PROMPT), 4, num, max_tokens=8, stop_ids=text.eos_ids, **options)
    return [text.decode([t for t in answer.tokens if t not in text.eos_ids]) for answer in plainly(hashed, asked)]


def test_a_beam_search_prints_the_best_answer(generate: Callable[..., str], text: Text) -> None:
    assert generate(**BEAM) == searched(text, 1)[0] + "\n"


@pytest.mark.parametrize("options", [{}, {"length_penalty": 0.0, "early_stopping": True}, {"early_stopping": "never"}])
def test_or_the_n_best_each_under_its_log_probability(
    generate: Callable[..., str], text: Text, options: dict[str, Any]
) -> None:
    printed = generate(n=3, **BEAM, **options)
    assert answers_in(printed) == searched(text, 3, **options)
    asked = asking(text.encode(PROMPT), 4, 3, max_tokens=8, stop_ids=text.eos_ids, **options)
    for head, answer in zip(HEAD.findall(printed), plainly(hashed, asked), strict=True):
        assert (float(head[2]), int(head[3])) == (round(answer.total, 3), len(answer.tokens))


def test_without_a_width_n_is_the_width(generate: Callable[..., str], text: Text) -> None:
    asked = asking(text.encode(PROMPT), 2, max_tokens=8, stop_ids=frozenset())
    printed = generate(n=2, use_beam_search=True, ignore_eos=True)
    assert answers_in(printed) == [text.decode(answer.tokens) for answer in plainly(hashed, asked)]


class Seeded(HashedRunner):
    """A request's tokens depend on its seed; those of seed 2 are the likeliest."""

    def run(self, step: Step) -> Result:
        result = super().run(step)
        seeds = [chunk.request.sampling.seed or 0 for chunk in step.chunks if chunk.samples]
        tokens = [30 + seed for seed in seeds]
        marks = {i: mark._replace(logprob=-0.5 * abs(seeds[i] - 2) - 0.1) for i, mark in result.logprobs.items()}
        return result._replace(tokens=tokens, logprobs=marks)


@pytest.fixture
def seeded(engine: Engine) -> None:
    engine._runner = Seeded(64, 4)


@pytest.mark.usefixtures("seeded")
class TestSampled:
    def test_n_answers_have_seeds_of_their_own_and_the_likeliest_comes_first(
        self, generate: Callable[..., str], text: Text
    ) -> None:
        printed = generate(n=3, seed=0, max_tokens=2)
        assert answers_in(printed) == [text.decode([t, t]) for t in (32, 31, 30)]
        assert [head[:2] for head in HEAD.findall(printed)] == [("1", "3"), ("2", "3"), ("3", "3")]

    def test_of_best_of_the_likeliest_is_printed(self, generate: Callable[..., str], text: Text) -> None:
        assert generate(best_of=5, seed=0, max_tokens=2) == text.decode([32, 32]) + "\n"

    def test_a_stop_string_ends_only_the_answer_it_is_in(self, generate: Callable[..., str], text: Text) -> None:
        printed = generate(n=3, seed=0, max_tokens=3, stop=[text.decode([31])])
        assert answers_in(printed) == [text.decode([32] * 3), "", text.decode([30] * 3)]
        assert [head[3] for head in HEAD.findall(printed)] == ["3", "1", "3"]

    def test_the_prompt_is_computed_once(self, generate: Callable[..., str], engine: Engine, text: Text) -> None:
        generate(n=4, seed=0, max_tokens=3)
        assert isinstance(engine._runner, Seeded)
        num = len(text.encode(PROMPT))
        assert [step.num_tokens for step in engine._runner.steps] == [num, 1 + 3, 1 + 3, 3]


def test_an_engine_that_fails_says_why_and_nothing_is_left(
    generate: Callable[..., str], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine._runner.run

    def failing(step: Step) -> Result:
        return plain(step)._replace(errors={0: "its logits are NaN"})

    monkeypatch.setattr(engine._runner, "run", failing)
    for options in (BEAM, {"n": 2}):
        with pytest.raises(ValueError, match="its logits are NaN"):
            generate(**options)
        assert not engine.busy and engine.stats.num_blocks_free == 64


def test_a_chat_goes_on_from_the_best_answer(
    engine: Engine, text: Text, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter(["Hi", "More", "/bye"])
    seen: list[Sequence[Any]] = []
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    monkeypatch.setattr(offline, "open_engine", lambda config: (engine, text))
    monkeypatch.setattr(text, "chat", lambda messages: seen.append(list(messages)) or [5, 6, 7])
    assert offline.chat(ChatConfig(sampling=SamplingConfig(max_tokens=5, generation_config="none", **BEAM))) == 0
    best, *_ = plainly(hashed, asking([5, 6, 7], 4, max_tokens=5, stop_ids=text.eos_ids))
    answer = text.decode([t for t in best.tokens if t not in text.eos_ids])
    assert [message["content"] for message in seen[1]] == ["Hi", answer, "More"]
    assert capsys.readouterr().out == f"{answer}\n" * 2


@every(
    ("options", "message"),
    [
        ({"n": 0}, "sampling.n must be at least 1, got 0"),
        ({"n": 3, "best_of": 2}, "sampling.best_of must be at least sampling.n, 3, got 2"),
        (
            {"n": 3, "use_beam_search": True, "beam_width": 2},
            "sampling.beam_width must be at least sampling.n, 3, got 2",
        ),
        ({"beam_width": 2}, "sampling.beam_width=2 needs sampling.use_beam_search=true"),
        ({"length_penalty": 2.0}, "sampling.length_penalty=2.0 needs sampling.use_beam_search=true"),
        ({"early_stopping": True}, "sampling.early_stopping=True needs sampling.use_beam_search=true"),
        ({"early_stopping": "often", **BEAM}, "sampling.early_stopping must be true, false or never, got 'often'"),
        ({"length_penalty": 11.0, **BEAM}, "sampling.length_penalty must be between -10 and 10, got 11.0"),
        ({"best_of": 3, **BEAM}, "sampling.best_of=3 does not go with sampling.use_beam_search=true"),
        ({"temperature": 0.5, **BEAM}, "sampling.temperature=0.5 does not go with"),
        ({"repetition_penalty": 1.2, **BEAM}, "sampling.repetition_penalty=1.2 does not go with"),
        ({"presence_penalty": 1.0, **BEAM}, "sampling.presence_penalty=1.0 does not go with"),
        ({"frequency_penalty": 1.0, **BEAM}, "sampling.frequency_penalty=1.0 does not go with"),
        ({"stop": ["."], **BEAM}, r"sampling.stop=\['.'\] does not go with"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**options)


def test_a_chat_has_one_answer() -> None:
    with pytest.raises(ValueError, match="sampling.n must be 1 in a chat"):
        ChatConfig(sampling=SamplingConfig(n=2))
