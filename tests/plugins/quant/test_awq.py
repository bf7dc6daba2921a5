"""AWQ checkpoints: both layouts mean the weights AutoAWQ means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packing import LAYER, awq_rows, close, info, product, read, rows
from torch import Tensor

from turnout.core import ModelError
from turnout.plugins.quant.awq import Awq

OUTPUTS = 32


def drawn(group: int, inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, zero points, and the weights by the definition."""
    source = torch.Generator().manual_seed(group)
    size = inputs if group == -1 else group
    codes = torch.randint(0, 16, (OUTPUTS, inputs), generator=source)
    scales = (torch.rand(OUTPUTS, inputs // size, generator=source) / 10).half()
    zeros = torch.randint(0, 16, scales.shape, generator=source)
    return codes, scales, zeros, product(codes, scales, zeros, [i // size for i in range(inputs)])


def gemm(group: int = 32, inputs: int = 128) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, weights = drawn(group, inputs)
    return {
        "qweight": awq_rows(codes.T),
        "qzeros": awq_rows(zeros.T),
        "scales": scales.T.contiguous(),
    }, weights


def gemv(group: int = 32, inputs: int = 128) -> tuple[dict[str, Tensor], Tensor]:
    """Groups are padded to whole words, and for small groups to several of them."""
    codes, scales, zeros, weights = drawn(group, inputs)
    width = -(-scales.shape[1] // 8) * 8 * {32: 4, 64: 2}.get(group, 1)
    padded = torch.zeros(OUTPUTS, width)
    padded[:, : scales.shape[1]] = zeros
    more = torch.zeros(OUTPUTS, width, dtype=torch.float16)
    more[:, : scales.shape[1]] = scales
    return {"qweight": rows(codes, 4), "qzeros": rows(padded.int(), 4), "scales": more}, weights


def settings(group: int = 32, **others: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | others


@pytest.mark.parametrize(("layout", "group"), [("gemm", 32), ("gemm", 96), ("gemm", -1), ("gemv", 64), ("gemv", -1)])
def test_every_group_size_is_read_in_both_layouts(layout: str, group: int) -> None:
    tensors, weights = (gemm if layout == "gemm" else gemv)(group, 384)
    close(read(Awq(kernel="torch"), settings(group, version=layout), tensors), weights)


def test_old_spellings_of_the_settings_are_read() -> None:
    tensors, weights = gemm()
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    close(read(Awq(kernel="torch"), old, tensors), weights)


def test_symmetric_weights_are_read_with_the_zero_points_that_are_stored() -> None:
    tensors, weights = gemm()
    close(read(Awq(kernel="torch"), settings(zero_point=False), tensors), weights)


def test_every_code_meets_every_zero_point() -> None:
    codes = torch.arange(16).repeat(OUTPUTS, 8)
    zeros = torch.arange(16).repeat_interleave(2)[:, None].expand(OUTPUTS, 4).contiguous()
    scales = torch.full((OUTPUTS, 4), 0.5).half()
    tensors = {"qweight": awq_rows(codes.T), "qzeros": awq_rows(zeros.T), "scales": scales.T.contiguous()}
    layer = read(Awq(kernel="torch"), settings(), tensors)
    close(layer, product(codes, scales, zeros, [i // 32 for i in range(128)]))


def test_a_bias_is_added() -> None:
    tensors, weights = gemm()
    bias = torch.randn(OUTPUTS)
    close(read(Awq(kernel="torch"), settings(), tensors | {"bias": bias}), weights, bias)


@pytest.mark.parametrize("listed", [["lm_head"], ["head"], None])
def test_a_layer_is_plain_when_it_is_stored_plain_whatever_the_list_of_skipped_modules_says(listed: Any) -> None:
    quantizer = Awq()
    quantizer.prepare(settings(modules_to_not_convert=listed), info(torch.bfloat16))
    layer = quantizer.linear("lm_head", {"weight": torch.randn(8, 4).half()})
    assert isinstance(layer, torch.nn.Linear) and layer.weight.dtype == torch.bfloat16


def test_groups_that_do_not_divide_the_inputs_are_refused_naming_the_layer() -> None:
    tensors, _ = gemm(64, 576)
    with pytest.raises(ModelError, match=f"{LAYER} has 576 inputs, which groups of .*group_size=128 do not divide"):
        read(Awq(), settings(128), tensors)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"bits": 8}, "quantization_config.bits is 8, and quant=awq reads 4"),
        ({"bits": None}, "quantization_config lacks bits"),
        ({"group_size": None}, "quantization_config lacks group_size"),
        ({"group_size": -2}, r"group_size must be -1 .* got -2"),
        ({"version": "gemv_fast"}, "version is gemv_fast, and quant=awq reads gemm and gemv; save it as gemm"),
        ({"backend": "llm-awq"}, "backend is llm-awq"),
    ],
)
def test_bad_settings_are_refused_by_name_before_weights_load(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Awq().prepare(settings(**changed), info())


def test_a_model_of_floats_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match="this one holds floats; make one with `turnout quantize method=awq`"):
        Awq().prepare(None, info())


@pytest.mark.parametrize(
    ("said", "change", "reason"),
    [
        (settings(64), {}, rf"{LAYER}.qzeros is \[4, 4\]; with group_size=64 in the gemm layout it must be \[2, 4\]"),
        (settings(), {"scales": torch.ones(4, 31)}, rf"{LAYER}.scales is \[4, 31\]"),
        (settings(), {"weight": torch.zeros(2, 2)}, f"{LAYER} is stored twice"),
        (settings(), {"qzeros": None}, f"{LAYER} is quantized but lacks qzeros"),
        (settings(version="gemv"), {}, f"{LAYER}.scales is"),
    ],
)
def test_tensors_that_do_not_fit_the_settings_are_refused_naming_the_layer(
    said: dict[str, Any], change: dict[str, Tensor | None], reason: str
) -> None:
    tensors, _ = gemm()
    changed = {leaf: tensor for leaf, tensor in {**tensors, **change}.items() if tensor is not None}
    with pytest.raises(ModelError, match=reason):
        read(Awq(), said, changed)
