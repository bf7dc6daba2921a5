"""What gives way, when, and what does not: policies, pins, times to live, and what is counted."""

from __future__ import annotations

import logging

import pytest
from grids import every
from hands import MANAGERS, cached, driver, found, hog, prompt, run, serve

from turnout.core import Request
from turnout.plugins.blocks import PagedBlocks
from turnout.plugins.blocks.eviction import POLICIES, Ranked

managers = pytest.mark.parametrize("manager", MANAGERS)


@managers
@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("lru", [1, 3]),  # last used 4, 2, 1, 3
        ("lfu", [2, 3]),  # 2 was used three times, 4 once, 1 and 3 twice, 1 longer ago
        ("fifo", [3, 4]),  # computed 1, 2, 3, 4
        ("priority", [1, 4]),  # the most urgent users had 0, 7, 5, 1
    ],
)
def test_each_policy_lets_go_in_its_own_order(manager: type, policy: str, left: list[int]) -> None:
    drv = driver(manager, 5, eviction=policy)
    for token, priority in ((1, 9), (2, 7), (3, 5), (4, 1)):
        serve(drv, prompt(token), priority=priority)
    for token, priority in ((2, 7), (2, 7), (1, 0), (3, 5)):
        serve(drv, [*prompt(token), 0], priority=priority)
    hog(drv, 3)  # one blank block and two that give way
    assert found(drv, range(1, 5)) == left


@managers
@pytest.mark.parametrize("policy", ["lru", "lfu", "priority"])
def test_the_tail_of_a_prompt_gives_way_before_its_head(manager: type, policy: str) -> None:
    drv = driver(manager, 4, eviction=policy)
    serve(drv, [*prompt(1), *prompt(2), *prompt(3), *prompt(4)])
    for left in (3, 2, 1, 0):
        hog(drv, 1, rid=f"hog {left}")
        assert cached(drv, [*prompt(1), *prompt(2), *prompt(3), *prompt(4)]) == left * 4


@managers
def test_a_waiting_request_that_looks_again_and_again_is_no_use(manager: type) -> None:
    drv = driver(manager, 3, eviction="lfu")
    serve(drv, prompt(1))
    serve(drv, prompt(2))
    serve(drv, [*prompt(2), 0])
    running = run(drv, [7])
    for _ in range(5):
        drv.begin()
        assert not drv.take(Request("waits", prompt(1, 4)))  # finds the first block, and no room for the rest
    drv.release(running)
    hog(drv, 2)
    assert found(drv, range(1, 3)) == [2]


@managers
def test_uses_of_a_block_whose_contents_were_never_found_do_not_count(manager: type) -> None:
    drv = driver(manager, 3, eviction="lfu")
    for _ in range(5):
        serve(drv, [7])  # always in the same block, never full
    serve(drv, prompt(1))  # now it is
    serve(drv, prompt(2))
    serve(drv, [*prompt(2), 0])
    hog(drv, 2)
    assert found(drv, range(1, 3)) == [2]


class TestPins:
    """A label `pin` keeps the full blocks of a prompt from giving way, while others can."""

    @managers
    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_pinned_prompt_outlives_what_came_later(self, manager: type, policy: str) -> None:
        drv = driver(manager, 6, eviction=policy)
        serve(drv, [*prompt(1, 2), 0], labels={"pin": "true"})
        for token in (2, 3, 4, 5, 6):
            serve(drv, prompt(token))
        assert cached(drv, prompt(1, 2)) == 8

    @managers
    def test_what_was_generated_is_not_pinned(self, manager: type) -> None:
        drv = driver(manager, 4)
        request = run(drv, prompt(1), labels={"pin": "true"})
        request.tokens += prompt(2)
        drv.begin()
        drv.take(request)
        drv.compute()
        drv.release(request)
        hog(drv, 3)
        assert cached(drv, [*prompt(1), *prompt(2)]) == 4

    @managers
    def test_pins_give_way_when_nothing_else_is_left(self, manager: type) -> None:
        drv = driver(manager, 4, max_pinned=1.0)
        serve(drv, prompt(1, 4), labels={"pin": "true"})
        assert drv.manager.num_free == 4
        run(drv, prompt(2, 4))
        assert cached(drv, prompt(1, 4)) == 0

    @managers
    def test_beyond_their_share_the_pin_least_recently_used_is_over(self, manager: type) -> None:
        drv = driver(manager, 9, max_pinned=0.34)  # three blocks
        for token in (1, 2, 3):
            serve(drv, prompt(token), labels={"pin": "true"})
        serve(drv, [*prompt(1), 0])  # used again, though not by somebody who pins
        serve(drv, prompt(4), labels={"pin": "true"})
        serve(drv, prompt(5))
        hog(drv, 6)
        assert found(drv, range(1, 6)) == [1, 3, 4]

    @managers
    def test_of_a_prompt_too_long_for_the_share_the_beginning_is_pinned(self, manager: type) -> None:
        drv = driver(manager, 8, max_pinned=0.25)
        serve(drv, [*prompt(1), *prompt(2), *prompt(3), *prompt(4)], labels={"pin": "true"})
        hog(drv, 6)
        assert cached(drv, [*prompt(1), *prompt(2), *prompt(3), *prompt(4)]) == 8

    @managers
    def test_a_pin_ends_so_many_seconds_after_the_last_use(self, manager: type) -> None:
        drv = driver(manager, 6)
        serve(drv, prompt(1), labels={"pin": "20s"})
        serve(drv, [*prompt(1), 0], seconds=15.0)  # used again
        serve(drv, prompt(2), seconds=15.0)
        hog(drv, 5, rid="soon")
        assert found(drv, range(1, 3)) == [1]
        drv.release(drv.holders["soon"])
        drv.begin(10.0)
        hog(drv, 6, rid="later")
        assert found(drv, range(1, 3)) == []

    @managers
    def test_pin_false_takes_a_pin_away(self, manager: type) -> None:
        drv = driver(manager, 3)
        serve(drv, prompt(1), labels={"pin": "true"})
        serve(drv, [*prompt(1), 0], labels={"pin": "false"})
        serve(drv, prompt(2))
        serve(drv, [*prompt(2), 0])
        hog(drv, 2)
        assert found(drv, range(1, 3)) == [2]

    @managers
    def test_a_pin_on_a_prompt_computed_twice_is_on_the_copy_that_is_found(self, manager: type) -> None:
        drv = driver(manager, 6)
        first = run(drv, [1, 1])
        drv.begin()
        twins = [Request(f"twin {i}", prompt(3, 2), labels={"pin": "true"}) for i in range(2)]
        for twin in twins:
            assert drv.take(twin)
        drv.compute()
        for one in (*twins, first):
            drv.release(one)
        hog(drv, 4)
        assert cached(drv, prompt(3, 2)) == 8

    def test_a_label_that_makes_no_sense_pins_nothing_and_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        drv = driver(PagedBlocks, 3)
        with caplog.at_level(logging.WARNING):
            serve(drv, prompt(1), labels={"pin": "for ever"})
        assert "pin='for ever' pins nothing: it must be true, false, or seconds such as 300s" in caplog.text
        hog(drv, 3)
        assert found(drv, range(1, 2)) == []


class TestTimeToLive:
    @managers
    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_prefix_is_not_found_so_many_seconds_after_its_last_use(self, manager: type, policy: str) -> None:
        drv = driver(manager, ttl=10.0, eviction=policy)
        serve(drv, prompt(1, 2))
        serve(drv, prompt(2))
        serve(drv, [*prompt(1), 0], seconds=8.0)  # the second block is not used again
        drv.begin(3.0)
        assert cached(drv, prompt(1, 2)) == 4 and cached(drv, prompt(2)) == 0
        drv.begin(10.0)
        assert cached(drv, prompt(1)) == 0
        assert drv.sharing is not None and drv.sharing.stats.expired == drv.sharing.stats.evicted == 3
        assert drv.manager.num_free == 16

    @managers
    def test_what_somebody_holds_does_not_expire(self, manager: type) -> None:
        drv = driver(manager, ttl=10.0)
        run(drv, prompt(1, 2))
        drv.begin(1000.0)
        assert cached(drv, prompt(1, 2)) == 8

    @managers
    def test_a_pin_outlives_it_and_when_over_counts_as_just_released(self, manager: type) -> None:
        drv = driver(manager, ttl=10.0)
        serve(drv, prompt(1), labels={"pin": "50s"})
        serve(drv, prompt(2), labels={"pin": "true"})
        drv.begin(40.0)
        assert found(drv, range(1, 3)) == [1, 2]
        drv.begin(20.0)  # the pin is over
        assert found(drv, range(1, 3)) == [1, 2]
        drv.begin(15.0)
        assert found(drv, range(1, 3)) == [2]


@managers
def test_evictions_are_counted_with_the_seconds_since_the_last_use(manager: type) -> None:
    drv = driver(manager, 2)
    serve(drv, prompt(1))
    serve(drv, prompt(2), seconds=3.0)
    drv.begin(4.0)
    hog(drv, 2)
    assert drv.sharing is not None
    stats = drv.sharing.stats
    assert (stats.evicted, stats.expired, stats.evicted_age) == (2, 0, 7.0 + 4.0)


def test_what_is_used_for_ever_and_never_gives_way_leaves_no_trail() -> None:
    idle = Ranked(0, "lfu", [1] * 10)
    for _ in range(10_000):
        idle.add(range(10))
        for block in range(10):
            idle.take(block)
    assert len(idle._heap) < 200


@every(
    ("options", "message"),
    [
        ({"block_size": 0}, "blocks.block_size must be at least 1, got 0"),
        ({"num_blocks": 0}, "blocks.num_blocks must be at least 1, or null to fit memory, got 0"),
        ({"eviction": "random"}, "blocks.eviction must be one of lru, lfu, fifo, priority, got random"),
        ({"ttl": 0.0}, "blocks.ttl must be above 0, or null for no limit, got 0.0"),
        ({"max_pinned": 1.5}, "blocks.max_pinned must be between 0 and 1, got 1.5"),
        ({"host_blocks": -1}, "blocks.host_blocks must not be negative, got -1"),
        ({"host_blocks": 4, "prefix_cache": False}, "blocks.host_blocks must be 0 without blocks.prefix_cache, got 4"),
    ],
)
@managers
def test_bad_options_name_the_option_the_rule_and_the_value(
    manager: type, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        manager(**options)
