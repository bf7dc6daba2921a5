"""The contract of a quantizer as a suite to inherit. It knows no format and no kernel.

    class TestMine(QuantizerContract):
        make = Mine
        bits = 4

One that reads checkpoints only names a small one, and perhaps the float model it was made of:

        checkpoint = "fixtures/tiny-mine"
        original = "fixtures/tiny"

`turnout plugins check quant=mine` runs the same rules. Without `bits`, the bounds are those of what its layers take.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.core.optional import DequantizingLinear, JoiningLinear
from turnout.core.types import ModelError
from turnout.testing.quant_model import dequantized, distance, load, logits_of, prompts, save_tiny
from turnout.testing.quant_suite import NAME, QuantizerSuite, bytes_of, error_of, noise, run

# outputs, inputs: the demo model's, then odd ones, which may be refused
WIDTHS = ((192, 576), (576, 192), (1536, 576), (33, 64), (64, 33), (7, 1000))


class QuantizerContract(QuantizerSuite):
    """What every quantizer keeps. One that takes floats is tried layer by layer, and on a tiny model made on the spot."""

    def test_its_layer_is_close_to_the_float_one(self) -> None:
        """Widths that are no multiple of anything may be refused, by the layer's name."""
        for outs, ins in WIDTHS:
            for dtype in (torch.float32, torch.bfloat16):
                weight, x = noise(outs, ins, seed=1), noise(9, ins, seed=2) + 1  # a shifted zero point shows
                try:
                    layer = self.layer(weight.to(dtype))
                except ModelError as error:
                    assert NAME in str(error), f"{outs} x {ins} is refused without the layer's name: {error}"
                    assert (outs, ins) not in WIDTHS[:3], f"{outs} x {ins}, as in the demo model: {error}"
                    continue
                off = error_of(run(layer, x.to(dtype)), F.linear(x.to(dtype).double(), weight.to(dtype).double()))
                assert off <= self.bound + torch.finfo(dtype).eps * 4, f"{outs} x {ins}: off by {off:.2g} of the output"

    def test_it_neither_grows_nor_shrinks_what_goes_through(self) -> None:
        weight, x = noise(576, 576, seed=1), noise(64, 576, seed=2)
        want = F.linear(x.double(), weight.double())
        factor = float((run(self.layer(weight), x).double() * want).sum() / (want * want).sum())
        assert abs(factor - 1) <= max(0.005, self.bound**2), f"the output is {factor:.4f} times what it should be"

    def test_large_and_small_weights_side_by_side_keep_scales_of_their_own(self) -> None:
        """Inputs in blocks of 64 whose weights differ by a factor of 4, and outputs by 1000."""
        columns = torch.tensor([2.0, 0.5, 1.0]).repeat(3).repeat_interleave(64)
        rows = torch.logspace(-3, 0, 32)[:, None]
        weight, x = noise(32, 576, seed=1) * columns * rows, noise(64, 576, seed=2)
        got, want = run(self.layer(weight), x), F.linear(x.double(), weight.double())
        for row in range(32):
            off = error_of(got[:, row], want[:, row])
            assert off <= 2 * self.bound, f"outputs of size {float(rows[row]):.2g} are off by {off:.2g} of themselves"

    def test_a_bias_is_added(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            weight, bias, x = noise(192, 576, seed=1), 100 * noise(192, seed=3), noise(5, 576, seed=2)
            weight, bias, x = weight.to(dtype), bias.to(dtype), x.to(dtype)
            apart = run(self.layer(weight, bias), x).double() - run(self.layer(weight), x).double()
            assert error_of(apart, bias.double().expand(5, -1)) <= 0.01, "with a bias, the output is not shifted by it"

    def test_the_output_has_the_inputs_dtype_and_leading_dimensions(self) -> None:
        layer = self.layer(noise(192, 576, seed=1))
        whole = run(layer, noise(6, 576, seed=2))
        for shape in ((), (1,), (6,), (2, 3), (1, 6), (0,), (1, 0)):
            x = noise(6, 576, seed=2)[: max(torch.Size(shape).numel(), 0)].reshape(*shape, 576)
            out = run(layer, x)
            assert out.shape == (*shape, 192), f"{tuple(x.shape)} becomes {tuple(out.shape)}, of a layer 576 -> 192"
            assert error_of(out.reshape(-1, 192), whole[: x.numel() // 576]) <= self.bound / 4
            strided = run(layer, torch.stack((x, x), -1)[..., 0])
            assert error_of(strided, out) <= 1e-5, "an input that is not contiguous gives another output"
        for dtype in (torch.float32, torch.bfloat16):
            out = run(self.layer(noise(192, 576, seed=1).to(dtype)), noise(6, 576, seed=2).to(dtype))
            assert out.dtype == dtype, f"{dtype} becomes {out.dtype}"

    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        """Not on how large they are, nor on how many."""
        layer, x = self.layer(noise(192, 576, seed=1)), noise(1, 576, seed=2)
        alone = run(layer, x)
        for count in (1, 2, 3, 7, 8, 16, 33, 100):
            for size in (1e-3, 1.0, 1e4):
                among = run(layer, torch.cat((size * noise(count, 576, seed=count), x)))[-1:]
                off = error_of(among, alone)
                assert off <= self.bound / 4, f"beside {count} rows of size {size:g}, a row differs by {off:.2g}"

    def test_nan_stays_in_its_row_and_zeros_are_zeros(self) -> None:
        weight = noise(192, 576, seed=1)
        weight[[0, 7]] = 0
        layer, x = self.layer(weight), noise(5, 576, seed=2)
        want = run(layer, x)
        assert not want[:, [0, 7]].any(), "weights of zero give an output"
        x[1], x[3, 5] = 0, float("nan")
        got = run(layer, x)
        assert not got[1].any(), "an input of zeros gives an output"
        assert bool(got[[0, 2, 4]].isfinite().all()) and error_of(got[[0, 2, 4]], want[[0, 2, 4]]) <= self.bound / 4
        assert not bool(got[3].isfinite().all()), "NaN becomes a number, and a broken request an answer"

    def test_what_it_is_given_stays_as_it_is(self) -> None:
        """A head shares its weight with the embedding."""
        weight, bias = noise(192, 576, seed=1), noise(192, seed=3)
        before, x = (weight.clone(), bias.clone()), noise(5, 576, seed=2)
        asked = x.clone()
        run(self.layer(weight, bias, "lm_head"), x)
        assert torch.equal(weight, before[0]) and torch.equal(bias, before[1]), "it writes to the checkpoint's tensors"
        assert torch.equal(x, asked), "it writes to its input"

    def test_what_it_dequantizes_to_is_what_it_multiplies_by(self) -> None:
        for outs, ins in WIDTHS[:3]:
            weight, x = noise(outs, ins, seed=1), noise(17, ins, seed=2)
            layer = self.layer(weight)
            if not isinstance(layer, DequantizingLinear):
                raise SkipTest(f"{type(layer).__name__} has no dequantize()")
            truth: Tensor = layer.dequantize()
            assert truth.shape == weight.shape, f"dequantize() gives {tuple(truth.shape)} of {tuple(weight.shape)}"
            off = error_of(run(layer, x), F.linear(x.double(), truth.double()))
            assert off <= min(self.bound, 0.05), f"forward is off by {off:.2g} of what dequantize() says"
            assert error_of(truth, weight) <= self.bound

    def test_joined_siblings_are_the_separate_ones_side_by_side(self) -> None:
        """Where its layers can be joined: of different heights and sizes, with biases and without."""
        for biased in (False, True):
            weights = [noise(576, 576, seed=1), 0.01 * noise(192, 576, seed=2), 30 * noise(192, 576, seed=3)]
            biases = [noise(len(w), seed=9) if biased else None for w in weights]
            layers: list[Any] = [self.layer(w, b) for w, b in zip(weights, biases, strict=True)]
            join: Any = type(layers[0]).joined if isinstance(layers[0], JoiningLinear) else None
            if join is None or len({type(layer) for layer in layers}) > 1:
                raise SkipTest("its layers have no joined()")
            for rows in (1, 3, 40):
                x = noise(rows, 576, seed=4)
                apart = [run(layer, x) for layer in layers]
                whole = join([self.layer(w, b) for w, b in zip(weights, biases, strict=True)])
                if whole is None:
                    raise SkipTest("its layers are not joined")
                for got, want in zip(torch.split(run(whole, x), [len(w) for w in weights], -1), apart, strict=True):
                    assert error_of(got, want) <= self.bound / 10, (
                        f"joined, a part differs by {error_of(got, want):.2g}"
                    )

    def test_its_layers_take_about_the_memory_their_bits_say(self) -> None:
        """Half a byte a weight more at most, for scales and padding; what is stored is counted, wherever it hangs."""
        if self.bits is None or self.bits >= 16:
            raise SkipTest("it says no bits" if self.bits is None else "its weights stay floats")
        weight = noise(1024, 1024, seed=1)
        layer = self.layer(weight)
        run(layer, noise(2, 1024, seed=2))
        taken, allowed = bytes_of(layer), weight.numel() * (self.bits / 8 + 0.5)
        assert taken <= allowed, f"{taken} bytes for {weight.numel()} weights of {self.bits} bits"

    def test_a_tiny_model_says_nearly_the_same(self) -> None:
        """Loaded as the engine loads it, with its head of its own and tied to the embedding."""
        self.needs_floats()
        for tied in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                self.close(save_tiny(Path(folder), tied), Path(folder), f"a tiny model, {'tied' if tied else 'untied'}")

    def test_a_checkpoint_says_what_its_layers_dequantize_to(self) -> None:
        """And nearly what the float model says that it was made of, where that is given."""
        if self.checkpoint is None:
            raise SkipTest("it names no checkpoint")
        path = Path(self.checkpoint)
        model, info = load(path, self.make())
        asked = prompts(info.vocab_size)
        got = logits_of(model, info, asked)
        open_model, _ = load(path, dequantized(self.make()))
        found = distance(logits_of(open_model, info, asked), got)
        assert found.share <= 0.02, f"it is {found.share:.2g} away from what its layers dequantize to"
        if self.original is not None:
            self.close(Path(self.original), path, str(path))


def quant_rules(component: type) -> Iterator[tuple[str, Callable[[], object]]]:
    """The rules of a quantizer made by `component()`: (sentence, check). A check may raise SkipTest."""
    own = getattr(component, "bits", None)
    about = {"make": staticmethod(component), "bits": own if isinstance(own, int | float) else None}
    suite = type("Suite", (QuantizerContract,), about)()
    for name in vars(QuantizerContract):
        if name.startswith("test_"):
            yield name.removeprefix("test_").replace("_", " "), getattr(suite, name)
