"""`turnout generate` and `turnout chat`: the engine in this process, the text in this terminal. No server."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Literal

from turnout.core import plugins
from turnout.core.build import build_engine
from turnout.core.config import Config
from turnout.core.engine import Engine
from turnout.core.types import EngineInfo, Finish, Output, Request, Sampling
from turnout.server.api.answers import several
from turnout.server.api.defaults import DEFAULTED, Values, defaults_of, usual
from turnout.server.cli.console import Loading
from turnout.server.config import ChatConfig, GenerateConfig, SamplingConfig
from turnout.server.engine.beam import Beams
from turnout.server.engine.messages import Ask, BeamSearch
from turnout.server.steplog.observe import recording
from turnout.server.text.tokenizer import Detokenizer, Text

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
    with recording(plugins.load().manager, config.record, config.record_limit) as recorder:
        engine, text = open_engine(config)
        if recorder is not None:
            recorder.begin(engine.info)
        _complete(config, config.prompt, engine, text)
    return 0


def _complete(config: GenerateConfig, prompt: str, engine: Engine, text: Text) -> None:
    defaults, wanted = defaults_of(text, OPTION, config.sampling.generation_config), config.sampling
    ids = text.chat([{"role": "user", "content": prompt}]) if config.chat else text.encode(prompt)
    sampling = sampling_of(wanted, defaults, text, engine.info, len(ids))
    if wanted.n == 1:
        for piece in stream(engine, text, ids, sampling, wanted, continues=not config.chat):
            print(piece, end="", flush=True)
        print()
        return
    for number, answer in enumerate(answers(engine, text, ids, sampling, wanted, continues=not config.chat), 1):
        print(f"--- {number} of {wanted.n}: log-probability {answer.logprob:.3f}, {answer.num_tokens} tokens")
        print(answer.text)


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
            for piece in stream(engine, text, ids, sampling, config.sampling, continues=False):
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
    engine: Engine, text: Text, ids: list[int], sampling: Sampling, wanted: SamplingConfig, *, continues: bool
) -> Iterator[str]:
    """The text of one answer, piece by piece; whole, where it is known at the end only. Leaving early aborts the request.
    Raises ValueError when refused.

    `continues`: it goes on in the prompt's text; else it begins a text of its own.
    """
    if wanted.num_made > 1 or wanted.use_beam_search:
        yield answers(engine, text, ids, sampling, wanted, continues=continues)[0].text
        return
    request = Request(uuid.uuid4().hex, ids, sampling)
    detokenizer = Detokenizer(text, prompt_tail=ids[-TAIL:] if continues else (), stop=wanted.stop)
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


class Answer:
    """One of several."""

    def __init__(self, detokenizer: Detokenizer, stop_ids: frozenset[int]) -> None:
        self._detokenizer, self._stop_ids = detokenizer, stop_ids
        self.text = ""
        self.num_tokens, self.logprob = 0, 0.0

    def push(self, output: Output) -> bool:
        """Whether it has all its text. Raises ValueError when the engine gave it up."""
        if output.finish is Finish.ERROR:
            raise ValueError(f"the engine failed on this request: {output.error}")
        before, detokenizer = self.num_tokens, self._detokenizer
        self.text += detokenizer.push([token for token in output.tokens if token not in self._stop_ids])
        stopped = detokenizer.stopped is not None
        self.num_tokens = detokenizer.num_tokens_used if stopped else before + len(output.tokens)
        self.logprob += sum(mark.logprob for mark in output.logprobs[: self.num_tokens - before])
        if output.finish and not stopped:
            self.text += detokenizer.finish()
        return stopped or output.finish is not None

    @property
    def mean(self) -> float:
        return self.logprob / self.num_tokens if self.num_tokens else 0.0


def answers(
    engine: Engine, text: Text, ids: list[int], sampling: Sampling, wanted: SamplingConfig, *, continues: bool
) -> list[Answer]:
    """All `wanted.n` answers, best first. Raises ValueError when refused."""
    beams, name, searching = Beams(engine), uuid.uuid4().hex, wanted.use_beam_search
    requests = several(name, ids, sampling, wanted.n if searching else wanted.num_made, ranked=True)
    tail = ids[-TAIL:] if continues else ()
    made = {
        request.id: Answer(Detokenizer(text, prompt_tail=tail, stop=wanted.stop), sampling.stop_ids)
        for request in requests
    }
    asked: list[Ask] = [*requests]
    if searching:
        early: bool | Literal["never"] = "never" if wanted.early_stopping == "never" else bool(wanted.early_stopping)
        asked = [BeamSearch(requests[0], tuple(made), wanted.num_made, wanted.length_penalty, early)]
    num_open = len(requests)
    try:
        for one in asked:
            beams.add(one)
        while num_open:
            for output in beams.step():
                if made[output.request_id].push(output):
                    num_open -= 1
                    beams.abort(output.request_id)  # where a stop string ended it
    finally:
        for one in asked:
            beams.abort(one.id)
    found = list(made.values())
    return found if searching else sorted(found, key=lambda answer: -answer.mean)[: wanted.n]


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
