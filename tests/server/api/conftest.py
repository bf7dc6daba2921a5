"""Fixtures of the HTTP tests: the real tokenizer, a scripted engine, the application over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from callers import Api, live
from scripted import ScriptedEngine

from turnout.server.api.app import create_app
from turnout.server.config import ServerConfig
from turnout.server.text.tokenizer import Text


@pytest.fixture(scope="session")
def text(smollm2: str) -> Text:
    return Text.load(smollm2)


@pytest.fixture
def engine(text: Text) -> ScriptedEngine:
    return ScriptedEngine(text)


@pytest.fixture
def api(engine: ScriptedEngine, text: Text) -> Api:
    """The application, called in this process."""
    return Api(create_app(engine, text, ServerConfig()), engine.info.model)


@pytest.fixture
def api_with(engine: ScriptedEngine, text: Text) -> Callable[..., Api]:
    """The application with options of its own."""
    return lambda **options: Api(create_app(engine, text, ServerConfig(**options)), engine.info.model)


@pytest.fixture
def url(engine: ScriptedEngine, text: Text) -> Iterator[str]:
    """The application behind a real server on loopback."""
    with live(create_app(engine, text, ServerConfig())) as address:
        yield address
