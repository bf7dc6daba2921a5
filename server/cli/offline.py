"""`turnout generate` and `turnout chat`: the engine in this process, the text in this terminal. No server."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Literal, NamedTuple

from turnout.compose import plugins
from turnout.compose.build import build_engine
from turnout.compose.config import Config
from turnout.core.engine import Engine
from turnout.core.types import EngineInfo, Finish, Output, Request, Sampling
from turnout.server.api.defaults import Values, defaults_of, sampling_with
from turnout.server.cli.progress import Progress
from turnout.server.config import ChatConfig, GenerateConfig, SamplingConfig
from turnout.server.engine.beam import ServedEngine
from turnout.server.engine.messages import Ask, BeamSearch, ParallelSampling
from turnout.server.engine.parallel import requests_of
from turnout.server.steplog.observe import recording
from turnout.server.text.output import Collected, Delta, OutputText, Prompt, TextOptions
from turnout.server.text.stop import StopStrings
from turnout.server.text.tokenizer import Text

OPTION = "sampling.generation_config"


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
    with closing(Progress()) as progress:
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
    answer = OutputText(text, Prompt(ids, continues=continues), TextOptions(StopStrings(wanted.stop)))
    outputs = engine.generate([request])
    try:
        for output in outputs:
            yield _taken(answer, output).text
            if answer.finish:
                break
    finally:
        outputs.close()  # type: ignore[attr-defined]  # a generator


def _taken(answer: OutputText, output: Output) -> Delta:
    """What it adds. Raises ValueError when the engine gave the request up."""
    if output.finish is Finish.REFUSED:
        raise ValueError(f"the form of the answer can't be served: {output.error}")
    if output.finish is Finish.ERROR:
        raise ValueError(f"the engine failed on this request: {output.error}")
    return answer.push(output)


class Answer(NamedTuple):
    """One of those that were asked for."""

    text: str
    num_tokens: int
    logprob: float  # of all its tokens


def answers(
    engine: Engine, text: Text, ids: list[int], sampling: Sampling, wanted: SamplingConfig, *, continues: bool
) -> list[Answer]:
    """All `wanted.n` answers, best first. Raises ValueError when refused."""
    served, searching = ServedEngine(engine), wanted.use_beam_search
    num, name = wanted.n if searching else wanted.num_made, uuid.uuid4().hex
    sampling = replace(sampling, logprobs=0)  # they tell which answers are best
    names = tuple(f"{name}-{place}" for place in range(num))
    request = Request(names[0], list(ids), sampling)
    asked: list[Ask] = [*requests_of(ParallelSampling(request, names))]
    if searching:
        early: bool | Literal["never"] = "never" if wanted.early_stopping == "never" else bool(wanted.early_stopping)
        asked = [BeamSearch(request, names, wanted.num_made, wanted.length_penalty, early)]
    options, prompt = TextOptions(StopStrings(wanted.stop)), Prompt(ids, continues=continues)
    made = {name: OutputText(text, prompt, options) for name in names}
    collected = {name: Collected() for name in names}
    try:
        for one in asked:
            served.add(one)
        while not all(answer.finish for answer in made.values()):
            for output in served.step():
                answer = made[output.request_id]
                collected[output.request_id].add(_taken(answer, output))
                if answer.finish:
                    served.abort(output.request_id)  # where a stop string ended it
    finally:
        for one in asked:
            served.abort(one.id)
    best = list(made) if searching else sorted(made, key=lambda name: -made[name].mean_logprob)
    return [Answer(collected[name].text, made[name].num_tokens, made[name].logprob) for name in best[: wanted.n]]


def sampling_of(wanted: SamplingConfig, defaults: Values, text: Text, info: EngineInfo, num_prompt: int) -> Sampling:
    """What was asked for; else the default. `max_tokens` is cut to the context's rest."""
    rest = min(info.max_model_len, info.capacity + 1) - num_prompt
    return sampling_with(
        wanted,
        defaults,
        frozenset() if wanted.ignore_eos else text.eos_ids,
        info,
        seed=wanted.seed,
        max_tokens=min(wanted.max_tokens, rest) if rest > 0 else wanted.max_tokens,
        structured=wanted.structured,
    )
