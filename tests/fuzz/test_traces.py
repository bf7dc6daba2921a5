"""Traces as data: printed so that they run, played to their first fault."""

from __future__ import annotations

from dataclasses import replace

import planted
import pytest

from turnout.core import PreemptMode
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.preemption import Recompute, Swap
from turnout.plugins.scheduler import FCFS
from turnout.testing.chance import variants
from turnout.testing.shorten import shorten
from turnout.testing.shuffle import Shuffle
from turnout.testing.traces import FINISH, STEP, Call, Fault, Part, Setup, Trace, name_of, play

PLAIN = Setup(Part(FCFS), Part(Recompute), Part(PagedBlocks), 64, 64, 8, 0.001)


def add(rid: str, *tokens: int, **options: object) -> Call:
    return Call("add", (rid, list(tokens)), tuple(options.items()))


def test_steps_in_a_row_are_one_line_and_what_is_the_default_is_not_printed() -> None:
    code = Fault(Trace(PLAIN, (add("a", 1, salt="x"), STEP, STEP, Call("abort", ("a",)), STEP)), 'said "no"').test
    assert code.splitlines()[1:2] + code.splitlines()[7:] == [
        '    """said \'no\'"""',
        "    engine = Watched(",
        "        FCFS(),",
        "        preemption=Recompute(),",
        "        blocks=PagedBlocks(),",
        "    )",
        '    engine.add("a", [1], salt="x")',
        "    engine.step(2)",
        '    engine.abort("a")',
        "    engine.step()",
    ]


def test_an_option_that_is_an_enumeration_is_imported() -> None:
    part = Part(planted.Prefers, (("preferred", PreemptMode.SWAP),))
    code = Fault(Trace(replace(PLAIN, preemption=part), (add("a", 1), FINISH)), "").test
    assert "preemption=Prefers(preferred=PreemptMode.SWAP)" in code
    pasted: dict[str, object] = {}
    exec(code + "\ntest_found_by_the_fuzzer()", pasted)  # noqa: S102


def test_every_value_of_an_enumeration_and_of_a_flag_is_tried() -> None:
    modes = {dict(part.options)["preferred"] for part in variants(planted.Prefers)}
    assert modes == set(PreemptMode)
    assert {dict(part.options)["missteps"] for part in variants(Shuffle)} == {False, True}


def test_options_that_refuse_each_other_are_not_tried_and_no_fault() -> None:
    refused = Part(PagedBlocks, (("prefix_cache", False), ("host_blocks", 3)))
    with pytest.raises(ValueError, match="host_blocks"):
        refused.build()
    assert play(Trace(replace(PLAIN, blocks=refused), (FINISH,))) is None
    options = [dict(part.options) for part in variants(PagedBlocks)]
    assert not [o for o in options if o["host_blocks"] and not o["prefix_cache"]]
    assert [o for o in options if not o["prefix_cache"]] and [o for o in options if o["host_blocks"]]


def test_a_trace_is_cut_after_the_first_fault_and_made_plain() -> None:
    setup = Setup(
        Part(Shuffle, (("seed", 3), ("mischief", 0))),
        Part(Swap, (("host_blocks", 8),)),
        Part(planted.MissedRelease, (("block_size", 3),)),
        num_blocks=12,
        max_num_batched_tokens=8,
        max_num_seqs=3,
        tick=0.0,
    )
    calls = (
        add("x", 5, 6, 7, 8, max_tokens=9, salt="s", priority=1),
        add("y", 5, 6, 7, max_tokens=6, parent="x", stop=range(4)),
        *(STEP,) * 4,
        Call("jump", (9.0,)),
        Call("abort", ("y",)),
        *(STEP,) * 4,
        FINISH,
    )
    fault = play(Trace(setup, calls))
    assert fault is not None and fault.trace.calls[-1] == Call("abort", ("y",))
    short = shorten(fault, [Part(FCFS), Part(Recompute), Part(planted.MissedRelease)])
    assert short.trace == Trace(
        replace(PLAIN, blocks=Part(planted.MissedRelease)),
        (add("a", 1, max_tokens=2), STEP, Call("abort", ("a",))),
    )


def test_there_are_ids_for_any_number_of_requests() -> None:
    assert [name_of(i) for i in (0, 1, 25, 26, 53)] == ["a", "b", "z", "a1", "b2"]
    assert len({name_of(i) for i in range(2000)}) == 2000
