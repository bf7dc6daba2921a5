"""GPTQ checkpoints: every form of them means the weights its own tools mean."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from grids import every
from packing import LAYER, close, columns, info, product, read, rows
from torch import Tensor

from turnout.core import ModelError
from turnout.plugins.quant.gptq import Gptq

INPUTS, OUTPUTS = 128, 32


def made(
    bits: int = 4,
    group: int = 32,
    *,
    inputs: int = INPUTS,
    symmetric: bool = False,
    stored: str = "minus_one",
    index: list[int] | None = None,
    lowest: int = 1,
) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors, and its weights by the definition. Zero points are `lowest` or more."""
    source = torch.Generator().manual_seed(bits * 1000 + group)
    size = inputs if group == -1 else group
    index = index or [i // size for i in range(inputs)]
    codes = torch.randint(0, 1 << bits, (OUTPUTS, inputs), generator=source)
    scales = (torch.rand(OUTPUTS, max(index) + 1, generator=source) / 10).half()
    zeros = torch.randint(lowest, 1 << bits, scales.shape, generator=source)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    written = zeros - 1 if stored == "minus_one" else zeros
    tensors = {
        "qweight": columns(codes.T, bits),
        "qzeros": rows(written.T % (1 << bits), bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.tensor(index, dtype=torch.int32),
    }
    return tensors, product(codes, scales, zeros, index)


def settings(bits: int = 4, group: int = 32, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "desc_act": False} | others


@pytest.mark.parametrize(
    ("bits", "group", "label"),
    [(2, 32, "gptq"), (3, 128, "gptq_v2"), (4, 64, "gptq_v2"), (4, -1, "gptq"), (8, 32, "gptq_v2"), (8, -1, "gptq")],
)
def test_every_width_group_and_format_is_read(bits: int, group: int, label: str) -> None:
    tensors, weights = made(bits, group, stored="plain" if label == "gptq_v2" else "minus_one")
    close(read(Gptq(kernel="torch"), settings(bits, group, checkpoint_format=label), tensors), weights)


def test_without_a_label_zero_points_are_stored_less_one() -> None:
    tensors, weights = made()
    close(read(Gptq(kernel="torch"), settings(), tensors), weights)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("stored", ["minus_one", "plain"])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2", None])
def test_a_symmetric_checkpoint_is_read_right_whatever_its_label_says(
    bits: int, stored: str, label: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, weights = made(bits, symmetric=True, stored=stored)
    said = settings(bits, sym=True) | ({} if label is None else {"checkpoint_format": label})
    with caplog.at_level(logging.WARNING, "turnout.quant"):
        close(read(Gptq(kernel="torch"), said, tensors), weights)
    lies = label is not None and (label == "gptq_v2") != (stored == "plain")
    assert (f"is labelled {label}" in caplog.text) == lies


@pytest.mark.parametrize("stored", ["minus_one", "plain"])
def test_the_user_can_say_how_zero_points_are_stored(stored: str) -> None:
    tensors, weights = made(stored=stored)
    wrong = "gptq" if stored == "plain" else "gptq_v2"
    close(read(Gptq(kernel="torch", zeros=stored), settings(checkpoint_format=wrong), tensors), weights)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_of_0_that_was_stored_wrapped_is_0_again(bits: int) -> None:
    tensors, weights = made(bits, lowest=0)
    close(read(Gptq(kernel="torch"), settings(bits, checkpoint_format="gptq"), tensors), weights)


@pytest.mark.parametrize(("bits", "ones"), [(2, 0x55555555), (4, 0x11111111), (8, 0x01010101)])
def test_where_gptqmodel_subtracted_from_whole_words_the_borrow_is_given_back(bits: int, ones: int) -> None:
    tensors, weights = made(bits, stored="plain", lowest=0)
    words = (tensors["qzeros"].long() - ones) & 0xFFFFFFFF
    tensors["qzeros"] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    said = settings(bits, checkpoint_format="gptq", meta={"quantizer": ["gptqmodel:4.0.0"]})
    close(read(Gptq(kernel="torch"), said, tensors), weights)


def test_all_codes_with_all_zero_points_come_through() -> None:
    codes = torch.arange(16).repeat(OUTPUTS, 8)
    zeros = torch.arange(16).repeat_interleave(2)[:, None].expand(OUTPUTS, 4).contiguous()
    scales = torch.full((OUTPUTS, 4), 0.5).half()
    tensors = {"qweight": columns(codes.T, 4), "qzeros": rows(zeros.T, 4), "scales": scales.T.contiguous()}
    layer = read(Gptq(kernel="torch"), settings(checkpoint_format="gptq_v2"), tensors)
    close(layer, product(codes, scales, zeros, [i // 32 for i in range(INPUTS)]))


@pytest.mark.parametrize("group", [32, 64])
def test_act_order_gives_each_input_the_scale_of_its_group(group: int) -> None:
    index = (torch.randperm(INPUTS, generator=torch.Generator().manual_seed(3)) // group).tolist()
    tensors, weights = made(group=group, index=index)
    layer = read(Gptq(kernel="torch"), settings(group=group, desc_act=True), tensors)
    assert layer.order is not None
    close(layer, weights)


def test_an_index_in_sequence_costs_no_permutation() -> None:
    tensors, _ = made()
    assert read(Gptq(kernel="torch"), settings(desc_act=True), tensors).order is None


def test_without_an_index_groups_lie_end_to_end_and_act_order_is_refused() -> None:
    tensors, weights = made()
    del tensors["g_idx"]
    close(read(Gptq(kernel="torch"), settings(), tensors), weights)
    with pytest.raises(ModelError, match=f"{LAYER} lacks g_idx, which quantization_config.desc_act=true needs"):
        read(Gptq(kernel="torch"), settings(desc_act=True), tensors)


def test_a_short_last_group_is_read_as_gptq_means_it() -> None:
    tensors, weights = made(group=128, inputs=576)  # 4.5 groups
    layer = read(Gptq(kernel="torch"), settings(group=128), tensors)
    assert layer.group == 64
    close(layer, weights)


def test_a_bias_is_added() -> None:
    tensors, weights = made()
    bias = torch.randn(OUTPUTS)
    close(read(Gptq(kernel="torch"), settings(), tensors | {"bias": bias}), weights, bias)


def test_a_layer_stored_plain_stays_plain_in_the_served_type() -> None:
    quantizer = Gptq()
    quantizer.prepare(settings(), info(torch.bfloat16))
    layer = quantizer.linear("lm_head", {"weight": torch.randn(8, 4).half()})
    assert isinstance(layer, torch.nn.Linear) and layer.weight.dtype == torch.bfloat16


def test_settings_of_single_layers_go_before_those_of_all() -> None:
    tensors, weights = made(8, 64)
    said = settings(dynamic={r"-:.*down_proj": {}, r"+:.*\.up_proj": {"bits": 8, "group_size": 64}})
    close(read(Gptq(kernel="torch"), said, tensors), weights)


@every(
    ("changed", "reason"),
    [
        ({"bits": 5}, "quantization_config.bits is 5, and quant=gptq reads 2, 3, 4, 8"),
        ({"bits": "4"}, "quantization_config.bits must be a whole number, got '4'"),
        ({"bits": True}, "quantization_config.bits must be a whole number, got True"),
        ({"bits": None}, "quantization_config lacks bits"),
        ({"group_size": 0}, r"quantization_config.group_size must be -1 .* or at least 8, got 0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is marlin, and quant=gptq reads gptq and gptq_v2"),
        ({"checkpoint_format": "gptq", "is_marlin_format": True}, "checkpoint_format is marlin"),
        ({"pack_dtype": "int16"}, "pack_dtype is int16, and quant=gptq reads int32"),
        ({"dynamic": {"(": {}}}, r"dynamic has a pattern that is none, '\('"),
        ({"dynamic": {".*": {"bits": 7}}}, "bits is 7"),
        ({"dynamic": ["x"]}, "dynamic must map patterns to settings"),
    ],
)
def test_bad_settings_are_refused_by_name_before_weights_load(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Gptq().prepare(settings(**changed), info())


def test_a_model_of_floats_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match="this one holds floats; make one with `turnout quantize method=gptq`"):
        Gptq().prepare(None, info())


@every(
    ("said", "change", "reason"),
    [
        (settings(8), {}, rf"{LAYER}: with bits=8 and group_size=32 its 128 inputs .* are stored"),
        (settings(group=64), {}, rf"{LAYER}: with bits=4 and group_size=64"),
        (settings(), {"scales": torch.ones(3, OUTPUTS)}, f"{LAYER}: with bits=4"),
        (settings(), {"g_idx": torch.full((INPUTS,), 9)}, rf"{LAYER}: its group index \(g_idx\) has 128 entries"),
        (settings(), {"g_idx": torch.zeros(INPUTS)}, "3 of 4 groups have no input"),
        (settings(), {"weight": torch.zeros(2, 2)}, f"{LAYER} is stored twice"),
        (settings(), {"scales": None}, f"{LAYER} is quantized but lacks scales"),
        (settings(), {"qweight": None}, f"{LAYER} is quantized but lacks weight"),
    ],
)
def test_tensors_that_do_not_fit_the_settings_are_refused_naming_the_layer(
    said: dict[str, Any], change: dict[str, Tensor | None], reason: str
) -> None:
    tensors, _ = made()
    changed = {leaf: tensor for leaf, tensor in {**tensors, **change}.items() if tensor is not None}
    with pytest.raises(ModelError, match=reason):
        read(Gptq(kernel="torch"), said, changed)


def test_groups_without_a_common_size_are_refused() -> None:
    index = [0] * 31 + [1] * 33 + [2] * 32 + [3] * 32
    tensors, _ = made(index=index)
    with pytest.raises(ModelError, match=f"{LAYER}: its groups have 31 to 33 inputs and no common size"):
        read(Gptq(kernel="torch"), settings(desc_act=True), tensors)


def test_options_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match="quant.kernel must be one of auto, torch, native, triton, got cuda"):
        Gptq(kernel="cuda")
    with pytest.raises(ValueError, match="quant.zeros must be auto, minus_one or plain, got v1"):
        Gptq(zeros="v1")
    with pytest.raises(ValueError, match="quant.activations must be one of float, int8, got 'int4'"):
        Gptq(activations="int4")


def test_a_kernel_that_cannot_compute_a_layer_is_refused_naming_both() -> None:
    tensors, _ = made()
    with pytest.raises(ModelError, match=f"quant.kernel=triton can't compute {LAYER}: .*; choose quant.kernel=auto"):
        quantizer = Gptq(kernel="triton")
        quantizer.prepare(settings(), replace(info(), dtype=torch.float64))
        quantizer.linear(LAYER, tensors)


def test_the_kernels_taken_are_shown() -> None:
    tensors, _ = made()
    quantizer = Gptq(kernel="torch")
    read(quantizer, settings(), tensors)
    assert quantizer.kernels() == "torch for 1 layers"
