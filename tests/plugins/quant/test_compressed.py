"""compressed-tensors checkpoints with packed weights, and which reader each layer goes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grids import every
from packing import LAYER, close, columns, info, product, read, rows
from torch import Tensor

from turnout.core import ModelError
from turnout.plugins.quant.compressed import CompressedTensors

INPUTS, OUTPUTS = 128, 32


def made(bits: int = 4, group: int = 32, *, symmetric: bool = True, index: list[int] | None = None) -> Any:
    """A layer's tensors, and its weights by the definition."""
    source = torch.Generator().manual_seed(bits * 1000 + group)
    middle = 1 << (bits - 1)
    places = index or [i // group for i in range(INPUTS)]
    codes = torch.randint(0, 1 << bits, (OUTPUTS, INPUTS), generator=source)
    scales = (torch.rand(OUTPUTS, max(places) + 1, generator=source) / 10).half()
    zeros = torch.full(scales.shape, middle)
    tensors = {
        "weight_packed": rows(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    }
    if not symmetric:
        zeros = torch.randint(0, 1 << bits, scales.shape, generator=source)
        tensors["weight_zero_point"] = columns(zeros, bits)
    if index is not None:
        tensors["weight_g_idx"] = torch.tensor(index, dtype=torch.int32)
    return tensors, product(codes, scales, zeros, places)


def scheme(bits: int = 4, group: int | None = 32, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return {"targets": ["Linear"], "weights": weights | others, "input_activations": None}


def settings(*schemes: dict[str, Any], **others: Any) -> dict[str, Any]:
    groups = {f"group_{i}": found for i, found in enumerate(schemes or (scheme(),))}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return said | {"quantization_status": "compressed", "ignore": ["lm_head"]} | others


def reader() -> CompressedTensors:
    return CompressedTensors(kernel="torch")


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"),
    [(2, 32, False), (3, 64, False), (4, 128, True), (4, 32, False), (5, 64, True), (6, 128, False), (8, 32, True)],
)
def test_every_width_and_group_is_read(bits: int, group: int, symmetric: bool) -> None:
    tensors, weights = made(bits, group, symmetric=symmetric)
    close(read(reader(), settings(scheme(bits, group, symmetric=symmetric)), tensors), weights)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_one_scale_for_a_row_or_for_all_is_read(strategy: str) -> None:
    tensors, weights = made(group=INPUTS)
    if strategy == "tensor":
        first = tensors["weight_scale"][:1]
        weights = weights * (first.double() / tensors["weight_scale"].double())
        tensors["weight_scale"] = first
    layer = read(reader(), settings(scheme(group=None, strategy=strategy)), tensors)
    torch.testing.assert_close(layer.dequantize(torch.float64), weights, rtol=1e-12, atol=1e-12)


def test_an_activation_order_gives_each_input_the_scale_of_its_group() -> None:
    index = (torch.randperm(INPUTS, generator=torch.Generator().manual_seed(3)) // 32).tolist()
    tensors, weights = made(index=index)
    close(read(reader(), settings(scheme(actorder="group")), tensors), weights)


def test_an_index_that_was_never_set_means_groups_in_sequence() -> None:
    tensors, weights = made()
    tensors["weight_g_idx"] = torch.full((INPUTS,), -1)
    close(read(reader(), settings(), tensors), weights)


def test_zero_points_that_are_not_packed_are_read_as_signed() -> None:
    tensors, _ = made(symmetric=False)
    signed = torch.randint(-8, 8, tensors["weight_scale"].shape, dtype=torch.int8)
    plain = read(reader(), settings(scheme(symmetric=False)), tensors | {"weight_zero_point": signed})
    again = read(
        reader(), settings(scheme(symmetric=False)), tensors | {"weight_zero_point": columns(signed.int() + 8, 4)}
    )
    assert torch.equal(plain.dequantize(), again.dequantize())


def test_a_bias_is_added() -> None:
    tensors, weights = made()
    bias = torch.randn(OUTPUTS)
    close(read(reader(), settings(), tensors | {"bias": bias}), weights, bias)


def test_a_layer_goes_by_the_scheme_that_names_it_before_one_that_names_all() -> None:
    eight, weights = made(8, 64)
    said = settings(scheme(), scheme(8, 64) | {"targets": ["re:.*up_proj"]})
    close(read(reader(), said, eight), weights)
    four, weights = made()
    close(read(reader(), said, four, LAYER.replace("up", "down")), weights)


def test_a_layer_is_plain_when_it_is_stored_plain() -> None:
    quantizer = reader()
    quantizer.prepare(settings(), info(torch.bfloat16))
    layer = quantizer.linear(LAYER, {"weight": torch.randn(8, 4).half()})
    assert isinstance(layer, torch.nn.Linear) and layer.weight.dtype == torch.bfloat16


@every(
    ("said", "reason"),
    [
        (
            settings(format="marlin-24"),
            r"group_0 \(marlin-24, 4-bit int weights\) is of a format that .* does not read",
        ),
        (settings(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (settings(scheme() | {"format": "mxfp4-pack-quantized"}), "mxfp4-pack-quantized"),
        (settings(scheme(7)), "packed weights are read as integers of 2, 3, 4, 5, 6, 8 bits"),
        (settings(scheme(type="float")), "packed weights are read as integers"),
        (settings(scheme(None)), "quantization_config lacks num_bits"),
        (settings(scheme(strategy="block")), "has the strategy block"),
        (settings(scheme(group=4)), r"group_size must be -1 .* got 4"),
        (settings(scheme() | {"input_activations": {"num_bits": 8}}), "quantizes activations too"),
        (settings(scheme() | {"output_activations": {"num_bits": 8}}), "output_activations is set"),
        (settings(scheme() | {"targets": "Linear"}), "targets must be a list of names"),
        (settings(scheme() | {"targets": ["re:("]}), r"targets has a pattern that is none, 're:\('"),
        (settings(config_groups={}), "config_groups must map names to schemes"),
        (settings({"targets": ["Linear"]}), "group_0 must have weights"),
        (settings(quantization_status="frozen"), "quantization_status is frozen"),
        (settings(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is set"),
        (settings(transform_config={"config_groups": {"R1": {}}}), "transform_config is set"),
    ],
)
def test_what_is_not_read_is_refused_by_name_before_weights_load(said: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        reader().prepare(said, info())


def test_a_model_of_floats_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match="this one holds floats; make one with `turnout quantize method=rtn`"):
        reader().prepare(None, info())


@pytest.mark.parametrize(
    ("said", "change", "reason"),
    [
        (settings(scheme(8)), {}, rf"{LAYER}.weight_packed is \[32, 16\]; 32 x 128 weights of 8 bits"),
        (settings(scheme(group=64)), {}, f"{LAYER} has 128 inputs and scales for 4 groups, but .* has groups of 64"),
        (settings(scheme(symmetric=False)), {}, f"{LAYER} lacks weight_zero_point"),
        (settings(), {"weight_shape": None}, f"{LAYER} is quantized but lacks weight_shape"),
        (settings(), {"weight_packed": None}, rf"{LAYER} falls under .*, but holds"),
        (settings(scheme() | {"targets": ["q_proj"]}), {}, f"{LAYER} is stored quantized, but no target"),
    ],
)
def test_tensors_that_do_not_fit_the_scheme_are_refused_naming_the_layer(
    said: dict[str, Any], change: dict[str, Tensor | None], reason: str
) -> None:
    tensors, _ = made()
    changed = {leaf: tensor for leaf, tensor in {**tensors, **change}.items() if tensor is not None}
    with pytest.raises(ModelError, match=reason):
        read(reader(), said, changed)
