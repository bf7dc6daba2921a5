"""quant=fp8, and compressed-tensors' 8-bit formats: every layout of scales, checkpoints that others' tools made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import models
import pytest
import torch
from exact import exact_logits, fp8_inputs, load_recorded
from grids import every
from interpreting import NO_INTERPRETER
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from turnout.core import ModelError
from turnout.kernels import cpu as native
from turnout.plugins.loader.fuse import fuse
from turnout.plugins.quant import compressed_8bit, fp8_linear, schemes
from turnout.plugins.quant.compressed import CompressedTensors
from turnout.plugins.quant.fp8 import Fp8, stored_layer
from turnout.plugins.quant.fp8_linear import CODE, Activations, Fp8Linear, quantized
from turnout.plugins.quant.grouped import Grouped
from turnout.plugins.quant.int8_linear import NativeInt8, TorchInt8

FIXTURES = Path(__file__).parent / "fixtures"
COMPRESSED = ["fp8-blocks", "fp8-dynamic", "fp8-static", "w8a8-dynamic", "w8a8-static"]
HF = ["fp8-hf-blocks", "fp8-hf-tensor"]


def codes_of(shape: tuple[int, int]) -> Tensor:
    return (torch.randn(shape) * 100).clamp(-448, 448).to(CODE)


def layer_of(shape: tuple[int, int], kind: Activations, block: int | None = None, rows: int = 1) -> Fp8Linear:
    torch.manual_seed(sum(shape))
    outs, ins = shape
    block = block or ins
    scales = torch.rand(-(-outs // rows), -(-ins // block)) * 0.01 + 1e-4
    fixed = torch.tensor(0.01) if kind is Activations.FIXED else None
    return Fp8Linear(codes_of(shape), fp8_linear.row_scales(scales, rows, outs), block, kind, torch.randn(outs), fixed)


def exact(layer: Fp8Linear, x: Tensor) -> Tensor:
    """float64, the roundings of the inputs made by the same rule; the weights code times scale, one by one."""
    x = x.double() if layer.activations is Activations.FLOAT else fp8_inputs(x.double(), layer)
    weight = torch.empty(layer.out_features, layer.in_features, dtype=torch.float64)
    for i in range(layer.in_features):
        weight[:, i] = layer.codes[:, i].double() * layer.scales[:, i // layer.block].double()
    assert layer.bias is not None
    return x @ weight.t() + layer.bias.double()


@pytest.mark.parametrize("kind", list(Activations), ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize(
    ("shape", "block", "rows"), [((48, 96), None, 1), ((33, 7), None, 33), ((70, 160), 32, 32), ((48, 576), 128, 128),
                                 ((64, 144), 128, 16)],
)  # fmt: skip
def test_products_equal_float64_of_what_the_codes_stand_for(
    kind: Activations, shape: tuple[int, int], block: int | None, rows: int
) -> None:
    layer = layer_of(shape, kind, block, rows)
    for num in (1, 3, 17, 40):
        x = torch.randn(num, shape[1]) * torch.randn(num, 1).exp()
        got, want = layer(x), exact(layer, x)
        close = (got - want).abs() <= 1e-5 * want.abs().amax()
        assert close.float().mean() > 0.97  # a code of x on the edge between two may fall either way in float32
        assert (got - want).abs().max() < 0.02 * want.abs().amax()


def test_weights_are_widened_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of((70, 96), Activations.TOKEN, 32), torch.randn(5, 96)
    whole = layer(x)
    monkeypatch.setattr(fp8_linear, "SCRATCH", 96 * 16)
    torch.testing.assert_close(layer(x), whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [Activations.TOKEN, Activations.BLOCK, Activations.FIXED])
def test_a_row_with_nan_infinity_or_zeros_is_alone_with_it(kind: Activations) -> None:
    layer = layer_of((40, 96), kind, 32 if kind is Activations.BLOCK else None)
    x = torch.randn(6, 96)
    calm = layer(x)
    x[1, 3], x[2, 95], x[3] = float("nan"), float("inf"), 0
    got = layer(x)
    assert got[1].isnan().all() and got[2].isnan().all()
    torch.testing.assert_close(got[3], layer.bias)
    torch.testing.assert_close(got[[0, 4, 5]], calm[[0, 4, 5]])


def test_values_beyond_the_largest_code_become_it() -> None:
    layer = layer_of((16, 32), Activations.FIXED)
    x = torch.full((1, 32), 1e6)
    torch.testing.assert_close(layer(x), layer(torch.full((1, 32), 4.48)))
    codes, scales = quantized("it", torch.randn(5, 9))
    assert codes.to(torch.float32).abs().amax(1).eq(448).all() and scales.shape == (5, 1)


@pytest.mark.parametrize("rows", [16, 128])
def test_scales_of_joined_parts_stay_on_their_rows(rows: int) -> None:
    """vllm#52997: 192 and 64 rows in blocks of 128; vllm PR#41021: gate a hundred times smaller than up."""
    one, other = (layer_of((outs, 160), Activations.BLOCK, 128, rows) for outs in (192, 64))
    other.scales *= 0.01
    both = Fp8Linear.joined([one, other])
    assert both is not None
    assert torch.equal(both.dequantize(), torch.cat([one.dequantize(), other.dequantize()]))
    x = torch.randn(4, 160)
    torch.testing.assert_close(both(x), torch.cat([one(x), other(x)], -1), rtol=1e-5, atol=1e-5)
    net = nn.Module()
    net.add_module("gate_proj", one)
    net.add_module("up_proj", other)
    assert fuse(net) == 1
    torch.testing.assert_close(net.get_submodule("up_proj")(x), other(x), rtol=1e-5, atol=1e-5)


def test_what_differs_in_more_than_its_size_is_not_joined() -> None:
    one = layer_of((16, 64), Activations.TOKEN)
    others = [
        layer_of((16, 32), Activations.TOKEN),
        layer_of((16, 64), Activations.FIXED),
        layer_of((16, 64), Activations.BLOCK, 32),
    ]
    assert all(Fp8Linear.joined([one, other]) is None for other in others)
    fixed = [layer_of((16, 64), Activations.FIXED) for _ in range(2)]
    assert Fp8Linear.joined(fixed) is not None
    fixed[1].fixed = torch.tensor(0.02)
    assert Fp8Linear.joined(fixed) is None


def test_a_gpus_product_gets_codes_and_the_scales_come_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._scaled_mm` as documented: row-major times column-major codes, scales of float32, the asked dtype."""
    calls = []

    def scaled_mm(
        a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
    ) -> Tensor:
        assert a.dtype == b.dtype == CODE and a.is_contiguous() and b.t().is_contiguous()
        assert scale_a.dtype == scale_b.dtype == torch.float32 and not use_fast_accum
        assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
        calls.append(a.shape[0])
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for kind in (Activations.TOKEN, Activations.FIXED):
        layer, x = layer_of((48, 96), kind), torch.randn(2, 3, 96)
        want = layer(x)
        layer.kernel = "scaled_mm"
        torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert calls == [6] * 4


@pytest.mark.skipif(native.obstacle() is not None, reason=f"native kernels: {native.obstacle()}")
@pytest.mark.parametrize(("shape", "block"), [((48, 96), None), ((33, 7), None), ((5, 230), 32), ((300, 1536), 128)])
def test_native_weights_are_the_references_bit_for_bit(shape: tuple[int, int], block: int | None) -> None:
    layer = layer_of(shape, Activations.TOKEN, block)
    every = (
        torch.arange(shape[0] * shape[1]).to(torch.uint8).view(shape).view(CODE)
    )  # NaN, zeros, subnormals among them
    layer.codes = every
    want = layer.dequantize()
    layer.kernel = "native"
    got = layer.dequantize()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
    some = layer.rows(2, 4)
    assert torch.equal(some.nan_to_num(), want[2:4].nan_to_num())


@pytest.mark.slow
@pytest.mark.skipif(NO_INTERPRETER is not None, reason=f"{NO_INTERPRETER}")
@pytest.mark.parametrize(("kind", "block"), [(Activations.TOKEN, None), (Activations.BLOCK, 32)])
def test_tritons_kernels_give_what_the_reference_gives(kind: Activations, block: int | None) -> None:
    layer, x = layer_of((50, 96), kind, block), torch.randn(2, 9, 96)
    want = layer(x)
    layer.kernel = "triton"
    assert (layer(x) - want).abs().max() < 1e-4 * want.abs().max()
    with pytest.raises(ModelError, match=r"quant.kernel=triton.*on cpu.*quant.kernel=torch"):
        fp8_linear.pick("triton", layer)


def test_the_kernel_must_be_known_and_able() -> None:
    with pytest.raises(
        ValueError, match=r"quant.kernel must be one of auto, native, scaled_mm, torch, triton, got 'cuda'"
    ):
        Fp8(kernel="cuda")
    with pytest.raises(ModelError, match=r"quant.kernel=scaled_mm.*on cpu.*quant.kernel=torch"):
        fp8_linear.pick("scaled_mm", layer_of((16, 32), Activations.TOKEN))
    kernel = fp8_linear.pick("auto", layer_of((16, 32), Activations.TOKEN))
    assert kernel == ("native" if native.obstacle() is None else "torch")


def logits_of(folder: Path, quantizer: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(ours, float64's, the layers) of the fixture's prompt."""
    model, made = load_recorded(folder, quantizer)
    tokens = torch.arange(3, 99, 8)
    place = torch.arange(len(tokens))
    with torch.inference_mode():
        got = model(tokens, place, place, models.dense(model.info.layers, [len(tokens)]))
    return got, exact_logits(folder, made, tokens.tolist()), made


@pytest.mark.parametrize("name", COMPRESSED + HF)
def test_a_checkpoint_gives_the_logits_of_its_dequantized_weights_in_float64(name: str) -> None:
    got, want, _ = logits_of(FIXTURES / name, Fp8() if name in HF else CompressedTensors())
    assert (got - want).abs().mean() < 1e-3 * want.abs().max()  # a code may round the other way here and there
    assert (got - want).abs().max() < 0.03 * want.abs().max()


@pytest.mark.parametrize("name", COMPRESSED + HF)
def test_weights_are_those_the_tool_itself_dequantizes(name: str) -> None:
    """compressed-tensors multiplies in the scales' own float16; transformers, for its own format, in float32."""
    folder = FIXTURES / name
    _, made = load_recorded(folder, Fp8() if name in HF else CompressedTensors())
    theirs = load_file(folder / "reference.safetensors")
    shown = {leaf.removesuffix(".weight"): tensor for leaf, tensor in theirs.items() if leaf.endswith(".weight")}
    assert len(shown) == 3
    for layer, want in shown.items():
        got = made[layer].dequantize()  # type: ignore[operator]
        assert (got - want).abs().max() <= (0 if name in HF else 1e-3) * want.abs().max()
    kinds = {type(layer) for layer in made.values()}
    assert kinds & {Fp8Linear, NativeInt8, TorchInt8} and nn.Linear in kinds  # lm_head and others were left


@pytest.mark.parametrize("name", COMPRESSED)
def test_logits_are_those_of_transformers_where_activations_stay_floats(name: str) -> None:
    folder = FIXTURES / name
    _, made = load_recorded(folder, CompressedTensors())
    theirs = load_file(folder / "reference.safetensors")
    ours = exact_logits(folder, made, theirs["tokens"].tolist(), rounds=False)
    assert (ours - theirs["logits"]).abs().mean() < 1e-3 * ours.abs().max()
    assert (ours - theirs["logits"]).abs().max() < 0.01 * ours.abs().max()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
def test_any_float_checkpoint_is_quantized_as_it_loads(arch: str, tmp_path: Path) -> None:
    models.save(arch, tmp_path)
    got, want, made = logits_of(tmp_path, Fp8())
    assert (got - want).abs().mean() < 1e-3 * want.abs().max()
    assert type(made.pop("lm_head")) is nn.Linear
    assert all(type(layer) is Fp8Linear and layer.activations is Activations.TOKEN for layer in made.values())


def test_skipped_layers_and_stacked_experts_are_as_for_int8(tmp_path: Path) -> None:
    models.save("mixtral", tmp_path)
    with pytest.raises(ModelError, match=r"model.layers.0.mlp.experts.gate_up_proj.*quant.skip=\[experts\]"):
        load_recorded(tmp_path, Fp8())
    _, made = load_recorded(tmp_path, Fp8(skip=["experts", "self_attn"], head=True))
    assert {name for name, layer in made.items() if type(layer) is Fp8Linear} == {"lm_head"}


def edited(name: str, folder: Path, config: dict[str, Any] | None = None, **changed: Any) -> Path:
    """A copy of a fixture: settings of quantization_config, and tensors by the end of their name (None drops one)."""
    shutil.copytree(FIXTURES / name, folder / name)
    target = folder / name
    plain = json.loads((target / "config.json").read_text())
    plain["quantization_config"] |= config or {}
    (target / "config.json").write_text(json.dumps(plain))
    tensors = load_file(target / "model.safetensors")
    for end, change in changed.items():
        for key in [key for key in tensors if key.endswith(end)]:
            tensor = tensors.pop(key)
            if change is not None:
                tensors |= change(key, tensor)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ("q_proj", "q_proj is stored in 8-bit floats, but quantization_config leaves 'q_proj'"),
        ("layers.0", "leaves 'layers.0'"),
    ],
)
def test_a_layer_that_is_listed_as_not_converted_must_not_be(listed: str, reason: str, tmp_path: Path) -> None:
    """vllm PR#44628: what is stored decides, and a list that says otherwise is an error, whatever its spelling."""
    folder = edited("fp8-hf-blocks", tmp_path, {"modules_to_not_convert": [listed]})
    with pytest.raises(ModelError, match=reason):
        load_recorded(folder, Fp8())


@every(("config", "changed", "reason"), [
        ({}, {"q_proj.weight_scale_inv": None}, "q_proj.weight is torch.float8_e4m3fn, but the checkpoint holds no scale"),
        ({}, {"q_proj.weight_scale_inv": lambda key, t: {key: t[:1]}}, r"q_proj has \[1, 3\] scales; 96 x 96 weights in"),
        ({"weight_block_size": None}, {}, r"has \[10, 3\] scales for 160 x 96 weights; give one, or one a row"),
        ({"weight_block_size": 128}, {}, r"weight_block_size must be \[rows, inputs\], got 128"),
        ({"activation_scheme": "static"}, {}, "lacks activation_scale or input_scale"),
        ({"activation_scheme": "sometimes"}, {}, "activation_scheme must be dynamic or static, got 'sometimes'"),
        ({"fmt": "e5m2"}, {}, "fmt is e5m2; quant=fp8 reads e4m3"),
        ({}, {"q_proj.weight": lambda key, t: {key: t.to(torch.float8_e5m2)}}, "q_proj.weight is stored as torch.float8_e5m2"),
    ])  # fmt: skip
def test_checkpoints_that_contradict_themselves_are_refused(
    config: dict[str, Any], changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        load_recorded(edited("fp8-hf-blocks", Path(mkdtemp(dir=tmp_path)), config, **changed), Fp8())


def test_other_names_and_a_fixed_scale_of_activations_are_read(tmp_path: Path) -> None:
    """AutoFP8's and vLLM's spelling: weight_scale and input_scale, one number each."""

    def renamed(key: str, scale: Tensor) -> dict[str, Tensor]:
        where = key.removesuffix("weight_scale_inv")
        return {f"{where}weight_scale": scale.reshape(()), f"{where}input_scale": torch.tensor([0.01])}

    folder = edited("fp8-hf-tensor", tmp_path, {"activation_scheme": "static"}, weight_scale_inv=renamed)
    got, want, made = logits_of(folder, Fp8())
    assert (got - want).abs().mean() < 1e-3 * want.abs().max()
    layers = [layer for layer in made.values() if isinstance(layer, Fp8Linear)]
    assert len(layers) == 14 and all(layer.activations is Activations.FIXED for layer in layers)


def scheme_of(weights: dict[str, Any], inputs: dict[str, Any] | None) -> schemes.Scheme:
    return schemes.Scheme("group_0", "int-quantized", {"num_bits": 8} | weights, inputs, ("Linear",))


DYNAMIC = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}


@every(("weights", "inputs", "reason"), [
        ({"num_bits": 4}, None, "with weights of 8-bit integers or floats"),
        ({"type": "int", "strategy": "block"}, None, "has the strategy block; such weights come by tensor, channel, group"),
        ({"type": "float", "strategy": "block"}, None, r"block_structure must be \[rows, inputs\], got None"),
        ({"type": "float", "strategy": "channel"}, DYNAMIC, "8-bit float weights are multiplied by 8-bit float"),
        ({"type": "int", "strategy": "channel", "symmetric": False}, DYNAMIC, "must be symmetric"),
        ({"type": "int", "strategy": "channel"}, DYNAMIC | {"symmetric": False}, "must be symmetric"),
        ({"type": "int", "strategy": "channel"}, DYNAMIC | {"dynamic": False}, "have one, strategy tensor"),
    ])  # fmt: skip
def test_schemes_that_are_not_read_are_refused_before_any_weight(
    weights: dict[str, Any], inputs: dict[str, Any] | None, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        compressed_8bit.check(scheme_of(weights, inputs))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_integers_times_float_activations_keep_their_zero_points(zeros: bool, groups: int) -> None:
    """W8A16: [out, groups] scales, and zero points where the scheme is not symmetric."""
    torch.manual_seed(0)
    weight = torch.randint(-128, 128, (20, 48), dtype=torch.int8)
    scales = torch.rand(20, groups) * 0.1
    points = torch.randint(-100, 100, (20, groups), dtype=torch.int8)
    scheme = scheme_of({"type": "int", "strategy": "group" if groups > 1 else "channel", "symmetric": not zeros}, None)
    compressed_8bit.check(scheme)
    tensors = {"weight": weight, "weight_scale": scales} | ({"weight_zero_point": points} if zeros else {})
    layer = compressed_8bit.layer("it", tensors, scheme, torch.float32)
    wide = weight.double() - (points.double().repeat_interleave(48 // groups, 1) if zeros else 0)
    want = wide * scales.double().repeat_interleave(48 // groups, 1)
    assert isinstance(layer, Grouped)
    torch.testing.assert_close(layer.dequantize().double(), want, rtol=1e-5, atol=1e-5)


def test_tensors_that_are_not_what_the_scheme_promises_are_refused() -> None:
    scheme = scheme_of({"type": "int", "strategy": "channel"}, DYNAMIC)
    good = {"weight": torch.ones(4, 8, dtype=torch.int8), "weight_scale": torch.ones(4, 1)}
    for change, reason in [
        ({"weight": codes_of((4, 8))}, "it.weight is stored as torch.float8_e4m3fn"),
        ({"weight_scale": torch.ones(2, 1)}, r"it has \[2, 1\] scales"),
        ({"weight_zero_point": torch.ones(4, 1)}, "it.weight_zero_point is not zero"),
    ]:
        with pytest.raises(ModelError, match=reason):
            compressed_8bit.layer("it", good | change, scheme, torch.float32)
    fixed = scheme_of({"type": "int"}, DYNAMIC | {"dynamic": False, "strategy": "tensor"})
    with pytest.raises(ModelError, match="it is quantized but lacks input_scale"):
        compressed_8bit.layer("it", good, fixed, torch.float32)
    with pytest.raises(ModelError, match=r"it has \[2\] scales for its activations"):
        stored_layer("it", codes_of((4, 8)), torch.ones(1), None, None, torch.ones(2), True)
