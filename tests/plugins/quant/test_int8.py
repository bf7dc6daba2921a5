"""quant=int8: integers exact whatever the shape and the instructions, rows that never meet, models served with them."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from exact import exact_logits, load_recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting import NO_INTERPRETER
from torch import Tensor, nn

from turnout.core import ModelError
from turnout.kernels import cpu as native
from turnout.kernels.cpu.linear import PackedLinear
from turnout.plugins.loader.fuse import fuse
from turnout.plugins.loader.model import inspect
from turnout.plugins.loader.native_layer import NativeForward
from turnout.plugins.quant import int8_linear
from turnout.plugins.quant.int8 import Int8
from turnout.plugins.quant.int8_linear import NativeInt8, TorchInt8, TritonInt8, _Data, make, pack, quantized, unpack

NO_NATIVE = native.obstacle()
needs_native = pytest.mark.skipif(NO_NATIVE is not None, reason=f"native kernels: {NO_NATIVE}")
kernels = pytest.mark.parametrize("kernel", ["torch", pytest.param("native", marks=needs_native)])
SHAPES = [(576, 576), (192, 576), (33, 7), (1, 64), (50, 100), (17, 33), (48, 1536)]  # outputs, inputs


def layer_of(shape: tuple[int, int], kernel: str, bias: bool = True, fixed: float | None = None) -> Any:
    torch.manual_seed(sum(shape))
    codes, scales = quantized("it", torch.randn(shape) * torch.rand(shape[0], 1).exp())
    codes[0, 0] = -128  # as checkpoints of others may hold
    given_scale = None if fixed is None else torch.tensor(fixed)
    return make("it", codes, scales, torch.randn(shape[0]) if bias else None, given_scale, kernel)


def exact(layer: Any, x: Tensor) -> Tensor:
    """In float64, but for the choice of the codes: the rule says it is made in float32."""
    top = x.abs().amax(-1, keepdim=True)
    by, scale = (torch.tensor(127.0) / top, top / 127) if layer.fixed is None else (1 / layer.fixed, layer.fixed)
    codes = torch.where(top > 1e-30, x * by, 0.0).round().clamp(-128, 127).double()
    out = (codes @ layer.codes.double().t()) * scale.double() * layer.scales.double()
    return out if layer.bias is None else out + layer.bias.double()


def assert_exact(layer: Any, x: Tensor, got: Tensor) -> None:
    """To float32's rounding of the row's largest value, or of the bias."""
    want = exact(layer, x)
    scale = want.abs().amax(-1, keepdim=True) + (0 if layer.bias is None else layer.bias.abs().amax())
    assert got.dtype == torch.float32 and bool(((got - want).abs() <= 2e-6 * scale + 1e-30).all())


@kernels
def test_products_equal_float64_of_what_the_codes_stand_for(kernel: str) -> None:
    for number, shape in enumerate(SHAPES):
        layer = layer_of(shape, kernel, number % 2 == 0)
        for rows in (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48, 70):
            x = torch.randn(rows, shape[1]) * torch.randn(rows, 1).exp()
            assert_exact(layer, x, layer(x))


@kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_given_scales_clip_what_lies_beyond_them(kernel: str, shape: tuple[int, int]) -> None:
    layer = layer_of(shape, kernel, fixed=0.0078125)  # a power of two: no rounding of x / scale
    for rows in (1, 9, 40):
        x = torch.randn(rows, shape[1])
        assert (x / 0.0078125).abs().max() > 128 or x.numel() < 50
        assert_exact(layer, x, layer(x))


@kernels
def test_a_row_is_the_same_bit_for_bit_whatever_is_computed_with_it(kernel: str) -> None:
    for shape in ((96, 160), (33, 7)):
        layer = layer_of(shape, kernel)
        x = torch.randn(70, shape[1])
        together = layer(x)
        for begin, end in [(0, 1), (3, 4), (0, 2), (0, 5), (7, 16), (20, 37), (5, 70), (69, 70)]:
            assert torch.equal(layer(x[begin:end]), together[begin:end])


@kernels
def test_extreme_rows_stay_with_themselves(kernel: str) -> None:
    layer = layer_of((40, 96), kernel)
    x = torch.randn(24, 96)
    calm = layer(x)
    x[2], x[3], x[4], x[5] = 0, 1e-38, x[4] * 1e30, x[5] * 1e-25
    x[6, 1], x[7, 95], x[8, 0] = float("nan"), float("inf"), float("-inf")
    x[9] = 0
    x[9, 17] = 3.0
    for rows in (12, 24):
        got = layer(x[:rows])
        assert torch.equal(got[2], layer.bias) and torch.equal(got[3], layer.bias)  # too small to matter: zeros
        for row in (4, 5, 9):
            assert_exact(layer, x[row], got[row])
        assert got[6:9].isnan().all()
        others = [0, 1, 10, 11]
        assert torch.equal(got[others], calm[others])


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_have_the_inputs_dtype_and_leading_dimensions(kernel: str, dtype: torch.dtype) -> None:
    layer = layer_of((33, 64), kernel)
    x = torch.randn(2, 3, 64).to(dtype)
    got = layer(x)
    assert got.shape == (2, 3, 33) and got.dtype == dtype
    assert torch.equal(got, layer(x.float()).to(dtype))
    turned = torch.randn(64, 5).to(dtype).t()  # not contiguous
    assert torch.equal(layer(turned), layer(turned.contiguous()))


@needs_native
@settings(max_examples=40, deadline=None)
@given(outs=st.integers(1, 70), ins=st.integers(1, 140), rows=st.integers(1, 70), bias=st.booleans())
def test_native_and_reference_agree_on_ragged_sizes(outs: int, ins: int, rows: int, bias: bool) -> None:
    torch.manual_seed(outs * 1000 + ins)
    one, other = layer_of((outs, ins), "native", bias), layer_of((outs, ins), "torch", bias)
    x = torch.randn(rows, ins)
    torch.testing.assert_close(one(x), other(x), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_native_layout_holds_every_code(shape: tuple[int, int]) -> None:
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    packed = pack(codes)
    assert packed.shape[0] == -(-shape[0] // 16) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, *shape), codes)


@cache
def compiled(march: str, folder: Path) -> Callable[..., None]:
    """The product of int8.cpp for another kind of processor, called with two threads."""
    tool, made = native.compiler(), folder / f"{march}.so"
    subprocess.run(
        [str(tool), *native.FLAGS, f"-march={march}", "-o", str(made), str(native.FOLDER / "int8.cpp")], check=True
    )
    library = ctypes.CDLL(str(made))
    library.turnout_int8.argtypes = [ctypes.POINTER(_Data), *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2]

    def product(layer: NativeInt8, x: Tensor) -> Tensor:
        out = torch.full((x.shape[0], layer.out_features), float("nan"))
        library.turnout_int8(ctypes.byref(layer._data), x.data_ptr(), out.data_ptr(), x.shape[0], 2)
        return out

    return product  # type: ignore[return-value]


def instructions() -> Iterator[Any]:
    """Each set of instructions that int8.cpp has a path for, if this processor has it."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        flags = []
    for march, needs in [("x86-64-v2", "sse4_2"), ("x86-64-v3", "avx2"), ("alderlake", "avx_vnni"),
                         ("cascadelake", "avx512_vnni"), ("sapphirerapids", "amx_int8")]:  # fmt: skip
        yield pytest.param(march, marks=pytest.mark.skipif(needs not in flags, reason=f"this processor has no {needs}"))


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("march", list(instructions()))
def test_every_set_of_instructions_gives_the_same_bits(march: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    product = compiled(march, tmp_path_factory.getbasetemp())
    for shape in ((96, 160), (50, 100), (33, 7)):
        layer = layer_of(shape, "native")
        x = torch.randn(70, shape[1])
        x[3] = 0
        for rows in (1, 2, 3, 5, 16, 17, 70):
            got = product(layer, x[:rows])
            assert_exact(layer, x[:rows], got)
            torch.testing.assert_close(got, layer(x[:rows]), rtol=1e-6, atol=1e-6)  # but for a fused multiply-add


@kernels
def test_siblings_are_joined_and_each_keeps_its_scales(kernel: str) -> None:
    """vllm PR#41021: one scale over gate and up ruined the one with the smaller values."""
    torch.manual_seed(0)
    big, small = torch.randn(70, 48), torch.randn(33, 48) * 0.01
    parts = [make("it", *quantized("it", weight), None, None, kernel) for weight in (big, small)]
    both = type(parts[0]).joined(parts)
    assert both is not None
    x = torch.randn(5, 48)
    assert torch.equal(both(x), torch.cat([part(x) for part in parts], -1))
    for weight, got in zip((big, small), both.dequantize().split([70, 33]), strict=True):
        assert (got - weight).abs().max() <= weight.abs().max() / 127 / 2 * 1.0001


@kernels
def test_what_differs_in_more_than_its_size_is_not_joined(kernel: str) -> None:
    one = layer_of((16, 48), kernel)
    for other in (
        layer_of((16, 50), kernel),
        layer_of((16, 48), kernel, bias=False),
        layer_of((16, 48), kernel, fixed=1),
    ):
        assert type(one).joined([one, other]) is None


@kernels
def test_fused_siblings_in_a_model_compute_what_each_did(kernel: str) -> None:
    net = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        net.add_module(name, layer_of((48 if name == "q_proj" else 17, 64), kernel))
    x = torch.randn(1, 6, 64)
    alone = [module(x) for module in net.children()]
    assert fuse(net) == 1
    assert all(torch.equal(module(x), want) for module, want in zip(net.children(), alone, strict=True))


def test_weights_no_integer_can_stand_for_are_refused() -> None:
    for bad in (float("nan"), float("inf")):
        weight = torch.randn(4, 8)
        weight[1, 2] = bad
        with pytest.raises(ModelError, match="model.it.weight holds NaN or infinity"):
            quantized("model.it", weight)
    with pytest.raises(ModelError, match="model.it has 65537 inputs"):
        make("model.it", torch.zeros(1, 65537, dtype=torch.int8), torch.ones(1), None, None, "torch")
    codes, scales = quantized("it", torch.zeros(3, 5))
    assert not codes.any() and torch.isfinite(scales).all()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2", "opt", "gemma2", "phi3"])
@kernels
def test_a_model_gives_the_logits_of_its_dequantized_weights_in_float64(arch: str, kernel: str, tmp_path: Path) -> None:
    """GPT-2 stores its layers turned; OPT and Qwen2 have biases; phi3 stores q, k and v as one."""
    models.save(arch, tmp_path)
    model, made = load_recorded(tmp_path, Int8(kernel=kernel))
    want_kind = TorchInt8 if kernel == "torch" else NativeInt8
    assert made and all(type(layer) is want_kind for layer in made.values())
    tokens = [5, 17, 99, 3, 42, 61, 8]
    place = torch.arange(len(tokens))
    with torch.inference_mode():
        got = model(torch.tensor(tokens), place, place, models.dense(model.info.layers, [len(tokens)]))
    want = exact_logits(tmp_path, made, tokens)
    assert (got - want).abs().mean() < 1e-3 * want.abs().max()  # a code may round the other way here and there
    assert (got - want).abs().max() < 0.02 * want.abs().max()


@needs_native
def test_decoder_layers_of_integers_run_in_native_calls(tmp_path: Path) -> None:
    models.save("llama", tmp_path)
    model, _ = load_recorded(tmp_path, Int8())
    native_layers = [m for m in model._net.modules() if isinstance(m.__dict__.get("forward"), NativeForward)]
    assert len(native_layers) == 3
    tokens, place = torch.arange(40) % models.VOCAB, torch.arange(40)
    attend = models.dense(model.info.layers, [40])
    with torch.inference_mode():
        fast = model(tokens, place, place, attend)
        for layer in native_layers:
            layer.forward = layer.forward._original  # type: ignore[union-attr]
        slow = model(tokens, place, place, attend)
    assert (fast - slow).abs().mean() < 1e-3 * slow.abs().max()


def test_layers_named_by_a_pattern_and_the_head_stay_float_when_asked(tmp_path: Path) -> None:
    models.save("llama", tmp_path, tie_word_embeddings=True)
    _, made = load_recorded(tmp_path, Int8(kernel="torch", skip=["layers.1", "down_proj"], head=False))
    floats = {name for name, layer in made.items() if type(layer) is nn.Linear}
    assert floats == {
        "lm_head",
        *(f"model.layers.{n}.mlp.down_proj" for n in range(3)),
        *(f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"),
        *(f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up")),
    }
    model, made = load_recorded(tmp_path, Int8(kernel="torch"))
    assert type(made["lm_head"]) is TorchInt8
    assert model._net.model.embed_tokens.weight.dtype == torch.float32  # tied, and looked up in floats


def test_stacked_experts_are_refused_by_name_unless_they_are_to_stay_float(tmp_path: Path) -> None:
    models.save("mixtral", tmp_path)
    with pytest.raises(ModelError, match=r"model.layers.0.mlp.experts.gate_up_proj.*quant.skip=\[experts\]"):
        load_recorded(tmp_path, Int8(kernel="torch"))
    model, made = load_recorded(tmp_path, Int8(kernel="torch", skip=["experts"]))
    assert all(type(layer) is TorchInt8 for layer in made.values())
    place = torch.arange(5)
    with torch.inference_mode():
        got = model(place + 9, place, place, models.dense(model.info.layers, [5]))
    want = models.reference(tmp_path, (place + 9).tolist())
    assert (got - want).abs().mean() < 0.1 * want.abs().max()


@needs_native
def test_a_loaded_model_takes_the_memory_its_sizes_say(tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 1}
    models.save("llama", tmp_path, **sizes)
    model, made = load_recorded(tmp_path, Int8())
    outs = {name: layer.out_features for name, layer in made.items()}
    weights = sum(layer.in_features * layer.out_features for layer in made.values())  # type: ignore[operator]
    scales = 4 * sum(outs.values())  # type: ignore[arg-type]
    floats = 4 * (models.VOCAB * 192 + 7 * 192)  # the embedding, and norms
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in [*model._net.parameters(), *model._net.buffers()]
    }
    assert (
        weights + scales + floats <= sum(held.values()) <= 1.001 * (weights + scales + floats) + 1024
    )  # rotary tables
    assert not any(isinstance(module, (nn.Linear, PackedLinear)) for module in model._net.modules())


def test_the_kernel_must_be_known_and_able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"quant.kernel must be one of auto, native, torch, triton, got 'cuda'"):
        Int8(kernel="cuda")
    codes, scales = quantized("it", torch.randn(4, 8))
    monkeypatch.setattr(native, "obstacle", lambda: "there is no C++ compiler")
    assert type(make("it", codes, scales, None, None, "auto")) is TorchInt8
    with pytest.raises(ModelError, match=r"quant.kernel=native.*no C\+\+ compiler.*quant.kernel=torch"):
        make("it", codes, scales, None, None, "native")


def test_a_model_that_is_traced_gets_layers_that_can_be(tmp_path: Path) -> None:
    from dataclasses import replace

    info = replace(inspect(str(models.save("llama", tmp_path)), "float32", "cpu"), traced=True)
    quantizer = Int8()
    quantizer.prepare(None, info)
    assert type(quantizer.linear("it", {"weight": torch.randn(4, 8)})) is TorchInt8
    with pytest.raises(ModelError, match="quant.kernel=native is not for torch.compile"):
        Int8(kernel="native").prepare(None, info)


def test_a_gpu_is_given_whole_eights_and_more_than_sixteen_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._int_mm` on CUDA wants that; here it is told of a GPU, with the CPU's product behind."""
    asked: list[tuple[int, ...]] = []
    product = torch._int_mm

    def watched(a: Tensor, b: Tensor) -> Tensor:
        asked.append((*a.shape, *b.shape))
        return product(a, b)

    x, codes = (torch.randint(-9, 9, shape, dtype=torch.int8) for shape in ((3, 33), (50, 33)))
    want = int8_linear._product(x, codes)
    monkeypatch.setattr(torch, "_int_mm", watched)
    monkeypatch.setattr(int8_linear, "_on_gpu", lambda tensor: True)
    assert torch.equal(int8_linear._product(x, codes), want)
    assert asked == [(17, 40, 40, 56)]


@pytest.mark.slow
@pytest.mark.skipif(NO_INTERPRETER is not None, reason=f"{NO_INTERPRETER}")
@pytest.mark.parametrize("bias", [False, True])
def test_tritons_kernels_give_what_the_reference_gives(bias: bool) -> None:
    layer = layer_of((50, 96), "torch", bias)
    twin = TritonInt8(layer.codes, layer.scales, layer.bias, None)
    x = torch.randn(2, 9, 96)
    got, want = twin(x), layer(x)
    assert got.shape == want.shape and (got - want).abs().mean() < 1e-4 * want.abs().max()
    with pytest.raises(ModelError, match=r"quant.kernel=triton.*it is on cpu.*quant.kernel=torch"):
        make("it", layer.codes, layer.scales, None, None, "triton")
