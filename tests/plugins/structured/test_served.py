"""Forms of answers on a tiny model with everything around it: what changes nothing, and what must not change them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import bytewise
import pytest
from engines import composed

from turnout.core import Request, Sampling
from turnout.core.engine import Engine
from turnout.core.types import Finish, Output, StructuredSpec
from turnout.server.engine.beam import ServedEngine
from turnout.server.engine.messages import BeamSearch
from turnout.server.text.tokenizer import Text

EXPRESSION = "(yes|no)(, (yes|no)){1,3}"
SPECS = (
    StructuredSpec("regex", EXPRESSION),
    StructuredSpec("choice", '["red", "green", "blue"]'),
    StructuredSpec(
        "json_schema", json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4})
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytewise.save_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def text(folder: Path) -> Text:
    return Text.load(str(folder))


def requests(text: Text, **options: Any) -> list[Request]:
    """Some with a form, some without."""
    return [
        Request(
            f"{place}",
            [3 + place, *range(20, 30)],
            Sampling(
                1.2, seed=place, max_tokens=40, stop_ids=text.eos_ids, structured=(*SPECS, None)[place % 4], **options
            ),
        )
        for place in range(8)
    ]


def said(engine: Engine, asked: list[Request]) -> dict[str, tuple[list[int], Finish | None]]:
    found: dict[str, tuple[list[int], Finish | None]] = {request.id: ([], None) for request in asked}
    for output in engine.generate(asked):
        assert output.error is None, output.error
        found[output.request_id] = (found[output.request_id][0] + list(output.tokens), output.finish)
    assert engine.stats.grammars.failed == 0 and engine.stats.num_blocks_free == engine.info.num_blocks
    return found


@pytest.fixture(scope="module")
def alone(folder: Path, text: Text) -> dict[str, tuple[list[int], Finish | None]]:
    """Each by itself."""
    engine, found = composed(folder, "blocks.num_blocks=64"), {}
    for request in requests(text):
        found |= said(engine, [request])
    for rid, (tokens, finish) in found.items():
        answer = text.decode(tokens)
        assert int(rid) % 4 == 3 or finish in (Finish.STOP, Finish.COMPLETE)
        assert int(rid) % 4 != 0 or re.fullmatch(EXPRESSION, answer)
        assert int(rid) % 4 != 2 or 2 <= len(json.loads(answer)) <= 4
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        ("blocks.num_blocks=64", "runner.async_scheduling=true"),
        ("blocks.num_blocks=12", "blocks.block_size=8", "preemption=recompute"),
        ("blocks.num_blocks=12", "blocks.block_size=8", "preemption=swap", "blocks=radix"),
        ("blocks.num_blocks=64", "scheduler=chunked_prefill", "scheduler.chunk=4"),
        ("blocks.num_blocks=12", "blocks.block_size=8", "runner.async_scheduling=true", "structured=xgrammar"),
    ],
    ids=lambda overrides: " ".join(overrides[1:]) or "together",
)
def test_nothing_around_an_answer_changes_it(
    folder: Path, text: Text, alone: dict[str, tuple[list[int], Finish | None]], overrides: tuple[str, ...]
) -> None:
    engine = composed(folder, *overrides)
    assert said(engine, requests(text)) == alone
    if "blocks.num_blocks=12" in overrides:
        assert engine.stats.preemptions_recompute + engine.stats.preemptions_swap > 0


def test_logprobs_are_the_models_own(folder: Path, text: Text) -> None:
    engine = composed(folder, "blocks.num_blocks=64")
    outputs: list[Output] = []
    for structured in (SPECS[0], None):
        request = Request("x", [3, 4, 5], Sampling(0, max_tokens=1, logprobs=200, structured=structured))
        outputs += engine.generate([request])
    formed, free = (output.logprobs[0] for output in outputs)
    assert dict(formed.top)[formed.token] == pytest.approx(dict(free.top)[formed.token])
    assert formed.top[0] == free.top[0] and formed.rank > 1


def test_bias_and_penalties_choose_among_what_may_follow(folder: Path, text: Text) -> None:
    engine = composed(folder, "blocks.num_blocks=64")
    for word in ("red", "green", "blue"):
        first = text.encode(word)[0]
        sampling = Sampling(
            0, max_tokens=9, structured=SPECS[1], logit_bias={first: 100.0, text.encode("z")[0]: 100.0},
            repetition_penalty=1.2, stop_ids=text.eos_ids,
        )  # fmt: skip
        tokens, finish = said(engine, [Request(word, [3, 4], sampling)])[word]
        assert text.decode(tokens) == word and finish is Finish.COMPLETE


@pytest.mark.parametrize("structured", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("form", [("json_schema", '{"$ref": "#"}'), ("grammar", "root ::= root"), ("regex", "(x{0})")])
def test_a_form_that_no_answer_has_is_refused(folder: Path, structured: str, form: tuple[Any, str]) -> None:
    engine = composed(folder, "blocks.num_blocks=64", f"structured={structured}")
    request = Request("x", [3, 4], Sampling(0, max_tokens=4, structured=StructuredSpec(*form)))
    try:
        (output,) = engine.generate([request])
    except ValueError:  # it was compiled before `add` returned
        return
    assert output.finish is Finish.REFUSED, output


def test_beams_have_the_form_and_are_the_likeliest_that_have_it(folder: Path, text: Text) -> None:
    engine = composed(folder, "blocks.num_blocks=64")
    sampling = Sampling(0, max_tokens=12, logprobs=0, stop_ids=text.eos_ids, structured=SPECS[1])
    served, found = ServedEngine(engine), {}
    served.add(BeamSearch(Request("a", [3, 4], sampling), ("a", "b", "c"), 3, 0.0))
    while served.busy:
        for output in served.step():
            assert output.error is None, output.error
            found[output.request_id] = (text.decode(list(output.tokens)), sum(l.logprob for l in output.logprobs))
    assert sorted(answer for answer, _ in found.values()) == ["blue", "green", "red"]
    assert [found[name][1] for name in "abc"] == sorted((total for _, total in found.values()), reverse=True)


def test_more_answers_than_the_form_has_are_refused(folder: Path, text: Text) -> None:
    engine = composed(folder, "blocks.num_blocks=64")
    sampling = Sampling(0, max_tokens=12, stop_ids=text.eos_ids, structured=StructuredSpec("choice", '["a", "b"]'))
    served = ServedEngine(engine)
    served.add(BeamSearch(Request("a", [3, 4], sampling), ("a", "b", "c"), 3))
    outputs = [output for _ in range(50) if served.busy for output in served.step()]
    assert [output.finish for output in outputs] == [Finish.STOP, Finish.STOP, Finish.REFUSED]
    assert "only 2 answers" in str(outputs[-1].error)
