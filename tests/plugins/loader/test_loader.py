"""Safetensors into a model: every tensor finds its place and every place its tensor, or the load fails and says why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from turnout.core import ModelError
from turnout.core.interfaces import Quantizer
from turnout.kernels.cpu.linear import PackedLinear
from turnout.plugins.loader.fuse import Part
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.quant.none import Unquantized

PROMPT = [5, 17, 99, 3, 42, 61, 8]
Tensors = dict[str, Tensor]


def served(folder: Path, quantizer: Quantizer | None = None) -> Model:
    return load(inspect(str(folder), dtype="float32", device="cpu"), quantizer or Unquantized())


@torch.inference_mode()
def logits(model: Model) -> Tensor:
    rows = torch.arange(len(PROMPT))
    return model(torch.tensor(PROMPT), rows, rows, models.dense(model.info.layers, [len(PROMPT)]))


def assert_right(folder: Path) -> None:
    torch.testing.assert_close(logits(served(folder)), models.reference(folder, PROMPT), atol=2e-5, rtol=1e-5)


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a folder in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path, num: int = 3) -> list[Path]:
    """Spread a folder's tensors over files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files, index = [], {}
    for part in range(num):
        own = sorted(tensors)[part::num]
        files.append(folder / f"model-{part + 1:05}-of-{num:05}.safetensors")
        save_file({name: tensors[name] for name in own}, files[-1])
        index |= dict.fromkeys(own, files[-1].name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return files


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return models.save("llama", tmp_path)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return models.save("llama", tmp_path, tie_word_embeddings=True)


def test_shards_give_the_same_model_as_one_file(llama: Path) -> None:
    whole = logits(served(llama))
    shard(llama)
    assert torch.equal(logits(served(llama)), whole)


def test_the_model_needs_its_files_no_longer(llama: Path) -> None:
    model = served(llama)
    before = logits(model)
    size = (llama / "model.safetensors").stat().st_size
    (llama / "model.safetensors").write_bytes(b"\xff" * size)
    assert torch.equal(logits(model), before)


def test_progress_counts_the_bytes_up_to_all_of_them(llama: Path) -> None:
    heard: list[tuple[int, int]] = []
    load(inspect(str(llama), device="cpu"), Unquantized(), {}, lambda done, total: heard.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(llama / "model.safetensors").values())
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert {size for _, size in heard} == {total} and heard[-1] == (total, total)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "it lacks model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("model.norm.weight"), "it lacks model.norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "the model has no place for extra"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            "the model has no place for model.layers.0.self_attn.q_proj.bias",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 31)}),
            r"model.layers.0.mlp.up_proj.weight is \[64, 31\], the model wants \[64, 32\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(16)}),
            r"model.norm.weight is \[16\], the model wants \[32\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            "model.norm.weight is stored as torch.int8, the model wants torch.float32",
        ),
        (lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}), "both are model.layers.0.input_lay"),
        (lambda t: t.clear(), "it lacks lm_head.weight, .* and 25 more"),
    ],
)
def test_a_tensor_missing_unexpected_or_of_another_shape_fails_before_any_is_read(
    change: Callable[[Tensors], object], reason: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(llama, change)
    monkeypatch.setattr("turnout.plugins.loader.shards.Shards.read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ModelError, match=f"does not fit LlamaForCausalLM: .*{reason}"):
        served(llama)


def test_biases_in_a_checkpoint_whose_configuration_names_none_are_an_error(tmp_path: Path) -> None:
    folder = models.save("llama", tmp_path, attention_bias=True)
    models.edit_config(folder, attention_bias=False)
    with pytest.raises(ModelError, match="no place for model.layers.0.self_attn.k_proj.bias"):
        served(folder)


def test_buffers_that_older_transformers_stored_are_ignored(llama: Path) -> None:
    edit(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert_right(llama)


def test_gpt2_loads_under_the_names_of_its_first_release(tmp_path: Path) -> None:
    folder = models.save("gpt2", tmp_path)

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256)

    edit(folder, change)
    assert_right(folder)


def test_a_shard_the_index_names_but_the_folder_lacks_is_an_error(llama: Path) -> None:
    files = shard(llama)
    files[1].unlink()
    with pytest.raises(ModelError, match=rf"{files[1].name} is missing; .* holds 10 tensors: .*layers.*"):
        inspect(str(llama))


def test_a_tensor_the_index_places_in_a_shard_that_lacks_it_is_an_error(llama: Path) -> None:
    files = shard(llama)
    tensors = load_file(files[0])
    gone = min(tensors)
    del tensors[gone]
    save_file(tensors, files[0])
    with pytest.raises(ModelError, match=rf"{files[0].name} lacks tensors that .* says it holds: {gone}"):
        inspect(str(llama))


@pytest.mark.parametrize("text", ["[", "[]", "{}"])
def test_an_index_that_is_none_is_an_error(text: str, llama: Path) -> None:
    shard(llama)
    (llama / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="is not a safetensors index"):
        inspect(str(llama))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -1000])
def test_a_file_that_was_cut_short_is_named_with_its_size(keep: int, sharded: bool, llama: Path) -> None:
    file = shard(llama)[2] if sharded else llama / "model.safetensors"
    data = file.read_bytes()[:keep]
    file.write_bytes(data)
    with pytest.raises(ModelError, match=rf"{file.name} has {len(data)} bytes, .*cut short"):
        inspect(str(llama))


def test_a_file_with_rubbish_behind_its_tensors_is_an_error(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(ModelError, match=r"has (\d+) bytes, its header says (\d+)"):
        inspect(str(llama))


def test_a_file_that_shrinks_between_inspect_and_load_is_an_error(llama: Path) -> None:
    info = inspect(str(llama), device="cpu")
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match="cut short"):
        load(info, Unquantized())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs pointer"),
        ((12).to_bytes(8, "little") + b"not any JSON", "header that can't be read"),
        ((2).to_bytes(8, "little") + b"[]", "header that can't be read"),
        ((18).to_bytes(8, "little") + b'{"a":{"dtype":"X"}}'[:18], "header that can't be read"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, reason: str, llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        inspect(str(llama))


def test_pickles_are_refused_with_the_way_to_convert_them(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"pickles \(.bin\), which can run code and are not read; convert them: .*save_"
    ):
        inspect(str(llama))


def test_a_folder_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="neither model.safetensors nor model.safetensors.index.json"):
        inspect(str(llama))


def test_a_tied_head_shares_the_embeddings_memory(tied: Path) -> None:
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    net = served(tied)._net
    assert net.lm_head.packed.data_ptr() == net.model.embed_tokens.packed.data_ptr()
    assert_right(tied)


def test_a_tied_head_may_be_stored_if_it_equals_the_embedding(tied: Path) -> None:
    edit(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    net = served(tied)._net
    assert net.lm_head.packed.data_ptr() == net.model.embed_tokens.packed.data_ptr()
    edit(tied, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(ModelError, match=r"ties lm_head.weight to model.embed_tokens.weight, .* both and they differ"):
        served(tied)


def test_a_tied_head_may_be_stored_in_place_of_the_embedding(tied: Path) -> None:
    before = logits(served(tied))
    edit(tied, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(logits(served(tied)), before)


def test_a_tied_model_without_embedding_and_head_is_an_error(tied: Path) -> None:
    edit(tied, lambda t: t.pop("model.embed_tokens.weight"))
    with pytest.raises(ModelError, match="it lacks lm_head.weight, model.embed_tokens.weight"):
        served(tied)


def test_an_untied_head_that_is_not_stored_is_an_error(tied: Path) -> None:
    models.edit_config(tied, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r'it lacks lm_head.weight \(.*"tie_word_embeddings": false'):
        served(tied)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_load_from_the_public_layout_and_from_transformers_own(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = models.save(architecture, tmp_path / "public")
    public = load_file(folder / "model.safetensors")
    assert any(".experts.0." in name for name in public) == (architecture != "gpt_oss")
    net = AutoModelForCausalLM.from_pretrained(folder)
    net.save_pretrained(tmp_path / "own", save_original_format=False)
    assert not any(".experts.0." in name for name in load_file(tmp_path / "own" / "model.safetensors"))
    assert torch.equal(logits(served(folder)), logits(served(tmp_path / "own")))
    shard(folder)  # the parts of one expert lie in several files
    assert torch.equal(logits(served(folder)), logits(served(tmp_path / "own")))


def test_a_missing_expert_is_an_error(tmp_path: Path) -> None:
    folder = models.save("mixtral", tmp_path)
    edit(folder, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w2.weight"))
    with pytest.raises(
        ModelError, match=r"model.layers.1.mlp.experts.down_proj is \[3, 32, 64\], .* wants \[4, 32, 64\]"
    ):
        served(folder)


def test_experts_stored_in_both_layouts_are_an_error(tmp_path: Path) -> None:
    folder = models.save("mixtral", tmp_path)
    edit(folder, lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(4, 32, 64)}))
    with pytest.raises(ModelError, match="both are model.layers.1.mlp.experts.down_proj"):
        served(folder)


def test_experts_of_which_one_lacks_a_half_are_an_error(tmp_path: Path) -> None:
    folder = models.save("mixtral", tmp_path)
    edit(folder, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight"))
    with pytest.raises(ModelError, match="model.layers.1.mlp.experts.gate_up_proj can't be put together"):
        served(folder)


@dataclass
class Doubling:
    """Writes down what it is given and makes layers whose output is twice as large."""

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset({"halves"})
    seen: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        self.seen[name] = dict(tensors)
        weight = tensors["weight"] if "weight" in tensors else tensors["half"] + tensors["rest"]
        return Unquantized().linear(name, {**tensors, "weight": 2 * weight})


def test_every_linear_layer_goes_through_the_quantizer_with_its_tensors(tmp_path: Path) -> None:
    folder = models.save("qwen2", tmp_path)
    quantizer = Doubling()
    model = served(folder, quantizer)
    stored = load_file(folder / "model.safetensors")
    linears = [
        name
        for name, module in model._net.named_modules()
        if isinstance(module, (Part, PackedLinear)) and not name.endswith(".joined")
    ]
    assert quantizer.seen.keys() == set(linears) and len(linears) == 3 * 7 + 1
    for name, tensors in quantizer.seen.items():
        assert tensors.keys() == ({"weight", "bias"} if name.endswith(("q_proj", "k_proj", "v_proj")) else {"weight"})
        assert all(torch.equal(tensor, stored[f"{name}.{leaf}"]) for leaf, tensor in tensors.items())
    assert torch.equal(model._net.lm_head.weight, 2 * stored["lm_head.weight"])


def test_a_tied_head_is_quantized_and_the_embedding_is_not(tied: Path) -> None:
    quantizer = Doubling()
    net = served(tied, quantizer)._net
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(net.model.embed_tokens.weight, embedding)
    assert torch.equal(net.lm_head.weight, 2 * embedding)


def test_a_quantizers_own_format_reaches_it_whole_and_nothing_else_may_be_strange(llama: Path) -> None:
    weight = load_file(llama / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]

    def change(tensors: Tensors) -> None:
        half = tensors.pop("model.layers.0.mlp.up_proj.weight") / 4
        tensors["model.layers.0.mlp.up_proj.half"] = half.half()
        tensors["model.layers.0.mlp.up_proj.rest"] = half
        tensors["model.layers.0.mlp.up_proj.order"] = torch.arange(5)

    edit(llama, change)
    models.edit_config(llama, quantization_config={"quant_method": "halves"})
    quantizer = Doubling()
    net = served(llama, quantizer)._net
    up = net.model.layers[0].mlp.up_proj
    torch.testing.assert_close(up.shared.linear.weight[up.shared.rows(up.index)], weight, atol=1e-3, rtol=1e-3)
    given = quantizer.seen["model.layers.0.mlp.up_proj"]
    assert {leaf: tensor.dtype for leaf, tensor in given.items()} == {
        "half": torch.float16,
        "rest": torch.float32,
        "order": torch.int64,
    }
    edit(llama, lambda t: t.update({"model.norm.order": torch.arange(5)}))
    with pytest.raises(ModelError, match="no place for model.norm.order"):
        served(llama, Doubling())


@pytest.mark.parametrize(
    "outside", ["../other/model.safetensors", "/etc/model.safetensors", "a/../../model.safetensors"]
)
def test_a_shard_outside_the_folder_is_not_read(outside: str, llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "part.safetensors")
    names = load_file(llama / "part.safetensors")
    index = {"weight_map": dict.fromkeys(names, "part.safetensors") | {next(iter(names)): outside}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"names a file outside its folder, which is not read: {outside}"):
        inspect(str(llama))
