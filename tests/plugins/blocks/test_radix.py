"""The prefix tree: what it does that single blocks do not."""

from __future__ import annotations

import random

import pytest
from hands import cached, driver, hog, prompt, run, serve

from turnout.core import Request
from turnout.plugins.blocks import PagedBlocks, RadixBlocks
from turnout.plugins.blocks.tree import Tree
from turnout.testing.block_driver import Driver


def radix(num_blocks: int = 16, block_size: int = 4, **options: object) -> Driver:
    return driver(RadixBlocks, num_blocks, block_size, **options)


def nodes(drv: Driver, salt: str | None = None) -> list[list[int]]:
    """The blocks of every edge."""
    assert isinstance(drv.manager, RadixBlocks)
    found, rest = [], [drv.manager._tree.root(salt).node]
    while rest:
        node = rest.pop()
        found.append(node.blocks)
        rest += node.branches.values()
    return found[1:]


class TestMatchingByTheToken:
    def test_where_only_the_first_tokens_of_a_block_fit_it_is_copied(self) -> None:
        drv = radix(block_size=8, min_copied=2)
        first = run(drv, list(range(16)))
        other = run(drv, [*range(13), 99, 98], rid="other")
        assert other.blocks[0] == first.blocks[0] and other.blocks[1] != first.blocks[1]
        assert drv.sharing is not None and drv.sharing.stats.copied == 1

    @pytest.mark.parametrize("length", range(9, 17))
    def test_a_prompt_sent_again_computes_one_token(self, length: int) -> None:
        drv = radix(block_size=4, min_copied=1)
        serve(drv, list(range(16)))
        assert drv.manager.cached(Request("again", list(range(length)))) == length - 1

    @pytest.mark.parametrize(("fit", "found"), [(0, 8), (1, 8), (3, 8), (4, 12), (7, 15)])
    def test_too_few_tokens_are_not_worth_a_copy(self, fit: int, found: int) -> None:
        drv = radix(block_size=8, min_copied=4)
        serve(drv, list(range(32)))
        assert cached(drv, [*range(8 + fit), 99, 98]) == found

    def test_the_latest_of_several_beginnings_is_copied(self) -> None:
        drv = radix(block_size=8, min_copied=4)
        for last in (50, 60):
            serve(drv, [1, 2, 3, 4, *range(last, last + 4)], rid=str(last))
        assert cached(drv, [1, 2, 3, 4, 60, 61, 99, 98]) == 6
        assert cached(drv, [1, 2, 3, 4, 50, 51, 99, 98]) == 4

    def test_whole_blocks_only_when_told_so(self) -> None:
        drv = radix(block_size=8, min_copied=0)
        serve(drv, list(range(16)))
        assert cached(drv, list(range(15))) == 8

    def test_the_copied_block_stays_found_and_goes_last(self) -> None:
        drv = radix(6, min_copied=1)
        serve(drv, list(range(8)))
        serve(drv, prompt(50, 2))
        run(drv, [*range(7), 99], rid="copies")  # two blocks: the shared one and the copy
        hog(drv, 2)
        assert cached(drv, list(range(8))) == 8 and cached(drv, prompt(50, 2)) == 4

    def test_a_copy_that_finds_no_room_is_written_in_place(self) -> None:
        drv = radix(2, min_copied=1)
        serve(drv, list(range(8)))
        run(drv, [*range(7), 99])
        assert drv.sharing is not None and drv.sharing.stats.copied == 0


class TestTwins:
    def test_equal_prompts_computed_at_once_keep_one_copy(self) -> None:
        free = {}
        for manager in (PagedBlocks, RadixBlocks):
            drv = driver(manager)
            drv.begin()
            twins = [Request(str(i), list(range(10))) for i in range(3)]
            for twin in twins:
                assert drv.take(twin)
            drv.compute()
            for twin in twins:
                twin.tokens += [7, 8, 9]
                drv.begin()
                assert drv.take(twin)
                drv.compute()
            free[manager] = drv.manager.num_free
        assert free[PagedBlocks] == 16 - 3 * 4
        assert free[RadixBlocks] == 16 - 3 - 3  # three full blocks are shared, each has a last one; all three alike
        assert len({tuple(twin.blocks[:3]) for twin in twins}) == 1

    def test_who_came_back_from_host_memory_takes_the_blocks_of_the_tree(self) -> None:
        drv = radix()
        request = run(drv, list(range(10)))
        drv.begin()
        drv.preempt(request, swap=True)
        drv.compute()
        request.tokens += [7, 8]
        drv.begin()
        assert drv.take(request)
        drv.compute()
        assert request.blocks[:2].tolist() == nodes(drv)[0][:2]
        assert drv.manager.num_free == 13


class TestEviction:
    @pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "priority"])
    @pytest.mark.parametrize("seed", range(3))
    def test_nothing_is_ever_cached_behind_something_that_is_not(self, policy: str, seed: int) -> None:
        dice = random.Random(seed)
        drv = radix(12, block_size=2, eviction=policy, min_copied=1)
        manager = drv.manager
        assert isinstance(manager, RadixBlocks)
        for i in range(150):
            serve(drv, [dice.randrange(2) for _ in range(dice.randint(1, 16))], rid=f"{i}", priority=dice.randrange(3))
            kept = [block for block in range(12) if manager._numbers[block]]
            assert sorted(block for node in nodes(drv) for block in node) == kept
            assert len(kept) == len(manager._idle)

    def test_first_in_first_out_eats_the_oldest_branch_from_its_end(self) -> None:
        drv = radix(6, eviction="fifo")
        serve(drv, [*prompt(1), *prompt(2), *prompt(3)])
        serve(drv, [*prompt(1), *prompt(4), *prompt(5)])
        for left in (8, 4):
            hog(drv, 1 if left == 4 else 2, rid=f"{left}")
            assert cached(drv, [*prompt(1), *prompt(2), *prompt(3)]) == left
            assert cached(drv, [*prompt(1), *prompt(4), *prompt(5)]) == 12

    def test_a_salt_of_which_nothing_is_left_leaves_no_tree(self) -> None:
        drv = radix(4)
        for i in range(50):
            serve(drv, prompt(1, 2), rid=f"{i}", salt=f"salt {i}")
        assert isinstance(drv.manager, RadixBlocks)
        assert len(drv.manager._tree) <= 2


class TestTree:
    """The tree alone, beside a dictionary of all prefixes."""

    @pytest.mark.parametrize("seed", range(3))
    def test_it_finds_what_a_dictionary_of_prefixes_finds(self, seed: int) -> None:
        dice = random.Random(seed)
        tree, known = Tree(1000, 2, 1), {}
        for block in range(300):
            tokens = bytes(dice.randrange(2) for _ in range(40))
            found, place = tree.walk(None, tokens)
            assert found == [known[tokens[:end]] for end in range(2, len(found) * 2 + 1, 2)]
            assert tokens[: len(found) * 2 + 2] not in known
            if len(found) < 20:
                tree.append(place or tree.root(None), tokens[len(found) * 2 : len(found) * 2 + 2], block)
                known[tokens[: len(found) * 2 + 2]] = block
            if dice.random() < 0.3:
                gone = tree.tail(dice.choice(list(known.values())))
                prefix = next(p for p, b in known.items() if b == gone)
                assert tree.behind(gone) == [gone] and tree.drop(gone) == prefix[-2:]
                del known[prefix]

    def test_an_edge_is_split_where_prompts_part(self) -> None:
        drv = radix(min_copied=0)
        first = run(drv, [*prompt(1), *prompt(2), *prompt(3)])
        second = run(drv, [*prompt(1), *prompt(2), *prompt(4)], rid="b")
        assert nodes(drv) == [list(first.blocks[:2]), [second.blocks[2]], [first.blocks[2]]]

    def test_long_prompts_are_found_whole(self) -> None:
        drv = radix(300, min_copied=1)
        tokens = [i % 900 for i in range(1100)]
        serve(drv, tokens)
        for length in (255, 256, 257, 300, 1100):
            assert cached(drv, tokens[:length]) == length
        assert cached(drv, [*tokens[:700], 5, 6]) == 700


def test_a_bad_option_is_named() -> None:
    with pytest.raises(ValueError, match="blocks.min_copied must not be negative, got -1"):
        RadixBlocks(min_copied=-1)
