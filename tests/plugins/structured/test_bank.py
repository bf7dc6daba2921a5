"""Two hundred schemas and a random model at temperature 1.5: every answer that ends fits, by jsonschema's own word."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import bytewise
import jsonschema
import pytest
from engines import composed
from schema_bank import WRITTEN, bank

from turnout.core.types import Finish, Request, Sampling, StructuredSpec
from turnout.server.text.tokenizer import Text

MOST = 600  # tokens of an answer
REFUSED = {  # of those written by hand, by llguidance
    "overlapping", "unique items", "contains", "negation", "conditional", "dependent", "remote", "unknown format",
    "lookahead", "unsatisfiable",
}  # fmt: skip


class Found(NamedTuple):
    answers: dict[str, str]  # that ended, by the schema's name
    refused: dict[str, str]
    cut: set[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytewise.save_model(tmp_path_factory.mktemp("bytes"))


def served(folder: Path, schemas: dict[str, Any], structured: str, *overrides: str) -> Found:
    """An answer to each, all at once. The bytes that close a text or a value are likelier than chance has them."""
    text, found = Text.load(str(folder)), Found({}, {}, set())
    closing = {text.encode(byte)[0]: 4.0 for byte in '"]}'} | dict.fromkeys(text.eos_ids, 4.0)
    engine = composed(folder, f"structured={structured}", "limits.max_num_seqs=32", *overrides)
    said: dict[str, list[int]] = {name: [] for name in schemas}
    for seed, (name, schema) in enumerate(schemas.items()):
        spec = StructuredSpec("json_schema", json.dumps(schema))
        sampling = Sampling(1.5, seed=seed, max_tokens=MOST, structured=spec, logit_bias=closing, stop_ids=text.eos_ids)
        engine.add(Request(name, [1, 2 + seed], sampling))
    while engine.busy:
        for output in engine.step():
            said[output.request_id] += output.tokens
            if output.finish is Finish.REFUSED:
                found.refused[output.request_id] = output.error or ""
            elif output.finish is Finish.LENGTH:
                found.cut.add(output.request_id)
            elif output.finish is not None:
                assert output.finish in (Finish.STOP, Finish.COMPLETE), f"{output.request_id}: {output.error}"
                found.answers[output.request_id] = text.decode(said[output.request_id])
    assert engine.stats.num_blocks_free == engine.info.num_blocks
    stats = engine.stats.grammars
    assert stats.failed == 0 and stats.refused == len(found.refused)
    return found


def check(schemas: dict[str, Any], found: Found) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for name, answer in found.answers.items():
        jsonschema.validate(json.loads(answer), schemas[name], format_checker=checker)


def test_a_few_schemas_of_each_kind_are_kept_to(folder: Path) -> None:
    names = ["weather", "tree", "unicode keys", "tool call", "matrix", "enum", "patterns", "unique items", "remote"]
    schemas = {name: WRITTEN[name] for name in names}
    found = served(folder, schemas, "llguidance")
    check(schemas, found)
    assert set(found.refused) == {"unique items", "remote"}
    assert len(found.answers) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("structured, most_refused", [("llguidance", 12), ("xgrammar", 124)])
def test_two_hundred_schemas_are_kept_to_or_refused(
    folder: Path, structured: str, most_refused: int, capsys: pytest.CaptureFixture[str]
) -> None:
    schemas, began = bank(), time.perf_counter()
    assert len(schemas) >= 200
    found = served(folder, schemas, structured)
    check(schemas, found)
    if structured == "llguidance":
        assert REFUSED <= set(found.refused)
    assert len(found.refused) <= most_refused
    assert len(found.answers) >= 0.6 * (len(schemas) - len(found.refused))
    with capsys.disabled():
        print(f"\n{structured}: {len(schemas)} schemas, {len(found.refused)} refused, {len(found.answers)} ended, "
              f"{len(found.cut)} cut at {MOST} tokens, {time.perf_counter() - began:.0f} s")  # fmt: skip
