"""`turnout generate` and `turnout chat`: the engine in this process, the text in this terminal. No server."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import closing

from turnout.core.build import build_engine
from turnout.core.config import Config
from turnout.core.engine import Engine
from turnout.core.types import EngineInfo, Finish, Request, Sampling
from turnout.server.config import ChatConfig, GenerateConfig, SamplingConfig
from turnout.server.console import Loading
from turnout.server.defaults import DEFAULTED, Values, defaults_of, usual
from turnout.server.text import Detokenizer, Text

OPTION = "sampling.generation_config"
TAIL = 16  # last tokens of a prompt, enough to tell how the text goes on


def generate(config: GenerateConfig) -> int:
    """Print the prompt's continuation as it comes."""
    if config.prompt is None:
        config.prompt = sys.stdin.read() if not sys.stdin.isatty() else ""
    if not config.prompt:
        raise ValueError(
            'there is no prompt: turnout generate "PROMPT" [OVERRIDE ...], or the prompt on standard input'
        )
    engine, text = open_engine(config)
    defaults = defaults_of(text, OPTION, config.sampling.generation_config)
    ids = text.chat([{"role": "user", "content": config.prompt}]) if config.chat else text.encode(config.prompt)
    sampling = sampling_of(config.sampling, defaults, text, engine.info, len(ids))
    for piece in stream(engine, text, ids, sampling, config.sampling.stop, continues=not config.chat):
        print(piece, end="", flush=True)
    print()
    return 0


def chat(config: ChatConfig) -> int:
    """Talk until Ctrl-D. Ctrl-C ends an answer, and the program when nothing is being answered."""
    engine, text = open_engine(config)
    defaults = defaults_of(text, OPTION, config.sampling.generation_config)
    print(f"{config.model} · Ctrl-C stops an answer, Ctrl-D or /bye ends, /new forgets", file=sys.stderr)
    system = [{"role": "system", "content": config.system}] if config.system else []
    messages = list(system)
    while True:
        try:
            said = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if said == "/bye":
            return 0
        if said == "/new":
            messages = list(system)
            continue
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        answer = ""
        try:
            ids = text.chat(messages)
            sampling = sampling_of(config.sampling, defaults, text, engine.info, len(ids))
            for piece in stream(engine, text, ids, sampling, config.sampling.stop, continues=False):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except ValueError as error:  # the conversation outgrew the context
            print(f"{error}; /new starts afresh", file=sys.stderr)
            messages.pop()
            continue
        print()
        messages.append({"role": "assistant", "content": answer})


def open_engine(config: Config) -> tuple[Engine, Text]:
    """The composed engine and its text side, with progress on stderr."""
    with closing(Loading()) as progress:
        engine = build_engine(config, progress)
        return engine, Text.load(engine.info.path)


def stream(
    engine: Engine, text: Text, ids: list[int], sampling: Sampling, stop: list[str], *, continues: bool
) -> Iterator[str]:
    """The text of one answer, piece by piece. Leaving early aborts the request. Raises ValueError when refused.

    `continues`: it goes on in the prompt's text; else it begins a text of its own.
    """
    request = Request(uuid.uuid4().hex, ids, sampling)
    detokenizer = Detokenizer(text, prompt_tail=ids[-TAIL:] if continues else (), stop=stop)
    outputs = engine.generate([request])
    try:
        for output in outputs:
            if output.finish is Finish.ERROR:
                raise ValueError(f"the engine failed on this request: {output.error}")
            tokens = [t for t in output.tokens if t not in request.sampling.stop_ids]
            yield detokenizer.push(tokens)
            if detokenizer.stopped is not None:
                break
    finally:
        outputs.close()  # type: ignore[attr-defined]  # a generator
    yield detokenizer.finish()


def sampling_of(wanted: SamplingConfig, defaults: Values, text: Text, info: EngineInfo, num_prompt: int) -> Sampling:
    """What was asked for; else the default. `max_tokens` is cut to the context's rest."""
    given = {name: value for name in DEFAULTED if (value := getattr(wanted, name)) is not None}
    rest = min(info.max_model_len, info.capacity + 1) - num_prompt
    return Sampling(
        **(dict(defaults) | usual(given)),
        seed=wanted.seed,
        max_tokens=min(wanted.max_tokens, rest) if rest > 0 else wanted.max_tokens,
        stop_ids=frozenset() if wanted.ignore_eos else frozenset(i for i in text.eos_ids if i < info.vocab_size),
    )
