"""attention=flashinfer, on an emulation of its wrappers: it must keep the contract, and faults must be caught."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated.infer import flashinfer

from turnout.core import Capabilities, LayerSpec
from turnout.plugins.attention.flashinfer import FlashInfer
from turnout.testing import AttentionContract
from turnout.testing.attention import check_attention
from turnout.testing.attention_scene import AttentionCase, Scene, batch_of


@pytest.mark.slow
class TestFlashInfer(AttentionContract):
    make = partial(FlashInfer, workspace_mb=16)
    device = "cpu"

    @property
    def capabilities(self) -> Capabilities:
        return replace(FlashInfer.capabilities, devices=None, needs=())

    def setup_method(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setitem(sys.modules, "flashinfer", flashinfer())
        super().setup_method()

    def teardown_method(self) -> None:
        self.patch.undo()


SMALL = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "scale": 0.1}
LENS = ((1, 9), (5, 5), (7, 23), (1, 40), (3, 40))
LAYERS = (
    LayerSpec(**SMALL),
    LayerSpec(**SMALL, window=3),
    LayerSpec(**SMALL, softcap=2.0),
    LayerSpec(**SMALL, sinks=True),
)
CASES = [
    AttentionCase(f"{layer} {form}", layer, lens, 16, torch.float16, cache_dtype=form)
    for layer in LAYERS
    for form in ("auto", "fp8")
    for lens in (LENS, tuple((1, keys) for _, keys in LENS), tuple(pair for pair in LENS if pair[0] > 1))
]
Pages = tuple[Any, ...]  # indptr, indices, last_page_len
Change = Callable[[Pages, dict[str, Any]], tuple[Pages, dict[str, Any]]]


def options(**changed: Any) -> Change:
    return lambda pages, given: (pages, given | {name: value for name, value in changed.items() if name in given})


def pages(change: Callable[..., Pages]) -> Change:
    return lambda found, given: (change(*found), given)


PLANS: dict[str, Change] = {
    "a window of one key more": lambda found, given: (
        found,
        given | {"window_left": given["window_left"] + (given["window_left"] >= 0)},
    ),
    "the window is dropped": options(window_left=-1),
    "the scale is dropped": options(sm_scale=None),
    "the softcap is dropped": options(logits_soft_cap=0.0),
    "the mask is not causal": options(causal=False),
    "the cache's dtype is not told": options(kv_data_type=None),
    "pages of other requests": pages(lambda indptr, indices, last: (indptr, indices.flip(0), last)),
    "page ids in 64 bits": pages(lambda indptr, indices, last: (indptr, indices.long(), last)),
    "the last page counted from zero": pages(lambda indptr, indices, last: (indptr, indices, last - 1)),
    "the length of the whole instead of the last page's": pages(
        lambda indptr, indices, last: (indptr, indices, (indptr.diff() - 1) * 16 + last)
    ),
    "page counts instead of their sums": pages(
        lambda indptr, indices, last: (torch.nn.functional.pad(indptr.diff(), (1, 0)), indices, last)
    ),
}
RUNS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "scales of an fp8 cache are dropped": lambda given: given | {"kv_cache_sf": None},
    "scales of keys and values are swapped": lambda given: (
        given | {"kv_cache_sf": given["kv_cache_sf"][::-1]} if "kv_cache_sf" in given else given
    ),
}


def check() -> None:
    for case in CASES:
        check_attention(FlashInfer(workspace_mb=16), case)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    check()
    return made


WRONG = [(fault, kind) for fault in PLANS for kind in ("Prefill", "Decode")]
WRONG.remove(("the mask is not causal", "Decode"))  # whose only query is the last


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind"), WRONG)
def test_a_wrong_plan_fails(fault: str, kind: str, library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = getattr(library, f"Batch{kind}WithPagedKVCacheWrapper")
    right, at = wrapper.plan, (1 if kind == "Prefill" else 0)

    def wrong(self: Any, *args: Any, **given: Any) -> None:
        found, given = PLANS[fault](args[at : at + 3], given)
        right(self, *args[:at], *found, *args[at + 3 :], **given)

    monkeypatch.setattr(wrapper, "plan", wrong)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Prefill", "Decode"])
@pytest.mark.parametrize("fault", RUNS)
def test_a_wrong_run_fails_on_either_path(
    fault: str, kind: str, library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = getattr(library, f"Batch{kind}WithPagedKVCacheWrapper")
    right = wrapper.run
    monkeypatch.setattr(wrapper, "run", lambda self, *args, **given: right(self, *args, **RUNS[fault](given)))
    with pytest.raises((AssertionError, ValueError)):
        check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Prefill", "Decode"])
def test_the_logs_of_sums_have_base_2(kind: str, library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = getattr(library, f"Batch{kind}WithPagedKVCacheWrapper")
    right = wrapper.run

    def natural(self: Any, *args: Any, **given: Any) -> Any:
        found = right(self, *args, **given)
        return (found[0], found[1] * math.log(2)) if isinstance(found, tuple) else found

    monkeypatch.setattr(wrapper, "run", natural)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.slow
def test_the_decode_kernel_without_tensor_cores_is_kept_for_the_ratio_it_has(library: ModuleType) -> None:
    """Ratios of heads to key heads outside its list fail in it; every ratio above 1 takes the other kernel."""
    for ratio in (1, 3, 5, 7, 9, 16, 71):
        layer = LayerSpec(2 * ratio, 2, 64, 0.1)
        check_attention(FlashInfer(workspace_mb=16), AttentionCase("", layer, ((1, 9), (1, 40)), 16, torch.float16))


@pytest.mark.slow
def test_wrappers_and_workspace_are_kept_from_step_to_step_for_each_kind_of_layer(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    for name in ("Prefill", "Decode"):
        wrapper = getattr(library, f"Batch{name}WithPagedKVCacheWrapper")
        start = wrapper.__init__

        def counted(self: Any, workspace: torch.Tensor, *args: Any, start: Any = start, **given: Any) -> None:
            made.append(workspace.data_ptr())
            start(self, workspace, *args, **given)

        monkeypatch.setattr(wrapper, "__init__", counted)
    backend = FlashInfer(workspace_mb=16)
    for _ in range(3):
        for layer in LAYERS[:2]:
            check_attention(backend, AttentionCase("", layer, LENS, 16, torch.float16))
    assert len(made) == 4 and len(set(made)) == 1


@pytest.mark.slow
def test_a_plan_that_is_refreshed_has_a_wrapper_and_buffers_of_its_own(library: ModuleType) -> None:
    """A recorded step replays what its launches point at: no other step's plan may touch that."""
    backend = FlashInfer(workspace_mb=16)
    case = AttentionCase("", LAYERS[0], ((1, 9), (1, 40)), 16, torch.float16)
    scene = Scene(backend, case)
    scene.attend()
    batch = batch_of(scene.last, 16, scene.device)
    plan, other = backend.plan(batch, LAYERS[0], 16), backend.plan(batch, LAYERS[0], 16)
    backend.refresh(plan, batch, LAYERS[0], 16)
    wrapper = plan.parts[0].wrapper
    assert wrapper is not other.parts[0].wrapper
    before = [x.data_ptr() for x in wrapper._buffers]
    backend.refresh(plan, batch, LAYERS[0], 16)
    assert plan.parts[0].wrapper is wrapper and [x.data_ptr() for x in wrapper._buffers] == before


def refusals(**asked: Any) -> list[str]:
    known = {"block_size": 16, "dtype": torch.float16, "device": torch.device("cuda"), "cache_dtype": "auto"}
    return FlashInfer.refusals((LAYERS[0],), **(known | asked))


@pytest.mark.slow
def test_an_fp8_cache_is_refused_where_the_installed_version_would_drop_its_scales(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusals(cache_dtype="fp8") == []
    monkeypatch.setattr(library.BatchPrefillWithPagedKVCacheWrapper, "plan", lambda self, qo_indptr: None)
    assert refusals(cache_dtype="auto") == []
    (reason,) = refusals(cache_dtype="fp8")
    assert "takes no scale for each token and head" in reason and "pip install -U flashinfer-python" in reason


def test_what_the_installed_version_takes_is_read_from_its_source_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for source, number in (("def plan(self): ...", 1), ("def plan(self, use_token_head_sf=False): ...", 0)):
        (package / "prefill.py").write_text(source)
        assert len(refusals(cache_dtype="fp8")) == number


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attention\.workspace_mb must be at least 16, got 1"):
        FlashInfer(workspace_mb=1)


del AttentionContract
