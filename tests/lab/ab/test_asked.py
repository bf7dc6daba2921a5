"""The command line of `turnout ab`, taken apart."""

from __future__ import annotations

import pytest
from grids import every

from turnout.lab.ab.asked import EngineAsked, ServerAsked, TruthAsked, read, split
from turnout.server.cli.overrides import Usage


def test_each_side_has_what_is_common_and_its_own_and_the_comparison_the_rest() -> None:
    line = read(
        ["a=[attention=torch]", "b=[attention=cpu, dtype=float32]", "model=M", "num_prompts=8", "limits.max_num_seqs=2"]
    )
    common = ["model=M", "limits.max_num_seqs=2"]
    assert line.a == EngineAsked("attention=torch", [*common, "attention=torch"])
    assert line.others == [EngineAsked("attention=cpu dtype=float32", [*common, "attention=cpu", "dtype=float32"])]
    assert line.common == common
    assert line.own == ["a='[attention=torch]'", "b='[attention=cpu, dtype=float32]'", "num_prompts=8"]


def test_without_a_the_baseline_is_what_is_common() -> None:
    assert read(["b=transformers", "model=M"]).a == EngineAsked("the defaults", ["model=M"])


def test_a_side_takes_over_what_is_common() -> None:
    line = read(["b=[attention=cpu,~experiment]", "attention=torch", "+experiment=x"])
    assert line.others[0].overrides == ["attention=cpu", "~experiment"]  # type: ignore[union-attr]
    assert line.a.overrides == ["attention=torch", "+experiment=x"]  # type: ignore[union-attr]


def test_several_sides_are_separated_by_commas_and_brackets_may_go_where_there_is_one_override() -> None:
    line = read(
        [
            "-m",
            "b=[attention=cpu,scheduler=fcfs],attention=torch,transformers,[transformers,dtype=float64],url=http://h:1/v1",
        ]
    )
    assert line.others == [
        EngineAsked("attention=cpu scheduler=fcfs", ["attention=cpu", "scheduler=fcfs"]),
        EngineAsked("attention=torch", ["attention=torch"]),
        TruthAsked("transformers", []),
        TruthAsked("transformers dtype=float64", ["dtype=float64"]),
        ServerAsked("url=http://h:1/v1", "http://h:1", None, ""),
    ]


def test_a_server_can_be_said_which_model_and_what_it_computes_in() -> None:
    line = read(["b=[url=https://h/, model=org/m, dtype=bfloat16]"])
    assert line.others == [ServerAsked("url=https://h/ model=org/m dtype=bfloat16", "https://h", "org/m", "bfloat16")]


def test_files_and_keys_are_quoted_for_hydra() -> None:
    line = read(["b=transformers", "workload=a b/c=d.jsonl", "api_key=x=y", "out=null", "html='x.html'"])
    assert line.own[1:] == ["workload='a b/c=d.jsonl'", "api_key='x=y'", "out=null", "html='x.html'"]


def test_commas_in_brackets_and_quotes_separate_nothing() -> None:
    assert split("[a=1,b=[2,3]],'x,y',{c: 1, d: 2},") == ["[a=1,b=[2,3]]", "'x,y'", "{c: 1, d: 2}"]


@every(
    ("args", "complaint"),
    [
        ([], "b has no default"),
        (["b="], "b has no default"),
        (["b=torch"], "'torch' is no side and no override of one"),
        (["b=[attention=cpu"], "lacks a ]"),
        (["b=attention=cpu]"], "has a ] that closes nothing"),
        (["b='attention=cpu"], "lacks a '"),
        (["b=[rounds=2]"], "rounds is of the whole comparison"),
        (["b=url=ftp://h"], "url must be like http://127.0.0.1:8000, got 'ftp://h'"),
        (["b=[url=http://h,key=1]"], "a server's side takes url, model, dtype, got key"),
        (["a=url=http://h", "b=url=http://g"], "at least one side must be composed here"),
        (["a=[attention=cpu],[attention=torch]", "b=transformers"], "a is one baseline, got 2"),
    ],
)
def test_what_can_not_be_read_is_said(args: list[str], complaint: str) -> None:
    with pytest.raises(Usage) as error:
        read(args)
    assert complaint in str(error.value)
