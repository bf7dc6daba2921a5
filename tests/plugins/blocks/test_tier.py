"""The host tier: what gives way comes back, unless somebody needs the room; what never arrived is never found."""

from __future__ import annotations

import pytest
from hands import MANAGERS, cached, driver, hog, prompt, run, serve

from turnout.core import Request
from turnout.core.model import Move
from turnout.core.optional import BlockMoves
from turnout.testing.block_driver import Driver

managers = pytest.mark.parametrize("manager", MANAGERS)
LONG = [*prompt(1), *prompt(2), *prompt(3)]


def on_host(manager: type, host_blocks: int = 8, num_blocks: int = 4, **options: object) -> Driver:
    """A driver after `LONG` was computed and gave way."""
    drv = driver(manager, num_blocks, host_blocks=host_blocks, **options)
    serve(drv, LONG)
    drv.release(hog(drv, num_blocks))
    drv.begin()
    return drv


def counts(drv: Driver) -> tuple[int, int]:
    assert drv.sharing is not None
    return drv.sharing.stats.tier_out, drv.sharing.stats.tier_in


@managers
def test_an_evicted_prefix_comes_back_for_a_hit(manager: type) -> None:
    drv = on_host(manager)
    assert counts(drv) == (3, 0) and cached(drv, LONG) == 12
    request = run(drv, [*LONG, 7])  # the driver compares what the blocks hold
    assert request.num_computed == 13 and counts(drv) == (3, 3)


@managers
def test_without_a_tier_it_is_computed_again(manager: type) -> None:
    drv = on_host(manager, host_blocks=0)
    assert cached(drv, LONG) == 0 and counts(drv) == (0, 0)


@managers
def test_giving_way_again_costs_no_copy(manager: type) -> None:
    drv = on_host(manager)
    serve(drv, [*LONG, 7])
    hog(drv, 4)
    assert counts(drv) == (3, 3) and cached(drv, LONG) == 0  # nor is there room to bring it back
    drv.release(drv.holders["hog"])
    assert cached(drv, LONG) == 12


@managers
def test_only_as_much_comes_back_as_there_is_room_for(manager: type) -> None:
    drv = on_host(manager)
    hog(drv, 2)
    assert cached(drv, LONG) == 8
    drv.begin()
    assert not drv.take(Request("long", [*LONG, 7]))  # two blocks come back, and none is left to compute in
    assert drv.take(Request("short", [*LONG[:4], 7, 7, 7]))
    drv.compute()


@managers
def test_two_requests_bring_a_block_back_once(manager: type) -> None:
    drv = on_host(manager, num_blocks=6)
    one, two = Request("1", [*LONG, 7]), Request("2", [*LONG, 8])
    assert drv.take(one) and drv.take(two)
    assert one.blocks[:3] == two.blocks[:3]
    drv.compute()
    assert counts(drv)[1] == 3


@managers
def test_a_block_evicted_in_this_step_is_wanted_in_this_step(manager: type) -> None:
    drv = driver(manager, 6, host_blocks=8)
    serve(drv, LONG)
    drv.begin()
    assert drv.take(Request("first", [9] * 20))  # takes all three blank blocks and two of the prompt's
    drv.release(drv.holders["first"])
    drv.taken.clear()
    again = Request("again", [*LONG, 7])
    assert drv.take(again) and again.num_computed == 12
    drv.compute()


@managers
def test_a_block_given_back_before_it_came_stays_on_the_host_and_is_not_written_there_again(manager: type) -> None:
    drv = on_host(manager)
    late = Request("late", [*LONG, 7])
    drv.manager.attach(late)
    drv.manager.release(late)  # as when no room was left
    assert drv.manager.num_free == 4
    assert drv.take(Request("hog", [9] * 16))
    drv.compute()
    assert counts(drv) == (3, 0)
    drv.release(drv.holders["hog"])
    run(drv, [*LONG, 7])


@managers
def test_what_is_read_in_this_step_is_not_overwritten_in_it(manager: type) -> None:
    drv = on_host(manager, host_blocks=3)  # full
    serve(drv, prompt(5, 3))
    drv.begin()
    assert drv.take(Request("again", [*LONG, 7]))  # evicts `5`, for which no host block is free
    drv.compute()
    assert counts(drv) == (3, 3)


@managers
def test_what_was_not_brought_back_after_all_may_be_overwritten_in_the_next_step(manager: type) -> None:
    drv = on_host(manager, host_blocks=3)  # full
    late = Request("late", [*LONG, 7])
    drv.manager.attach(late)
    drv.manager.release(late)
    drv.compute()
    serve(drv, prompt(5, 3))
    hog(drv, 4)
    assert counts(drv) == (6, 0)


@managers
def test_the_least_recently_used_host_block_makes_room(manager: type) -> None:
    drv = on_host(manager, host_blocks=3)
    serve(drv, [*prompt(1), 7])  # the head of the prompt comes back, and stays on the host too
    serve(drv, [*prompt(5), 7])
    hog(drv, 4)
    drv.release(drv.holders["hog"])
    assert cached(drv, prompt(5)) == 4 and cached(drv, LONG) == 4 + 4  # the tail made room


@managers
def test_a_failed_step_leaves_no_trace_in_the_host_and_none_in_the_cache(manager: type) -> None:
    drv = driver(manager, 4, host_blocks=8)
    serve(drv, LONG)
    drv.begin()
    assert drv.take(Request("hog", [9] * 16))
    drv.fail()  # three blocks were on their way out
    assert cached(drv, LONG) == 0 and counts(drv) == (0, 0)
    drv = on_host(manager)
    assert drv.take(Request("again", [*LONG, 7]))
    drv.fail()  # and back
    assert drv.manager.num_free == 4
    assert cached(drv, LONG) == 12  # the host still has them
    run(drv, [*LONG, 7])


@managers
def test_a_step_that_is_not_made_after_its_moves_were_handed_out(manager: type) -> None:
    drv = on_host(manager)
    assert drv.sharing is not None
    again = Request("again", [*LONG, 7])
    assert drv.take(again)
    moves = drv.sharing.moves()
    assert len(moves.back) == 3 and drv.sharing.moves() == BlockMoves()
    drv.undo()
    assert drv.manager.num_free == 4
    run(drv, [*LONG, 7])


@managers
def test_host_blocks_are_counted_from_the_managers_own_first_one(manager: type) -> None:
    drv = on_host(manager)
    assert drv.sharing is not None and drv.sharing.num_host_blocks == 8
    assert drv.take(Request("again", [*LONG, 7]))
    assert sorted(move.source for move in drv.sharing.moves().back) == [0, 1, 2]
    drv.sharing.settle(True)


@managers
def test_salts_are_kept_apart_in_the_tier(manager: type) -> None:
    drv = driver(manager, 2, host_blocks=16)
    for salt in (None, "", "a", "0"):
        assert cached(drv, prompt(1), salt=salt) == 0
        serve(drv, prompt(1), salt=salt)
    drv.release(hog(drv, 2))
    for salt in (None, "", "a", "0"):
        assert cached(drv, prompt(1), salt=salt) == 4
        run(drv, [*prompt(1), 7], rid=f"{salt}", salt=salt)
        drv.release(drv.holders[f"{salt}"])
    assert cached(drv, prompt(1), salt="b") == 0


@managers
def test_a_time_to_live_holds_in_the_tier(manager: type) -> None:
    drv = on_host(manager, ttl=10.0)
    drv.begin(8.0)
    assert cached(drv, LONG) == 12
    drv.begin(2.0)
    assert cached(drv, LONG) == 0
    serve(drv, LONG)  # and is forgotten
    assert counts(drv) == (3, 0)


@managers
def test_what_is_computed_again_while_on_the_host_still_leads_to_what_follows(manager: type) -> None:
    drv = on_host(manager, num_blocks=6)
    scored = Request("scored", [*prompt(1), 7])  # its log-probabilities are wanted: the engine attaches nothing
    assert drv.manager.grow(scored, 5)
    drv.holders[scored.id] = scored
    drv.taken[scored.id] = scored, 5
    drv.compute()
    assert cached(drv, LONG) == 12


@managers
def test_a_fork_of_what_is_still_coming_takes_it_from_the_host_too(manager: type) -> None:
    drv = on_host(manager, num_blocks=8)
    parent, child = Request("parent", [*LONG, 7]), Request("child", [*LONG[:11], 5])
    assert drv.take(parent) and drv.take(child, parent=parent, shared=10)
    drv.compute()
    assert counts(drv)[1] == 4


def test_moves_are_empty_when_nothing_moves() -> None:
    drv = driver(MANAGERS[0], host_blocks=4)
    assert drv.sharing is not None
    run(drv, LONG)
    assert drv.sharing.moves() == BlockMoves()
    assert Move(1, 2) == Move(source=1, target=2)
