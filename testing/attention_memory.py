"""The rules of an attention backend's cache: whatever its layout, a block is all of `cache[block]`, and only that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest import SkipTest

import torch

from turnout.core.types import KVSpec
from turnout.testing.attention_cases import accepted, forms
from turnout.testing.attention_scene import AttentionCase, Scene, poison, tensors_of
from turnout.testing.attention_suite import AttentionSuite, holds

LIMIT = 2**31  # elements that 32 bits can count


class MemoryRules(AttentionSuite):
    """What the core, which copies and swaps blocks without knowing what is in them, builds on."""

    def test_a_cache_has_its_blocks_in_the_first_dimension(self) -> None:
        for case in self.selected():
            wide = replace(case.layer, num_heads=2 * case.layer.num_heads, num_kv_heads=2 * case.layer.num_kv_heads)
            sizes = []
            for num in (1, 2, 5):
                spec = KVSpec((case.layer, wide, case.layer), case.block_size, num, case.cache_dtype)
                caches = self.make().allocate(spec, case.dtype, torch.device(case.device))
                assert len(caches) == 3, f"{len(caches)} caches for 3 layers"
                found = [tensor for cache in caches for tensor in tensors_of(cache)]
                assert all(t.shape[0] == num for t in found), f"{[tuple(t.shape) for t in found]} for {num} blocks"
                assert all(t.device.type == case.device for t in found), "the cache lies on another device"
                assert len({t.data_ptr() for t in found}) == len(found), "two layers have their keys in one place"
                sizes.append(sum(t.nbytes for t in found))
            assert sizes[1] == 2 * sizes[0] and sizes[2] == 5 * sizes[0], f"{sizes} bytes for 1, 2 and 5 blocks"

    def test_a_cache_in_8_bits_is_smaller_than_one_in_the_models_dtype(self) -> None:
        tried = False
        for case in self.selected():
            if case.cache_dtype != "auto":
                tried = True
                kept, usual = (_block_bytes(self.make(), c) for c in (case, replace(case, cache_dtype="auto")))
                allowed = (case.layer.head_dim + 16) / (case.layer.head_dim * case.dtype.itemsize)  # codes and scales
                assert kept <= allowed * usual, f"a block in {case.cache_dtype} takes {kept} bytes of {usual}"
        if not tried:
            raise SkipTest("it keeps no 8-bit cache")

    def test_only_the_blocks_of_its_slots_are_written(self) -> None:
        for case in self.selected():
            scene = self.scene(case)
            scene.store_earlier()
            before = [_bytes(tensor).clone() for tensor in tensors_of(scene.cache)]
            scene.call(scene.last)
            size = case.block_size
            written = {r.table[at // size] for r, first, end in scene.last for at in range(first, end)}
            others = [block for block in range(scene.num_blocks) if block not in written]
            for old, tensor in zip(before, tensors_of(scene.cache), strict=True):
                assert torch.equal(old[others], _bytes(tensor)[others]), f"{case.name}: a block of others was written"

    def test_a_block_copied_through_the_first_dimension_holds_the_same(self) -> None:
        """As copy-on-write does: the answers from the copies are right when the originals are spoilt."""
        for case in self.selected():
            scene = self.scene(replace(case, lens=(*case.lens, (1, 1), (1, 1), (1, 1), (1, 1))))
            scene.store_earlier()
            longest = max(scene.requests, key=lambda r: len(r.table))
            moves = dict(zip(longest.table, scene.spare, strict=False))
            source, target = list(moves), list(moves.values())
            for tensor in tensors_of(scene.cache):
                tensor[target] = tensor[source]
            _spoil(scene, source)
            _rename(scene, moves)
            holds(scene, scene.call(scene.last), when="after its blocks were copied")

    def test_blocks_swapped_to_host_memory_and_back_elsewhere_hold_the_same(self) -> None:
        for case in self.selected():
            scene = self.scene(case)
            scene.store_earlier()
            blocks = [block for request in scene.requests for block in request.table]
            places = [*blocks[len(blocks) // 2 :], *blocks[: len(blocks) // 2]]
            host = [tensor[blocks].cpu() for tensor in tensors_of(scene.cache)]
            _spoil(scene, blocks)
            for tensor, kept in zip(tensors_of(scene.cache), host, strict=True):
                tensor[places] = kept.to(scene.device)
            _rename(scene, dict(zip(blocks, places, strict=True)))
            holds(scene, scene.call(scene.last), when="after its blocks were swapped")

    def test_a_block_shared_by_two_requests_serves_both(self) -> None:
        """The second begins as the first and goes on in blocks of its own."""
        for case in self.selected():
            size = case.block_size
            scene = self.scene(replace(case, lens=((3, 2 * size + 3), (5, 2 * size + 5), (1, 9))))
            first, second, _ = scene.requests
            for side in ("keys", "values"):
                getattr(second, side)[: 2 * size] = getattr(first, side)[: 2 * size]
            scene.call([part._replace(first=0) for part in scene.last if part.request is not second])
            second.table[:2] = first.table[:2]
            holds(scene, scene.call(scene.last))

    def test_a_cache_of_more_than_2_to_the_31_elements_is_addressed_right(self) -> None:
        """In whatever form takes least memory, where a third of what is free is enough."""
        case = min(self._huge(), key=lambda c: _block_bytes(self.make(), c))
        beneath = LIMIT // (case.block_size * case.layer.head_dim) + 1
        needed = beneath * _block_bytes(self.make(), case)
        import psutil

        free = psutil.virtual_memory().available if case.device == "cpu" else torch.cuda.mem_get_info()[0]
        if needed > free / 3:
            raise SkipTest(f"it takes {needed / 2**30:.0f} GiB, of {free / 2**30:.0f} GiB free")
        scene = self.scene(case, beneath)
        holds(scene, scene.attend(), when="in a large cache")

    def _huge(self) -> list[AttentionCase]:
        plain = self.selected()[0]
        layer = replace(plain.layer, num_heads=2, num_kv_heads=1)
        plain = replace(plain, layer=layer, lens=((1, 20), (5, 9), (18, 18)))
        found = [replace(plain, dtype=dtype, cache_dtype=form) for dtype, form in forms(self.capabilities)]
        return [plain, *(case for case in found if accepted(self.capabilities, case))]


def _block_bytes(backend: object, case: AttentionCase) -> int:
    spec = KVSpec((case.layer,), case.block_size, 1, case.cache_dtype)
    (cache,) = backend.allocate(spec, case.dtype, torch.device(case.device))  # type: ignore[attr-defined]
    return sum(tensor.nbytes for tensor in tensors_of(cache))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[num_blocks, bytes], so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8).flatten(1)


def _spoil(scene: Scene, blocks: list[int]) -> None:
    for tensor in tensors_of(scene.cache):
        spoilt = torch.empty_like(tensor[blocks])
        poison(spoilt)
        tensor[blocks] = spoilt


def _rename(scene: Scene, moves: Mapping[int, int]) -> None:
    for request in scene.requests:
        request.table = [moves.get(block, block) for block in request.table]
