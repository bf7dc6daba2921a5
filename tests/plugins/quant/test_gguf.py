"""quant=gguf: blocks read as the gguf package reads them, models served packed, everything else refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from turnout.core import ModelError
from turnout.kernels import cpu as native
from turnout.plugins.formats.gguf import GGUF
from turnout.plugins.loader import checkpoint
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.loader.source import NOTE, made_of
from turnout.plugins.quant import gguf_blocks
from turnout.plugins.quant.gguf import Gguf, Table
from turnout.plugins.quant.grouped import Grouped, pack
from turnout.plugins.quant.none import Unquantized

OF_32 = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
OF_256 = ["Q4_K", "Q5_K", "Q6_K"]
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = torch.tensor([3, 17, 9, 41, 5, 28, 33, 2, 60, 11, 7, 50])


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if native.obstacle() is None:
        native.library()  # it is kept where the cache is: not to be built anew in each of these
    monkeypatch.setenv("TURNOUT_CACHE", str(tmp_path / "cache"))


def blocks(kind: str, rows: int, count: int) -> np.ndarray:
    """Random rows of valid blocks: any bytes, and float16 numbers of ordinary size where the type has those."""
    dice = np.random.default_rng(0)
    size = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    made = dice.integers(0, 256, (rows, count, size), dtype=np.uint8)
    for at in HALVES.get(kind, [208]):
        numbers = dice.uniform(0.001, 0.02, (rows, count, 1)) * dice.choice([-1, 1], (rows, count, 1))
        made[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    return made.reshape(rows, count * size)


def layer(found: gguf_blocks.Codes) -> Grouped:
    return Grouped(pack(found.codes, found.bits), found.scales, found.offsets, found.bits, found.group)


@pytest.mark.parametrize("kind", OF_32)
def test_blocks_of_32_are_read_bit_for_bit_as_the_gguf_package_reads_them(kind: str) -> None:
    rows = blocks(kind, 5, 18)
    found = gguf_blocks.codes(kind, torch.from_numpy(rows))
    assert found.scales.dtype == found.offsets.dtype == torch.float16
    assert np.array_equal(layer(found).dequantize().numpy(), gguf.dequantize(rows, Kind[kind]))


@pytest.mark.parametrize("kind", OF_256)
def test_blocks_of_256_are_read_but_for_scales_rounded_to_float16(kind: str) -> None:
    rows = blocks(kind, 5, 3)
    found = gguf_blocks.codes(kind, torch.from_numpy(rows))
    assert found.scales.dtype == torch.float16
    got, want = layer(found).dequantize().double(), torch.from_numpy(gguf.dequantize(rows, Kind[kind])).double()
    scales, offsets = (t.double().abs().repeat_interleave(found.group, 1) for t in (found.scales, found.offsets))
    bound = (scales * found.codes.double() + offsets) / 2048 * 1.01
    assert bool(((got - want).abs() <= bound + 1e-7).all())


@pytest.mark.parametrize("kind", OF_256)
def test_scales_too_small_for_float16_stay_float32(kind: str) -> None:
    rows = blocks(kind, 2, 2)
    for at in HALVES.get(kind, [208]):
        size = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
        rows.reshape(2, 2, size)[..., at : at + 2] = np.array([6e-8], np.float16).view(np.uint8)  # a subnormal
    found = gguf_blocks.codes(kind, torch.from_numpy(rows))
    np.testing.assert_allclose(
        layer(found).dequantize().numpy(), gguf.dequantize(rows, Kind[kind]), rtol=1e-3, atol=1e-9
    )


@pytest.mark.parametrize("kind", OF_32)
def test_what_the_gguf_package_quantizes_comes_back(kind: str) -> None:
    weights = np.random.default_rng(1).normal(size=(6, 576)).astype(np.float32)
    rows = gguf.quantize(weights, Kind[kind])
    made = layer(gguf_blocks.codes(kind, torch.from_numpy(rows)))
    assert np.abs(made.dequantize().numpy() - weights).max() < (0.02 if kind == "Q8_0" else 0.5)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of 30 bytes are no whole blocks of Q4_0, 18 bytes each"):
        gguf_blocks.codes("Q4_0", torch.zeros(2, 30, dtype=torch.uint8))


FORMATS = {"gguf": GGUF()}


def written(folder: Path, case: str, dtype: Kind, **fields: Any) -> Path:
    """A tiny model's file; 64 is the smallest width of all its matrices."""
    arch, model_type, settings = tiny_gguf.MODELS[case]
    return tiny_gguf.write(
        folder / "tiny.gguf",
        arch,
        tiny_gguf.tiny(model_type, settings | (fields if case == "gpt2" else WIDE | fields)),
        dtype=dtype,
    )


def served(file: Path, quantizer: Any) -> Model:
    info = inspect(checkpoint.resolve(str(file), FORMATS), "float32", "cpu")
    if isinstance(quantizer, Gguf):
        quantizer.prepare(info.quantization, info)
    return load(info, quantizer, FORMATS)


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Plain causal attention over the tokens of one call."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(t.transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


@torch.inference_mode()
def logits(model: Model, prompt: Tensor = PROMPT) -> Tensor:
    places = torch.arange(len(prompt))
    return model(prompt, places, places, attend)


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("kind", OF_32)
def test_a_model_served_packed_gives_the_logits_of_its_dequantized_form(kind: str, kernel: str, tmp_path: Path) -> None:
    file = written(tmp_path, "tied llama", Kind[kind])
    want = logits(served(file, Unquantized()))
    got = logits(served(file, Gguf(kernel, "float")))
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    "case", ["llama", "llama with biases", "qwen2", "qwen3", "starcoder2", "gemma2", "gpt2", "phi3"]
)
def test_every_architecture_keeps_its_own_ways(case: str, tmp_path: Path) -> None:
    """Row orders, biases, norms stored plus one, layers stored turned, scaled embeddings."""
    fields = {"n_embd": 64, "n_inner": 96} if case == "gpt2" else {}
    file = written(tmp_path, case, Kind.Q8_0, **fields)
    want = logits(served(file, Unquantized()))
    model = served(file, Gguf(activations="float"))
    assert any(isinstance(module, Grouped) for module in model._net.modules())
    assert (logits(model) - want).abs().max() < 1e-4 * want.abs().max()


def test_activations_in_8_bits_stay_close(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", Kind.Q8_0)
    want = logits(served(file, Unquantized()))
    got = logits(served(file, Gguf()))
    assert not torch.equal(got, want) and (got - want).abs().max() < 0.05 * want.abs().max()


def test_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    file = written(tmp_path, "qwen3moe", Kind.Q8_0, moe_intermediate_size=32)
    with pytest.raises(ModelError, match=r"quant=gguf can't keep model\.layers\.0\.mlp\.experts\.\w+, \[4, "):
        served(file, Gguf())


def test_a_tied_head_is_the_packed_embedding_itself(tmp_path: Path) -> None:
    net = served(written(tmp_path, "tied llama", Kind.Q8_0), Gguf())._net
    assert isinstance(net.model.embed_tokens, Table) and net.model.embed_tokens.layer is net.lm_head
    floats = [name for name, tensor in net.state_dict().items() if tensor.is_floating_point() and tensor.dim() > 2]
    assert not [name for name in floats if "scales" not in name and "offsets" not in name]


def test_an_untied_head_is_its_own(tmp_path: Path) -> None:
    net = served(written(tmp_path, "llama", Kind.Q8_0), Gguf())._net
    assert isinstance(net.model.embed_tokens, Table) and isinstance(net.lm_head, Grouped)
    assert net.model.embed_tokens.layer is not net.lm_head
    assert not torch.equal(net.model.embed_tokens.layer.dequantize(), net.lm_head.dequantize())


def test_memory_is_close_to_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "tied llama", Kind.Q4_1, hidden_size=576, intermediate_size=1536, head_dim=64)
    net = served(file, Gguf())._net
    held = {t.data_ptr(): t.nbytes for t in (*net.buffers(), *net.parameters()) if t.numel()}
    assert sum(held.values()) < 1.02 * file.stat().st_size


def test_a_model_that_is_no_gguf_file_is_refused_naming_both(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", Kind.Q8_0)
    folder = Path(checkpoint.resolve(str(file), FORMATS))
    (folder / NOTE).unlink()
    info = inspect(str(folder), "float32", "cpu")
    with pytest.raises(
        ModelError, match=r"Gguf keeps the tensors of a \.gguf file packed, and .* is made of safe.*model=FILE\.gguf"
    ):
        load(info, Gguf(), FORMATS)


def test_a_conversion_whose_file_has_changed_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", Kind.Q8_0)
    folder = checkpoint.resolve(str(file), FORMATS)
    assert made_of(folder) == file
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ValueError, match=r"was made from .*tiny\.gguf, which has changed since"):
        made_of(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"which is gone; name the file itself"):
        made_of(folder)


def test_a_conversion_that_does_not_say_what_it_was_made_of_is_made_again(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", Kind.Q8_0)
    folder = Path(checkpoint.resolve(str(file), FORMATS))
    (folder / NOTE).unlink()
    assert made_of(str(folder)) is None
    assert Path(checkpoint.resolve(str(file), FORMATS)) == folder and made_of(str(folder)) == file


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", Kind.Q8_0)
    info = inspect(checkpoint.resolve(str(file), FORMATS), "float32", "cpu")
    quantizer = Gguf()
    quantizer.prepare(None, info)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    note = Path(info.path) / NOTE  # as if the file had been so from the beginning
    stat = file.stat()
    note.write_text(json.dumps({"file": str(file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}))
    with pytest.raises(ModelError, match=r"can't be served packed: .*cut short"):
        load(info, quantizer, FORMATS)


def test_types_that_are_not_kept_packed_are_refused_by_name(tmp_path: Path) -> None:
    file = written(tmp_path, "llama", Kind.Q8_0)
    info = inspect(checkpoint.resolve(str(file), FORMATS), "float32", "cpu")
    quantizer = Gguf()
    quantizer.prepare(None, info)
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama", tiny_gguf.tiny("llama", tiny_gguf.MODELS["llama"][2]))
    data = bytearray(other.read_bytes())
    reader = gguf.GGUFReader(other)
    field = next(t for t in reader.tensors if t.name == "output.weight").field
    at = field.parts[4]  # the type of a tensor in the file's table
    data[at.__array_interface__["data"][0] - reader.data.__array_interface__["data"][0]] = Kind.TQ1_0
    other.write_bytes(data)
    stat = other.stat()
    note = {"file": str(other), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    (Path(info.path) / NOTE).write_text(json.dumps(note))
    with pytest.raises(ModelError, match=r"other\.gguf can't be served packed"):
        load(info, quantizer, FORMATS)


@pytest.mark.parametrize(("field", "value"), [("kernel", "cuda"), ("activations", "int4")])
def test_options_that_do_not_exist_are_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"quant\.{field} must be one of .*, got '?{value}'?"):
        Gguf(**{field: value})
