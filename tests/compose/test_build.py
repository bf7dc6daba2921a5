"""From configuration to engine: what is chosen is said, what can't work is refused before a weight is read."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hydra import compose, initialize_config_module
from models import save

import turnout.server.config  # noqa: F401  stores the schemas of commands
from turnout.compose import build, plugins
from turnout.compose.build import build_engine, fingerprint
from turnout.compose.config import Config, from_container, resolve, to_container
from turnout.compose.negotiate import choose_quantizer
from turnout.core import Capabilities, LayerSpec, ModelError
from turnout.core.engine import Engine
from turnout.kernels import cpu as native
from turnout.plugins.loader import model as loading
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.runner import memory

Compose = Callable[..., Config]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    save("llama", path)
    return str(path)


@pytest.fixture
def composed(folder: str) -> Compose:
    plugins.load()

    def make(*overrides: str) -> Config:
        with initialize_config_module("turnout.conf", version_base=None):
            return resolve(compose("serve", [f"model='{folder}'", "blocks.num_blocks=32", *overrides]))

    return make


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("weights were read"))


def notes(engine: Engine) -> str:
    return "\n".join(engine.info.notes)


def test_auto_takes_the_native_backend_where_it_can_be_built(composed: Compose) -> None:
    engine = build_engine(composed())
    expected = "torch" if native.obstacle() else "cpu"
    assert engine.info.plugins["attention"]["name"] == expected
    assert f"attention=auto chose {expected}" in notes(engine)


def test_auto_passes_over_what_cannot_serve_the_model_and_says_why(composed: Compose, monkeypatch: Any) -> None:
    monkeypatch.setattr(native, "obstacle", lambda: "there is no compiler")
    assert "attention=auto chose torch: not cpu, since there is no compiler" in notes(build_engine(composed()))
    monkeypatch.undo()
    engine = build_engine(composed("dtype=float64"))
    assert engine.info.plugins["attention"]["name"] == "torch"
    assert "dtype is float64" in notes(engine)


def test_an_asked_backend_that_cannot_serve_the_model_is_refused_with_what_would_work(
    composed: Compose, unread: None
) -> None:
    with pytest.raises(
        ModelError,
        match="attention=cpu cannot serve .*dtype is float64, it computes in bfloat16, float16, float32.*torch",
    ):
        build_engine(composed("attention=cpu", "dtype=float64"))


FULL = LayerSpec(4, 2, 64, 0.125)


@pytest.mark.parametrize(
    ("can", "layer", "reason"),
    [
        (Capabilities(devices=frozenset({"cuda"})), FULL, "device is cpu, it runs on cuda"),
        (Capabilities(dtypes=frozenset({torch.float16})), FULL, "dtype is float32, it computes in float16"),
        (Capabilities(head_dims=frozenset({128, 256})), FULL, "head_dim is 64, it takes 128, 256"),
        (Capabilities(block_sizes=frozenset({256})), FULL, "blocks.block_size is 16, it takes 256"),
        (Capabilities(), replace(FULL, window=8), "the model has sliding window"),
        (Capabilities(), replace(FULL, softcap=5.0), "the model has logit softcap"),
        (Capabilities(), replace(FULL, sinks=True), "the model has attention sinks"),
        (Capabilities(), replace(FULL, v_head_dim=32), "the model has a value head size of its own"),
    ],
)
def test_each_capability_is_a_reason(can: Capabilities, layer: LayerSpec, reason: str) -> None:
    assert can.refusals([FULL, layer], 16, torch.float32, torch.device("cpu")) == [reason]
    assert (
        Capabilities(window=True, softcap=True, sinks=True, v_head_dim=True).refusals(
            [layer], 16, torch.float32, torch.device("cpu")
        )
        == []
    )


def test_a_form_of_the_cache_the_backend_does_not_keep_is_a_reason() -> None:
    asked = ([FULL], 16, torch.float32, torch.device("cpu"), "fp8")
    assert Capabilities().refusals(*asked) == ["kv_cache_dtype is fp8, it keeps auto"]
    assert Capabilities(cache_dtypes=frozenset({"int8"})).refusals(*asked) == [
        "kv_cache_dtype is fp8, it keeps auto, int8"
    ]
    assert Capabilities(cache_dtypes=frozenset({"fp8"})).refusals(*asked) == []


class TestQuantizers:
    """The checkpoint's format, read from its configuration, meets the quantizer before a weight is read."""

    def test_a_quantized_checkpoint_that_nothing_reads_is_refused_with_its_format(
        self, composed: Compose, unread: None, monkeypatch: Any
    ) -> None:
        for override in ((), ("quant=none",)):
            config = composed(*override)
            info = replace(config.loader.inspect(config.model, "float32", "cpu"), quantization={"quant_method": "odd"})
            with pytest.raises(
                ModelError, match="is quantized as 'odd', and (no installed quantizer|quant=none does not)"
            ):
                choose_quantizer(config, info, plugins.load())

    def test_auto_takes_what_reads_the_format_and_floats_stay_floats(self, composed: Compose) -> None:
        @dataclass
        class Odd(Unquantized):
            checkpoint_formats: ClassVar[frozenset[str]] = frozenset({"odd"})

        found = plugins.collect(entry_points(group="turnout"))
        found.choices["quant", "odd"] = plugins.Choice("quant", "odd", Odd, "test", "1", "test")
        config = composed()
        info = config.loader.inspect(config.model, "float32", "cpu")
        assert choose_quantizer(config, info, found) == "" and type(config.quant) is Unquantized
        config = composed()
        note = choose_quantizer(config, replace(info, quantization={"quant_method": "odd"}), found)
        assert note == "quant=auto chose odd: the checkpoint is quantized as 'odd'" and type(config.quant) is Odd
        with pytest.raises(
            ModelError, match="quantized as 'odd', and quant=none .*leave quant unset, or choose quant=odd"
        ):
            choose_quantizer(composed("quant=none"), replace(info, quantization={"quant_method": "odd"}), found)


def test_the_context_may_not_exceed_what_the_model_was_made_for(composed: Compose, unread: None) -> None:
    with pytest.raises(ModelError, match="limits.max_model_len is 9999999, but the model was made for"):
        build_engine(composed("limits.max_model_len=9999999"))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=["python", "torch", "system", "gpu"],
)
def test_memory_that_runs_out_is_said_with_the_figures_and_what_to_do(
    error: Exception, composed: Compose, monkeypatch: Any
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(loading, "load", full)
    with pytest.raises(ModelError, match=r"memory ran out .* parameters take .* GiB in float32.*ulimit -v.*quant=int8"):
        build_engine(composed("dtype=float32"))


def test_other_faults_of_loading_stay_what_they_are(composed: Compose, monkeypatch: Any) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(loading, "load", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        build_engine(composed())


def test_a_cache_is_sized_by_a_stated_share_of_free_memory(composed: Compose, monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: native.SCRATCH + 1_000_000)
    engine = build_engine(composed("blocks.num_blocks=null", "limits.cpu_memory_utilization=0.5"))
    per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in engine._runner._spec.layers) * 4  # type: ignore[attr-defined]
    assert engine.info.num_blocks == 500_000 // (per_token * 16)
    assert "limits.cpu_memory_utilization=0.5" in notes(engine)
    monkeypatch.setattr(memory, "free_memory", lambda: 100)
    with pytest.raises(ModelError, match="no memory is left for the key/value cache.*set blocks.num_blocks"):
        build_engine(composed("blocks.num_blocks=null"))


def test_a_cache_never_exceeds_what_all_seats_at_full_length_need(composed: Compose) -> None:
    engine = build_engine(composed("blocks.num_blocks=null", "limits.max_num_seqs=2", "limits.max_model_len=40"))
    assert engine.info.num_blocks == 2 * 3


def test_two_stacks_never_share_a_fingerprint_and_the_same_stack_keeps_its_own(composed: Compose, folder: str) -> None:
    found = plugins.load()
    changes = [
        (),
        ("attention=torch",),
        ("scheduler=chunked_prefill",),
        ("scheduler=chunked_prefill", "scheduler.chunk=7"),
        ("preemption=swap",),
        ("blocks.block_size=8",),
        ("dtype=float64",),
        ("limits.max_num_seqs=3",),
    ]
    prints = [fingerprint(composed(*change), folder, found) for change in changes]
    assert len(set(prints)) == len(changes)
    assert prints == [fingerprint(composed(*change), folder, found) for change in changes]
    assert fingerprint(composed("server.port=1234"), folder, found) == prints[0]


def test_other_kernels_and_other_weights_of_the_same_size_are_another_stack(
    composed: Compose, folder: str, tmp_path: Path, monkeypatch: Any
) -> None:
    found = plugins.load()
    before = fingerprint(composed("attention=cpu"), folder, found)
    (tmp_path / "kernels.cpp").write_text("// another source")
    with monkeypatch.context() as patch:
        patch.setattr(native, "FOLDER", tmp_path)
        patch.setattr(native, "obstacle", lambda: None)
        patch.setattr(native, "compiler", lambda: "g++")
        assert fingerprint(composed("attention=cpu"), folder, found) != before
    if native.obstacle() is None:
        assert build._described(composed("attention=cpu"), found)["attention"]["kernels"] == native.kernels() != ""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert fingerprint(composed("attention=cpu"), str(copy), found) == before, "the model is named as before"
    weights = copy / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert fingerprint(composed("attention=cpu"), str(copy), found) != before


def test_a_configuration_survives_the_way_to_another_process(composed: Compose) -> None:
    found = plugins.load()
    config = composed("scheduler=chunked_prefill", "scheduler.chunk=7", "preemption=swap", "server.api_key=secret")
    plain = to_container(config, found)
    back = from_container(json.loads(json.dumps(plain)), found)
    assert all(getattr(back, spec.name) == getattr(config, spec.name) for spec in dataclasses.fields(Config))
    assert "secret" not in str(plain)


def test_the_published_composition_holds_no_secret(composed: Compose) -> None:
    engine = build_engine(composed("server.api_key=hush-hush"))
    assert "hush-hush" not in str(engine.info)
