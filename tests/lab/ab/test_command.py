"""`turnout ab` as it is typed: verdicts are exit codes, and nothing else is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bytewise import save_model
from commands import QUICK, Ab
from grids import every

from turnout.lab.ab import command
from turnout.lab.ab.config import OWN, AbConfig
from turnout.lab.compare.run import compare


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same tokenizer, other weights."""
    return str(save_model(tmp_path_factory.mktemp("other") / "other", initializer_range=0.21))


@pytest.mark.slow
def test_the_same_composition_is_equivalent_and_all_of_it_is_written(ab: Ab, tmp_path: Path) -> None:
    out, html = tmp_path / "out.json", tmp_path / "page.html"
    code, said, _ = ab("b=[]", *QUICK[:2], "rounds=2", "workload=facts", f"out={out}", f"html={html}", "api_key=hush")
    assert code == 0
    assert "EQUIVALENT" in said.split("\n")[0] and "24 of 24 the same" in said and "95 % interval" in said
    found = json.loads(out.read_text())
    (one,) = found["comparisons"]
    assert (found["exit_code"], one["verdict"]) == (0, "equivalent")
    assert one["b"]["fingerprint"] == found["a"]["fingerprint"]
    assert one["b"]["composition"]["scheduler"]["name"] == "fcfs" and found["machine"]["cores"]
    assert max(one["all"][side]["kl_max"] for side in ("b", "noise")) < 1e-12
    assert set(one["speed"]["ratios"]) == {"output tokens/s", "TTFT p50", "ITL p50", "ITL p99"}
    assert one["answers"]["checked"] == 24
    assert "hush" not in out.read_text() + html.read_text()


def test_other_weights_are_different_and_the_page_shows_both_texts_without_a_network(
    ab: Ab, other: str, tmp_path: Path
) -> None:
    html, out = tmp_path / "page.html", tmp_path / "out.json"
    code, said, _ = ab(f"b=[model={other}]", *QUICK, "num_prompts=21", f"html={html}", f"out={out}")
    assert code == 1
    assert said.startswith("DIFFERENT") and "above A's own noise" in said
    page = html.read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    worst = json.loads(out.read_text())["comparisons"][0]["worst"]["writings"]
    assert worst and page.count("<article>") == len(worst) and "<mark>" in page
    assert page.count("<svg") >= 3 and page.count("</svg>") == page.count("<svg")


def test_few_prompts_are_not_enough_and_it_is_said_how_many_would_be(ab: Ab) -> None:
    code, said, _ = ab("b=[]", *QUICK, "num_prompts=4")
    assert code == 2
    assert "NOT ENOUGH DATA" in said and "num_prompts=21" in said


@pytest.mark.slow
def test_transformers_is_the_outside_truth(ab: Ab) -> None:
    code, said, _ = ab("a=transformers", "b=[attention=torch],[transformers,dtype=float64]", *QUICK, "num_prompts=21")
    assert code == 0, said
    assert said.count("EQUIVALENT") == 2


def test_several_sides_make_a_matrix_and_the_worst_of_them_decides(ab: Ab, other: str, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    sides = f"b=[scheduler=chunked_prefill,scheduler.chunk=16],[model={other}]"
    code, said, _ = ab("--multirun", sides, *QUICK, "num_prompts=21", f"html={html}")
    assert code == 1
    matrix = said[: said.index("EQUIVALENT")]
    assert "scheduler=chunked_prefill scheduler.chunk=16" in matrix
    assert matrix.index(" equivalent ") < matrix.index(" different ")
    assert said.index("EQUIVALENT  scheduler=") < said.index("DIFFERENT  model=")
    assert 'href="#b2"' in html.read_text() and 'id="b2"' in html.read_text()


@every(
    ("args", "complaint"),
    [
        ([], "b has no default"),
        (["b=[attention=nothing]"], "attention=nothing: there is no such choice"),
        (["b=[scheduler.chunk=3]"], "Key 'chunk' not in 'FCFS'"),
        (["b=[]", "scheduler.chunk=3"], "Key 'chunk' not in 'FCFS'"),
        (["b=[]", "num_prompts=0"], "num_prompts must be at least 1, got 0"),
        (["b=[]", "judge.alpha=2"], "judge.alpha must be between 0 and 1"),
        (["b=[]", "effects.kl=0"], "effects.kl must be above 0"),
        (["b=[]", "temperature=0"], "temperature must be above 0"),
        (["b=[]", "workload=nothing"], "workload=nothing: there is no such file"),
        (["b=[]", "out=no/folder/x.json"], "there is no folder no/folder"),
        (["b=[]", "limits.max_model_len=99999"], "limits.max_model_len is 99999"),
        (["b=[model=no/such]"], "no/such"),
        (["b=[]", "--nonsense"], "there is no flag --nonsense"),
    ],
)
def test_a_wrong_command_ends_with_64(ab: Ab, args: list[str], complaint: str) -> None:
    code, _, said = ab(*args)
    assert code == command.USAGE == 64
    assert complaint in said and "Traceback" not in said


def test_a_server_that_is_not_there_ends_with_70(ab: Ab) -> None:
    code, _, said = ab("b=url=http://127.0.0.1:9", *QUICK)
    assert code == command.FAILED == 70
    assert "http://127.0.0.1:9 does not answer" in said


def test_a_fault_of_ours_is_no_verdict(ab: Ab, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise KeyError("a fault")

    monkeypatch.setattr("turnout.lab.compare.run.compare", broken)
    assert compare is not broken
    code, _, said = ab("b=[]", *QUICK, "num_prompts=4")
    assert code == 70 and "KeyError: 'a fault'" in said


def test_help_and_the_composition_are_shown_and_compare_nothing(ab: Ab) -> None:
    code, said, _ = ab("--cfg", "job", "b=[attention=torch]")
    assert code == 0 and "b: '[attention=torch]'" in said and "num_prompts: 24" in said
    assert "turnout ab" in ab("--help")[1]


def test_what_is_the_comparisons_own_is_no_key_of_an_engine() -> None:
    assert {"a", "b", "workload", "judge", "effects", "rounds"} <= OWN
    assert not OWN & {"model", "dtype", "attention", "limits"}
    assert AbConfig.__dataclass_fields__.keys() >= OWN


def test_it_works_in_a_process_that_has_simulated_before(ab: Ab) -> None:
    """There `workload` is a group of choices; here it is an option."""
    import turnout.lab.simulate.config  # noqa: F401  stores the group

    code, _, complained = ab("b=[]", *QUICK, "num_prompts=4")
    assert code == 2, complained
    main_help = ab("b=[]", "workload=nothing")
    assert main_help[0] == 64 and "there is no such file" in main_help[2]
