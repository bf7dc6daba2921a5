"""Fixtures of the fault tests: tiny models loaded once, and the whole server over a real engine in this process."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
from callers import Api
from engines import LocalEngine

from turnout.core.engine import Engine
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.quant.none import Unquantized
from turnout.server.api.app import create_app
from turnout.server.config import ServerConfig
from turnout.server.text.tokenizer import Text

Tiny = Callable[..., Model]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny("llama", hidden_size=64, …)`: a model with random weights in float32, made once for each form."""
    made: dict[str, Model] = {}

    def make(architecture: str, **options: object) -> Model:
        key = f"{architecture} {sorted(options.items())}"
        if key not in made:
            folder = models.save(architecture, tmp_path_factory.mktemp(architecture), **options)
            made[key] = load(inspect(str(folder), dtype="float32", device="cpu"), Unquantized())
        return made[key]

    return make


@pytest.fixture(scope="session")
def text(smollm2: str) -> Text:
    return Text.load(smollm2)


@pytest.fixture(scope="session")
def worded(tiny: Tiny, text: Text) -> Model:
    """A tiny model over the demo model's vocabulary."""
    return tiny("llama", vocab_size=text.vocab_size)


@pytest.fixture
def http(text: Text) -> Callable[[Engine], Api]:
    """The server over an engine, called in this process."""
    return lambda engine: Api(create_app(LocalEngine(engine), text, ServerConfig()), engine.info.model)
