"""Forks by hand: where the managers' own rules go beyond the contract's."""

from __future__ import annotations

import pytest
from hands import MANAGERS, cached, driver, prompt, run

from turnout.core import Request

managers = pytest.mark.parametrize("manager", MANAGERS)


@managers
def test_a_fork_goes_on_in_the_chain_of_its_parent(manager: type) -> None:
    drv = driver(manager)
    parent = run(drv, prompt(1, 2))
    drv.begin()
    child = Request("child", [*prompt(1, 2), *prompt(2)])
    assert drv.take(child, parent=parent, shared=8)
    drv.compute()
    drv.release(parent)
    assert cached(drv, [*prompt(1, 2), *prompt(2)]) == 12
    assert cached(drv, prompt(2)) == 0


@managers
def test_a_fork_of_a_twin_goes_on_in_the_chain_that_is_found(manager: type) -> None:
    drv = driver(manager, 30)
    drv.begin()
    twins = [Request(str(i), prompt(1, 2)) for i in range(2)]
    for twin in twins:
        assert drv.take(twin)
    drv.compute()
    drv.begin()
    child = Request("child", [*prompt(1, 2), *prompt(2), 7])
    assert drv.take(child, parent=twins[1], shared=8)
    drv.compute()
    for request in (*twins, child):
        drv.release(request)
    assert cached(drv, [*prompt(1, 2), *prompt(2)]) == 12


@managers
def test_forks_of_a_request_that_came_back_from_host_memory(manager: type) -> None:
    drv = driver(manager, 30)
    parent = run(drv, prompt(1, 2) + [1, 2])
    drv.begin()
    drv.preempt(parent, swap=True)
    drv.compute()
    parent.tokens += [3]
    drv.begin()
    assert drv.take(parent)
    drv.compute()  # no block became full: it is not published
    children = [Request(f"child {i}", [*parent.tokens, i, i]) for i in range(3)]
    drv.begin()
    for child in children:
        assert drv.take(child, parent=parent, shared=11)
    drv.compute()
    for request in (parent, *children):
        request.tokens += [5, 5, 5, 5, 5]
        drv.begin()
        assert drv.take(request)
        drv.compute()
    for request in (parent, *children):
        drv.release(request)
    assert drv.manager.num_free == 30
    assert cached(drv, prompt(1, 2)) == 8


@managers
def test_where_only_a_found_block_could_be_copied_and_no_room_is_left_it_is_written_itself(manager: type) -> None:
    drv = driver(manager, 2)
    parent = run(drv, prompt(1, 2))
    child = Request("child", prompt(1, 2))
    drv.begin()
    assert not drv.take(child, parent=parent, shared=7)  # held by two, and no block is free
    assert drv.sharing is not None
    drv.sharing.fork(parent, child, 7)
    drv.holders[child.id] = child
    drv.release(parent)
    assert drv.take(child) and drv.sharing.stats.copied == 0
    drv.compute()


@managers
def test_a_copy_of_a_copy_made_in_the_same_step_comes_from_the_source(manager: type) -> None:
    drv = driver(manager)
    first = run(drv, prompt(1, 1) + [5, 5])
    second = Request("second", [*first.tokens, 6])
    third = Request("third", [*first.tokens, 7])
    drv.begin()
    assert drv.take(second, parent=first, shared=6)
    assert drv.take(third, parent=second, shared=6)  # of a block that is still to be copied
    assert drv.sharing is not None
    moves = drv.sharing.moves()
    assert {move.source for move in moves.copies} == {first.blocks[1]} and len(moves.copies) == 2
    drv.sharing.settle(True)
