"""Requests from files, by the shape of their first line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from grids import every
from simulations import arrival, shapes, simulation

from turnout.compose.config import Limits
from turnout.core.types import Request
from turnout.lab.workload.arrivals import Arrival, in_order
from turnout.lab.workload.trace import TraceFile
from turnout.plugins.blocks import PagedBlocks

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 2366]}
{"timestamp": 30535, "input_length": 512, "output_length": 3, "hash_ids": [48]}
"""


def requests(path: Path, text: str, factor: float = 1.0, **options: object) -> list[Request]:
    path.write_text(text)
    return [a.request for a in TraceFile(str(path), **options).arrivals(factor, 1)]  # type: ignore[arg-type]


def test_an_azure_trace_is_known_by_its_header(tmp_path: Path) -> None:
    found = requests(tmp_path / "any.name", AZURE)
    assert shapes(found) == [(0.0, 374, 44), (4.314579, 396, 109), (4.541977, 879, 55)]
    assert len({r.tokens[0] for r in found}) == 3  # no prefix is shared


def test_a_date_with_a_zone_is_read_as_well(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,5,6\n2024-05-10 02:00:01.5+02:00,7,8\n"
    assert shapes(requests(tmp_path / "t", text)) == [(0.0, 5, 6), (1.5, 7, 8)]


def test_a_burstgpt_trace_leaves_failed_requests_out_and_names_the_model_as_tenant(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(BURSTGPT)
    trace = TraceFile(str(tmp_path / "t.csv"))
    found = [a.request for a in trace.arrivals(1.0, 1)]
    assert shapes(found) == [(0.0, 472, 18), (113.5, 417, 276)]
    assert [r.labels["tenant"] for r in found] == ["ChatGPT", "GPT-4"]
    assert trace.notes() == [f"{tmp_path}/t.csv: left out, having no prompt or no answer: 1 requests"]


def test_mooncake_block_ids_become_prefixes_that_the_cache_finds(tmp_path: Path) -> None:
    first, second, third = requests(tmp_path / "t", MOONCAKE)
    assert shapes([first, second, third]) == [(0.0, 1100, 52), (3.053, 1030, 26), (3.053, 512, 3)]
    assert first.tokens[:1024] == second.tokens[:1024]
    assert first.tokens[1024:1030] != second.tokens[1024:1030]
    assert third.tokens[0] not in first.tokens
    run = simulation(
        workload=TraceFile(str(tmp_path / "t")),
        blocks=PagedBlocks(16, 400),
        limits=Limits(),
    )
    assert run.run().stats.cached_tokens == 1024


def test_a_gzipped_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode()))
    assert len(list(TraceFile(str(tmp_path / "t.csv.gz")).arrivals(1.0, 1))) == 3


def test_speed_and_factor_make_arrivals_denser_and_a_count_ends_them(tmp_path: Path) -> None:
    found = requests(tmp_path / "t", AZURE, factor=5.0, speed=2.0, num_requests=2)
    assert shapes(found) == [(0.0, 374, 44), (0.431458, 396, 109)]


RECORDED = [
    {
        "add": {
            "id": "a",
            "tokens": [5, 6, 7],
            "max_tokens": 9,
            "arrived": 100.0,
            "labels": {"tenant": "x"},
            "salt": "s",
        }
    },
    {"add": {"id": "b", "tokens": [5], "max_tokens": 9, "arrived": 100.5, "priority": 2}},
    {"step": 1, "chunks": [["a", 0, 3, True], ["b", 0, 1, True]], "tokens": [11, 21]},
    {"abort": "b", "at": 102.5},
    {"step": 2, "chunks": [["a", 3, 1, True]], "tokens": [12], "finished": [["a", "stop", 2, 0, 0]]},
]


def recording(path: Path) -> Path:
    info = dict.fromkeys(("model", "path", "architecture", "dtype", "device"), "") | {"plugins": {}, "versions": {}}
    info |= dict.fromkeys(("vocab_size", "max_model_len", "num_blocks", "block_size", "capacity"), 100)
    info |= {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    rest = {"preempted": [], "swap_out": 0, "copies": 0, "swap_in": 0, "reasons": {}, "blocks_free": 9, "finished": []}
    rest |= {"waiting": 0, "running": 1, "began": 101.0, "scheduled": 101.0, "ended": 102.0}
    lines = [{"turnout": 1, "info": info, "composition": {}, "fingerprint": "fp_"}]
    lines += [rest | line if "step" in line else line for line in RECORDED]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_recording_gives_prompts_labels_and_the_tokens_that_were_said(tmp_path: Path) -> None:
    first, second = TraceFile(str(recording(tmp_path / "r"))).arrivals(1.0, 1)
    assert (first.request.tokens, first.answer, first.request.arrived) == ([5, 6, 7], [11, 12], 0.0)
    assert (first.request.labels, first.request.salt) == ({"tenant": "x"}, "s")
    assert (second.answer, second.request.sampling.max_tokens) == ([21], 1)  # aborted after one
    assert (second.request.arrived, second.request.priority) == (0.5, 2)


@every(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1 is 'a,b', none of the shapes known: TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("", "line 1 is '', none of the shapes known"),
        (
            AZURE + "2023-11-16 18:15:52,many,1\n",
            "line 5: ContextTokens must be a whole number of at least 0, got 'many'",
        ),
        (AZURE + "yesterday,1,1\n", "line 5: TIMESTAMP must be like 2023-11-16 18:17:03.9799600, got 'yesterday'"),
        (AZURE + "2023-11-16 18:15:52,-1,1\n", "line 5: ContextTokens must be a whole number of at least 0, got -1"),
        (AZURE + "2023-11-16 18:15:52,1\n", "line 5: it has fewer fields than the first line"),
        (BURSTGPT + "-5,M,1,1,2,x\n", "line 5: Timestamp must be a number that is not negative, got -5.0"),
        (MOONCAKE + "{}\n", "line 4: timestamp is missing"),
        (MOONCAKE + '{"timestamp": 1, \n', "line 4: not JSON"),
        (MOONCAKE + "[]\n", "line 4: a JSON object is expected, got []"),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "line 1: hash_ids must be whole numbers, one per 512 tokens of input_length=600",
        ),
        ('{"turnout": 1}\n', "line 1 is no line of a recording"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        requests(tmp_path / "t", text)
    assert str(tmp_path / "t") in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            list(TraceFile(str(path)).arrivals(1.0, 1))


def test_lines_a_little_out_of_order_are_sorted_and_lines_far_out_of_order_are_named() -> None:
    def lines(*times: float) -> Iterator[tuple[Arrival, str]]:
        return ((arrival(at, 1, 1), f"line {i}") for i, at in enumerate(times, 1))

    assert [a.request.arrived for a in in_order(lines(1, 3, 2, 4), window=2)] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="line 4: arrives 2.000 s before one more than 2 lines above; sort"):
        list(in_order(lines(3, 4, 5, 1), window=2))
