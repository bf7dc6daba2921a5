"""The rules of forks and copies: what a manager that is a `SharingBlocks` keeps besides."""

from __future__ import annotations

from turnout.core.types import Request
from turnout.testing.block_rules import BlockRules, ask, needs


class ForkRules(BlockRules):
    """A fork shares all that is computed; whoever writes has a block of its own."""

    @needs("share")
    def test_a_fork_shares_every_block_and_copies_the_one_it_writes(self) -> None:
        driver = self.driver()
        parent = self.ran(driver, ask("parent", 10))
        free = driver.manager.num_free
        child = self.ran(driver, Request("child", [*parent.tokens, 1]), parent=parent, shared=10)
        assert child.blocks[:2] == parent.blocks[:2] and child.blocks[2] != parent.blocks[2]
        assert driver.manager.num_free == free - 1
        assert driver.sharing is not None and driver.sharing.stats.copied == 1

    @needs("share")
    def test_a_fork_at_the_end_of_a_block_copies_nothing(self) -> None:
        driver = self.driver()
        parent = self.ran(driver, ask("parent", 8))
        child = self.ran(driver, Request("child", [*parent.tokens, 1]), parent=parent, shared=8)
        assert child.blocks[:2] == parent.blocks
        assert driver.sharing is not None and driver.sharing.stats.copied == 0

    @needs("share")
    def test_a_fork_one_token_short_of_a_full_block_writes_a_copy_of_it(self) -> None:
        driver = self.driver()
        parent = self.ran(driver, ask("parent", 8))
        child = Request("child", list(parent.tokens))
        driver.begin()
        assert driver.take(child, parent=parent, shared=7)
        assert child.blocks[0] == parent.blocks[0] and child.blocks[1] != parent.blocks[1]
        driver.compute()

    @needs("share", "cache")
    def test_a_block_that_is_found_is_not_written_even_where_nobody_else_holds_it(self) -> None:
        driver = self.driver()
        parent = self.ran(driver, ask("parent", 8))
        full = parent.blocks[1]
        driver.begin()
        child = Request("child", list(parent.tokens))
        assert driver.sharing is not None
        driver.sharing.fork(parent, child, 7)
        driver.holders[child.id] = child
        driver.release(parent)
        assert driver.take(child) and child.blocks[1] != full
        driver.compute()
        self.ran(driver, Request("later", [*child.tokens, 1]))

    @needs("share")
    def test_parent_and_children_part_in_one_block(self) -> None:
        for order in ("children first", "parent first"):
            driver = self.driver()
            parent = self.ran(driver, ask("parent", 6))
            children = [Request(f"child {i}", [*parent.tokens, i]) for i in range(3)]
            parent.tokens += [7, 8, 9]
            driver.begin()
            if order == "parent first":
                assert driver.take(parent, 2)
            for child in children:
                assert driver.take(child, parent=parent, shared=6)
            if order == "children first":
                assert driver.take(parent, 2)
            driver.compute()
            assert len({r.blocks[0] for r in (parent, *children)}) == 1
            assert len({r.blocks[1] for r in (parent, *children)}) == 4
            for child in children:
                child.tokens += [5, 6]
                self.ran(driver, child)

    @needs("share")
    def test_forks_of_forks_keep_their_own_tokens(self) -> None:
        driver = self.driver(30)
        line = [self.ran(driver, ask("0", 6))]
        for i in range(1, 5):
            parent = line[-1]
            child = Request(str(i), [*parent.tokens, i])
            line.append(self.ran(driver, child, parent=parent, shared=len(parent.tokens)))
        for request in line:
            request.tokens += [9] * 5
            self.ran(driver, request)

    @needs("share")
    def test_the_parent_may_go_before_its_child_writes(self) -> None:
        for swap in (None, False, True):
            driver = self.driver()
            parent = self.ran(driver, ask("parent", 6))
            driver.begin()
            child = Request("child", [*parent.tokens, 1, 2, 3])
            assert driver.take(child, parent=parent, shared=6)
            if swap is None:
                driver.release(parent)
            else:
                driver.preempt(parent, swap)
            assert driver.take(ask("other", 4 * driver.manager.num_free, 1))  # takes what it left
            driver.compute()
            driver.release(driver.holders["other"])
            if swap is not None:
                self.ran(driver, parent)

    @needs("share")
    def test_the_block_of_a_copy_counts_when_a_fork_grows(self) -> None:
        for spare in (0, 1):
            driver = self.driver(4 + spare)
            parent = self.ran(driver, ask("parent", 6))
            self.ran(driver, ask("other", 8, 1))
            driver.begin()
            child = Request("child", [*parent.tokens, 1])
            assert driver.take(child, parent=parent, shared=6) == bool(spare)
            driver.compute()
            parent.tokens += [1, 2]
            self.ran(driver, parent)

    @needs("share")
    def test_a_fork_that_is_withdrawn_takes_its_copy_back(self) -> None:
        driver = self.driver(6)
        parent = self.ran(driver, ask("parent", 6))
        free = driver.manager.num_free
        driver.begin()
        assert driver.take(Request("child", [*parent.tokens, 1]), parent=parent, shared=6)
        driver.undo()
        assert driver.manager.num_free == free
        driver.begin()
        child = Request("child", [*parent.tokens, 1])
        assert driver.take(child, parent=parent, shared=6)
        driver.taken.clear()
        driver.release(child)
        assert driver.take(ask("other", 4 * free, 1))  # takes the block that the copy was for
        driver.compute()
        assert driver.sharing is not None and driver.sharing.stats.copied == 0

    @needs("share", "cache")
    def test_what_a_fork_computes_is_found(self) -> None:
        driver = self.driver(30)
        parent = self.ran(driver, ask("parent", 10))
        child = self.ran(driver, Request("child", [*parent.tokens, *range(9)]), parent=parent, shared=10)
        assert driver.manager.cached(Request("later", [*child.tokens, 1])) >= 16
        self.ran(driver, Request("later", [*child.tokens, 1]))

    @needs("share")
    def test_a_step_that_failed_leaves_others_and_their_prefixes_whole(self) -> None:
        driver = self.driver(20)
        parent = self.ran(driver, ask("parent", 10))
        driver.begin()
        assert driver.take(Request("child", [*parent.tokens, 1]), parent=parent, shared=10)
        assert driver.take(ask("hit", 12))
        driver.fail()
        parent.tokens += [1, 2, 3]
        self.ran(driver, parent)
        self.ran(driver, ask("again", 12))
