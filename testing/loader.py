"""The contract of a model loader as a suite to inherit: a tiny Llama, found, looked at and loaded. Needs transformers.

    class TestMine(LoaderContract):
        make = Mine

`turnout plugins check loader=mine` runs the same rules. A loader of other models overrides `model`, which writes one to a
folder, and `truth`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from turnout.core.model import ModelInfo, Report
from turnout.core.types import ModelError
from turnout.testing.attention import plain_attention
from turnout.testing.quant_model import SHAPE, logits_of, prompts, save_tiny


class Floats:
    """A quantizer that leaves layers as they are, and remembers what it was given."""

    checkpoint_formats: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.given: dict[str, tuple[int, ...]] = {}

    def linear(self, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        assert name not in self.given, f"{name} is asked for twice"
        weight, bias = tensors["weight"], tensors.get("bias")
        self.given[name] = tuple(weight.shape)
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        made.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            made.bias = nn.Parameter(bias, requires_grad=False)
        return made


class _Copies:
    """A format whose files name a folder."""

    version: ClassVar[int] = 1

    def convert(self, file: Path, folder: Path, report: Report) -> None:
        shutil.copytree(file.read_text(), folder, dirs_exist_ok=True)


class LoaderContract:
    """What every loader keeps. `make` builds one, with any options."""

    make: Callable[[], Any]

    def model(self, folder: Path) -> Path:
        return save_tiny(folder, tied=False)

    def truth(self, folder: Path, tokens: Tensor) -> Tensor:
        """Logits [len(tokens), vocab] of one prompt, by other means."""
        from transformers import AutoModelForCausalLM

        net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits: Tensor = net(tokens[None]).logits[0]
        return logits

    @contextmanager
    def folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as scratch:
            yield self.model(Path(scratch) / "model")

    def loaded(self, folder: Path, quantizer: Any, **hear: Any) -> tuple[Any, ModelInfo]:
        loader = self.make()
        info = loader.inspect(str(folder), "float32", "cpu")
        return loader.load(info, quantizer, {}, hear.get("progress", lambda done, total: None)), info

    def test_a_folder_is_found_as_it_is_and_what_is_not_there_is_refused(self) -> None:
        with self.folder() as folder:
            assert Path(self.make().find(str(folder), {}, lambda stage: None)) == folder
            _refuses(lambda: self.make().find(str(folder / "no" / "such"), {}, lambda stage: None), "no/such")

    def test_a_model_file_goes_through_the_format_that_reads_it(self) -> None:
        with self.folder() as folder:
            file = folder.parent / "model.toy"
            file.write_text(str(folder))
            found = Path(self.make().find(str(file), {"toy": _Copies()}, lambda stage: None))
            assert found.is_dir(), f"a .toy file is found as {found}, which is no folder"
            try:
                assert (found / "config.json").read_bytes() == (folder / "config.json").read_bytes(), (
                    f"{found} is another"
                )
            finally:
                shutil.rmtree(found, ignore_errors=True)  # it is kept for the next time
            _refuses(lambda: self.make().find(str(file), {}, lambda stage: None), "model.toy")

    def test_what_it_says_before_loading_is_what_the_model_is(self) -> None:
        with self.folder() as folder:
            info = self.make().inspect(str(folder), "bfloat16", "cpu")
        layer = info.layers[0]
        found = {
            "layers": (len(info.layers), SHAPE["num_hidden_layers"]),
            "heads": (layer.num_heads, SHAPE["num_attention_heads"]),
            "key heads": (layer.num_kv_heads, SHAPE["num_key_value_heads"]),
            "vocabulary": (info.vocab_size, SHAPE["vocab_size"]),
            "context": (info.max_len, SHAPE["max_position_embeddings"]),
            "dtype": (info.dtype, torch.bfloat16),
            "device": (info.device.type, "cpu"),
            "quantization": (info.quantization, None),
        }
        wrong = [f"{name} {got}, not {want}" for name, (got, want) in found.items() if got != want]
        assert not wrong, "; ".join(wrong)

    def test_its_logits_are_the_models_own(self) -> None:
        with self.folder() as folder:
            model, info = self.loaded(folder, Floats())
            for tokens in prompts(info.vocab_size)[:2]:
                off = (logits_of(model, info, [tokens]) - self.truth(folder, tokens).double()).abs().max().item()
                assert off < 1e-3, f"logits are off by {off:.2g}"

    def test_only_the_rows_asked_for_come_in_their_order_and_a_request_does_not_see_its_neighbours(self) -> None:
        with self.folder() as folder:
            model, info = self.loaded(folder, Floats())
            first, second = prompts(info.vocab_size)[:2]
            alone = [logits_of(model, info, [tokens]) for tokens in (first, second)]
            half, num = len(first) // 2, len(first)  # first's halves lie on both sides of second
            both = torch.cat([first[:half], second, first[half:]])
            places = torch.cat([torch.arange(half), torch.arange(len(second)), torch.arange(half, num)])
            own = [torch.cat([torch.arange(half), torch.arange(half, num) + len(second)])]
            own.append(torch.arange(len(second)) + half)
            rows = torch.tensor([len(both) - 1, 3, half])

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
                out = q.new_empty(*q.shape[:2], v.shape[-1])
                for at in own:
                    out[at] = plain_attention(q[at], k[at], v[at], info.layers[layer], sinks)
                return out

            with torch.inference_mode():
                got = model(both, places, rows, attend).double()
        want = torch.stack([alone[0][-1], alone[0][3], alone[1][0]])
        assert got.shape == want.shape, f"{tuple(got.shape)} logits for 3 rows of {info.vocab_size}"
        assert (got - want).abs().max() < 1e-3, "beside another request, at its positions, a request has other logits"

    def test_every_linear_layer_is_made_by_the_quantizer_and_used(self) -> None:
        with self.folder() as folder:
            floats = Floats()
            model, info = self.loaded(folder, floats)
            tokens = prompts(info.vocab_size)[0]
            before = logits_of(model, info, [tokens])
            wanted = 7 * len(info.layers) + 1  # q, k, v, o, gate, up, down; the head
            assert len(floats.given) == wanted, f"{len(floats.given)} layers were asked for, the model has {wanted}"
            for name in list(floats.given)[:: max(1, len(floats.given) // 5)]:
                halved = Floats()
                halved.linear = _halving(halved.linear, name)  # type: ignore[method-assign]
                changed, _ = self.loaded(folder, halved)
                assert not torch.equal(logits_of(changed, info, [tokens]), before), (
                    f"the layer made for {name} is not used"
                )

    def test_progress_is_counted_up_to_all_of_it(self) -> None:
        heard: list[tuple[int, int]] = []
        with self.folder() as folder:
            self.loaded(folder, Floats(), progress=lambda done, total: heard.append((done, total)))
        done = [count for count, _ in heard]
        assert done == sorted(done) and heard and heard[-1][0] == heard[-1][1] > 0, f"it ends with {heard[-1:]}"

    def test_files_cut_short_or_missing_are_refused(self) -> None:
        with self.folder() as folder:
            (file,) = folder.glob("*.safetensors")
            whole = file.read_bytes()
            for damage in (whole[: len(whole) // 2], whole[:4], b""):
                file.write_bytes(damage)
                _refuses(lambda: self.loaded(folder, Floats()), file.name)
            file.unlink()
            _refuses(lambda: self.loaded(folder, Floats()), "")


def _halving(linear: Callable[..., nn.Module], target: str) -> Callable[..., nn.Module]:
    def made(name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        tensors = {leaf: tensor * 0.5 for leaf, tensor in tensors.items()} if name == target else tensors
        return linear(name, tensors)

    return made


def _refuses(call: Callable[[], object], named: str) -> None:
    try:
        call()
    except ModelError as error:
        assert named in str(error), f"the refusal does not name {named}: {error}"
        return
    raise AssertionError(f"it is not refused{f': {named}' if named else ''}")
