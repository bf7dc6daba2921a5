"""The contract of a block manager as a suite to inherit. It tells nothing of how prefixes are found or what gives way.

    class TestMine(BlockManagerContract):
        make = staticmethod(lambda **options: Mine(**options))

`make` gets `block_size` and builds a manager. Rules for what it is not able to are skipped: forks where it is no
`SharingBlocks`, hits where it keeps no prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from turnout.core.interfaces import BlockManager
from turnout.core.types import Request
from turnout.testing.block_forks import ForkRules
from turnout.testing.block_rules import ask, needs
from turnout.testing.block_storm import storm
from turnout.testing.fake import continuation, make_engine, serve_all
from turnout.testing.policies import Plain, ragged

SALTS = (None, "", "a", "b", "0", "None")


class BlockManagerContract(ForkRules):
    """What every block manager keeps. Subclass it with `make`."""

    def test_at_the_start_every_block_is_free(self) -> None:
        driver = self.driver(7)
        assert driver.manager.num_free == 7
        self.ran(driver, ask("a", 28))
        driver.manager.start(5)
        assert driver.manager.num_free == 5 and driver.manager.cached(ask("a", 28)) == 0

    def test_growing_is_all_or_nothing(self) -> None:
        driver = self.driver(3)
        driver.begin()
        request = ask("a", 20)
        assert not driver.take(request, 13) and driver.manager.num_free == 3
        assert driver.take(request, 12) and driver.manager.num_free == 0
        driver.compute()

    def test_every_free_block_can_be_had(self) -> None:
        driver = self.driver(12)
        held = self.ran(driver, ask("held", 9, 1))
        for i in range(5):
            driver.release(self.ran(driver, ask(f"{i}", 18, i)))
        free = driver.manager.num_free
        assert free == 12 - len(held.blocks)
        self.ran(driver, ask("all", free * 4, 9))
        assert driver.manager.num_free == 0

    @needs("cache")
    def test_a_prompt_seen_before_is_found_and_leaves_a_token_to_compute(self) -> None:
        for size in (1, 2, 4, 16):
            for length in [blocks * size + off for blocks in (1, 2, 3) for off in (-1, 0, 1)]:
                driver = self.driver(16, size)
                if length < 1:
                    continue
                driver.release(self.ran(driver, ask("a", length)))
                least = (length - 1) // size * size
                found = driver.manager.cached(ask("b", length))
                assert least <= found < length, f"{found} of {length} tokens found, block size {size}"
                self.ran(driver, ask("b", length))

    @needs("cache")
    def test_a_hit_ends_where_prompts_part(self) -> None:
        driver = self.driver()
        first = self.ran(driver, ask("a", 14))
        for part in range(14):
            other = Request(f"b{part}", [t + (i == part) for i, t in enumerate(first.tokens)])
            assert part // 4 * 4 <= driver.manager.cached(other) <= part
            driver.release(self.ran(driver, other))

    def test_the_middle_of_a_prompt_is_not_found_without_its_beginning(self) -> None:
        driver = self.driver()
        first = self.ran(driver, ask("a", 16))
        assert driver.manager.cached(Request("b", first.tokens[4:])) == 0

    @needs("cache")
    def test_salts_are_kept_apart(self) -> None:
        driver = self.driver(64)
        for i, salt in enumerate(SALTS):
            assert driver.manager.cached(ask("x", 13, salt=salt)) == 0, f"salt {salt!r} found another's blocks"
            self.ran(driver, ask(str(i), 13, salt=salt))
            assert driver.manager.cached(ask("x", 13, salt=salt)) == 12

    @needs("cache")
    def test_only_what_is_computed_and_published_is_found(self) -> None:
        driver = self.driver()
        request = ask("a", 16)
        driver.begin()
        driver.take(request, 6)
        assert driver.manager.cached(ask("b", 16)) == 0
        driver.compute()
        assert 4 <= driver.manager.cached(ask("b", 16)) <= 6

    @needs("cache")
    def test_a_shared_block_is_freed_by_its_last_holder(self) -> None:
        driver = self.driver(8)
        first = self.ran(driver, ask("a", 12))
        second = self.ran(driver, Request("b", [*first.tokens, 1, 2]))
        assert second.blocks[:3] == first.blocks, "two requests that begin alike do not share"
        driver.release(first)
        driver.manager.release(first)  # harmless
        assert driver.manager.num_free == 4
        driver.release(second)
        assert driver.manager.num_free == 8

    @needs("cache")
    def test_a_request_that_computed_nothing_gives_all_back(self) -> None:
        driver = self.driver(8)
        driver.release(self.ran(driver, ask("a", 12)))
        for seed in (1, 0, 0):
            late = ask("late", 12, seed)
            driver.manager.attach(late)
            assert driver.manager.grow(late, 12)
            driver.manager.release(late)
            assert driver.manager.num_free == 8 and late.num_computed == 0
        assert driver.manager.cached(late) >= 8, "a request that left took the cached prefix with it"

    def test_two_that_compute_the_same_at_once_both_get_it_right(self) -> None:
        driver = self.driver(12)
        driver.begin()
        twins = [ask("a", 10), ask("b", 10)]
        for twin in twins:
            assert driver.take(twin)
        driver.compute()
        for twin in twins:
            twin.tokens += [1, 2, 3]
            self.ran(driver, twin)
            driver.release(twin)
        assert driver.manager.num_free == 12

    def test_a_request_brought_back_from_host_memory_is_published_rightly(self) -> None:
        driver = self.driver(8)
        request = self.ran(driver, ask("a", 10))
        driver.begin()
        driver.preempt(request, swap=True)
        driver.compute()
        self.ran(driver, ask("other", 30, 1))
        driver.release(driver.holders["other"])
        request.tokens += [1, 2, 3]
        self.ran(driver, request)
        driver.release(request)
        self.ran(driver, Request("b", [*request.tokens, 4]))

    def test_served_requests_get_their_own_tokens_in_a_pool_of_any_size(self) -> None:
        for seed in range(8):
            for num_blocks in (14, 64):
                requests = ragged(seed)
                wanted = {r.id: continuation(r.tokens, r.sampling.max_tokens) for r in requests}
                engine = make_engine(Plain(), num_blocks=num_blocks, blocks=self.make(block_size=4))
                assert serve_all(engine, requests) == wanted, "the tokens differ from those of each request alone"

    def test_whatever_happens_every_request_keeps_its_own_tokens(self) -> None:
        for seed in range(16):
            storm(self.make(block_size=(4, 2, 1)[seed % 3]), seed)


def block_rules(make: Callable[..., BlockManager]) -> Iterator[tuple[str, Callable[[], object]]]:
    """The rules that apply to what `make` builds: (sentence, check)."""
    suite = type("Suite", (BlockManagerContract,), {"make": staticmethod(make)})()
    able = {ability for ability in ("share", "cache") if suite.can(ability)}
    for name in dir(suite):
        check = getattr(suite, name)
        if name.startswith("test_") and able.issuperset(getattr(check, "needs", ())):
            yield name.removeprefix("test_").replace("_", " "), check
