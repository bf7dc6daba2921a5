"""The compiled model: the tokens of the eager one, whatever a step holds, from one compilation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_on, words
from models import VOCAB, save

from turnout.core import KVSpec, ModelError, Request, Sampling
from turnout.core.engine import Engine
from turnout.core.model import Limits
from turnout.plugins.attention.torch_sdpa import TorchAttention
from turnout.plugins.loader import model as loading
from turnout.plugins.quant.none import Unquantized
from turnout.plugins.runner import LocalRunner

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inside the compiler
CPU = torch.device("cpu")
LIMITS = Limits(max_model_len=256)


def traffic() -> list[Request]:
    return [
        Request(
            f"r{i}",
            words((1, 7, 30, 12, 2)[i], i, VOCAB),
            Sampling(temperature=0, max_tokens=(9, 4, 6, 1, 7)[i], prompt_logprobs=0 if i == 1 else None),
        )
        for i in range(5)
    ]


def tokens_of(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in engine.generate(traffic()):
        assert output.error is None
        found.setdefault(output.request_id, []).extend(output.tokens)
    return found


def started(model: loading.Model, attention: Any = None) -> LocalRunner:
    runner = LocalRunner("compile")
    runner.prepare(model.info, LIMITS, lambda stage, share: None)
    spec = KVSpec(model.info.layers, 16, 64)
    runner.start(model, attention or TorchAttention(), spec, torch.float32, CPU, 0)
    return runner


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen2", "gpt_oss"])
def test_tokens_are_the_eager_models_and_no_step_compiles_again(architecture: str, tmp_path: Path) -> None:
    """Prompts, chunks of one token, scored prompts, a batch that shrinks to a single decode: all by one graph."""
    layers = {"num_hidden_layers": 2} if architecture == "llama" else {}
    info = loading.inspect(str(save(architecture, tmp_path, **layers)), "float32", "cpu")
    expected = tokens_of(engine_on(loading.load(info, Unquantized())))
    model = loading.load(replace(info, traced=True), Unquantized())
    engine = engine_on(model)
    engine._runner = started(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert tokens_of(engine) == expected


def test_a_model_that_cannot_be_traced_is_refused_with_the_reason(tmp_path: Path) -> None:
    class Asking:
        def __call__(self, tokens: torch.Tensor, positions: Any, rows: torch.Tensor, attend: Any) -> torch.Tensor:
            return tokens.float() if tokens.sum().item() > 3 else positions

    model: Any = Asking()
    model.info = loading.inspect(str(save("llama", tmp_path)), "float32", "cpu")
    with pytest.raises(ModelError, match="can't compile this model, choose runner.mode=eager: \\w+"):
        started(model)
