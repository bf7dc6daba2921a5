"""What attention=auto stands for on each device: backends by their rank, passing over what can't serve, saying why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hydra import compose, initialize_config_module

import turnout.server.config  # noqa: F401  stores the schemas of commands
from turnout.compose import plugins
from turnout.compose.config import Config, resolve
from turnout.compose.negotiate import choose_attention, in_order
from turnout.compose.plugins import Choice, Plugins
from turnout.core import Capabilities, LayerSpec, ModelError, ModelInfo

LAYER = LayerSpec(8, 2, 64, 0.125)


@dataclass
class Backend:
    """Able to do everything a GPU can."""

    capabilities: ClassVar[Capabilities] = Capabilities(devices=frozenset({"cuda"}))


def asked(layer: LayerSpec = LAYER, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> ModelInfo:
    return ModelInfo("", "Llama", (layer,), 2048, 1000, dtype, torch.device(device), 10)


def installed(monkeypatch: pytest.MonkeyPatch, **backends: Capabilities) -> tuple[Config, Plugins]:
    """Plugins whose attention backends are these and auto; a composition that asks for auto."""
    found = plugins.load()
    others = {key: choice for key, choice in found.choices.items() if key[0] != "attention" or key[1] == "auto"}
    for name, can in backends.items():
        if name in RANKS and not can.auto_rank:
            can = replace(can, auto_rank=RANKS[name])
        kind = type(name, (Backend,), {"capabilities": can})
        others["attention", name] = Choice("attention", name, kind, "turnout", "1", "attention")
    with initialize_config_module("turnout.conf", version_base=None):
        config = resolve(compose("serve", ["model=none"]))
    monkeypatch.setattr(found, "choices", others)
    return config, found


RANKS = {"flashinfer": {"cuda": 50}, "flash_attn": {"cuda": 40}, "triton": {"cuda": 30}, "flex": {"cuda": 20}}
RANKS |= {"torch": {"any": 10}}
ANYTHING = Capabilities(devices=frozenset({"cuda"}), window=True, softcap=True, sinks=True, v_head_dim=True)


def test_every_backend_in_order_until_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [c for c in plugins.load().choices.values() if c.slot == "attention" and c.name != "auto"]
    names = [choice.name for choice in in_order(ours, "cuda") if choice.package == "turnout"]
    assert names == ["flashinfer", "flash_attn", "triton", "flex", "torch"]
    for first, name in enumerate(names):
        backends = {
            other: replace(ANYTHING, needs=("no_such_library",) * (names.index(other) < first)) for other in names
        }
        config, found = installed(monkeypatch, **backends)
        note = choose_attention(config, asked(), found)
        assert note.startswith(f"attention=auto chose {name}: ") and type(config.attention).__name__ == name
        for passed in names[:first]:
            assert f"not {passed}, since no_such_library is not installed" in note


def test_a_strangers_backend_takes_the_place_its_rank_says_and_one_without_a_rank_takes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    above, below = replace(ANYTHING, auto_rank={"cuda": 60}), replace(ANYTHING, auto_rank={"cuda": 1})
    for rank, first in ((above, "theirs"), (below, "triton"), (replace(ANYTHING, auto_rank={"cpu": 99}), "triton")):
        config, found = installed(monkeypatch, triton=ANYTHING, theirs=rank)
        assert choose_attention(config, asked(), found).startswith(f"attention=auto chose {first}: ")
    config, found = installed(monkeypatch, theirs=replace(ANYTHING, auto_rank={}))
    with pytest.raises(ModelError, match="no installed plugin has a rank there"):
        choose_attention(config, asked(), found)


def test_what_a_backend_refuses_by_itself_counts_like_its_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = installed(monkeypatch, triton=ANYTHING, torch=ANYTHING)
    kind = found.get("attention", "triton").component
    kind.refusals = staticmethod(lambda *needs: ["the card is too old"])  # type: ignore[attr-defined]
    assert "not triton, since the card is too old" in choose_attention(config, asked(), found)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ({"softcap": 30.0}, "the model has logit softcap"),
        ({"window": 128}, "the model has sliding window"),
        ({"sinks": True}, "the model has attention sinks"),
        ({"v_head_dim": 32}, "the model has a value head size of its own"),
        ({"head_dim": 96}, "head_dim is 96, it takes 64, 128"),
    ],
)
def test_a_model_decides_among_what_is_installed(
    layer: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Capabilities(devices=frozenset({"cuda"}), head_dims=frozenset({64, 128}))
    config, found = installed(monkeypatch, flashinfer=plain, triton=ANYTHING, torch=ANYTHING)
    note = choose_attention(config, asked(replace(LAYER, **layer)), found)
    assert note.startswith("attention=auto chose triton: ") and f"not flashinfer, since {why}" in note


def test_the_form_of_the_cache_and_the_size_of_its_blocks_decide_too(monkeypatch: pytest.MonkeyPatch) -> None:
    blocky = replace(ANYTHING, block_sizes=frozenset({256}), cache_dtypes=frozenset({"fp8"}))
    able = replace(ANYTHING, cache_dtypes=frozenset({"fp8", "int8"}))
    config, found = installed(monkeypatch, flashinfer=blocky, triton=ANYTHING, torch=able)
    config.kv_cache_dtype = "fp8"
    note = choose_attention(config, asked(), found)
    assert note.startswith("attention=auto chose torch: ")
    assert "not flashinfer, since blocks.block_size is 16, it takes 256" in note
    assert "not triton, since kv_cache_dtype is fp8, it keeps auto" in note


def test_where_nothing_can_every_reason_of_every_backend_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = installed(
        monkeypatch, triton=replace(ANYTHING, softcap=False), torch=replace(ANYTHING, window=False)
    )
    with pytest.raises(ModelError) as error:
        choose_attention(config, asked(replace(LAYER, softcap=3.0, window=9)), found)
    for part in (
        "attention=auto found no backend for none",
        "not triton, since the model has logit softcap",
        "not torch, since the model has sliding window",
    ):
        assert part in str(error.value)


def test_a_device_nobody_has_a_rank_for_gets_the_one_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    config, found = installed(monkeypatch, triton=ANYTHING, torch=replace(ANYTHING, devices=None))
    assert choose_attention(config, asked(device="xpu"), found).startswith("attention=auto chose torch: ")
