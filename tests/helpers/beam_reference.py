"""Beam search written down plainly: every continuation of every beam, no cache, no engine. And a model whose whole memory
is the cache, with a distribution over its next token."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from turnout.core.types import Logprobs, Output, Request, Result, Sampling, Step
from turnout.server.engine.beam import ServedEngine
from turnout.server.engine.messages import BeamSearch
from turnout.testing.fake import TokenCacheRunner

NUM = 64  # ids that ever follow

After = Callable[[Sequence[int]], Sequence[float]]  # tokens -> the log-probability of each next one


class Answer(NamedTuple):
    tokens: list[int]
    total: float
    ends: bool


def plainly(after: After, asked: BeamSearch) -> list[Answer]:
    """The answers of a search, best first."""
    sampling, width, prompt = asked.request.sampling, asked.width, list(asked.request.tokens)
    live, pool = [Answer([], 0.0, False)], list[Answer]()

    def score(answer: Answer) -> float:
        return answer.total / len(answer.tokens) ** asked.length_penalty

    for length in range(1, sampling.max_tokens + 1):
        every = [
            Answer([*beam.tokens, token], beam.total + logprob, token in sampling.stop_ids)
            for beam in live
            for token, logprob in enumerate(after(prompt + beam.tokens))
            if not (token in sampling.stop_ids and length <= sampling.min_tokens)
        ]
        every.sort(key=lambda answer: -answer.total)
        last = length == sampling.max_tokens
        pool += [answer for answer in every[:width] if answer.ends or last]
        pool = sorted(pool, key=score, reverse=True)[:width]
        live = [answer for answer in every if not answer.ends][:width]
        if len(pool) == width:
            far = sampling.max_tokens if asked.early_stopping == "never" and asked.length_penalty > 0 else length
            if asked.early_stopping is True or live[0].total / far**asked.length_penalty <= score(pool[-1]):
                break
    return pool[: len(asked.answers)]


def asking(
    prompt: Sequence[int],
    width: int,
    num: int | None = None,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    name: str = "abc",
    **sampling: object,
) -> BeamSearch:
    """A search for `num` answers, `width` unless given, called abc, abc+1, ..."""
    names = tuple(name if place == 0 else f"{name}+{place}" for place in range(num or width))
    request = Request(name, list(prompt), Sampling(**sampling))  # type: ignore[arg-type]
    return BeamSearch(request, names, width, length_penalty, early_stopping)  # type: ignore[arg-type]


def found(beams: ServedEngine, *asked: BeamSearch | Request) -> dict[str, list[Output]]:
    """All that is told of what is asked, by id, the empty outputs left out."""
    told: dict[str, list[Output]] = {}
    for one in asked:
        beams.add(one)
    while beams.busy:
        for output in beams.step():
            told.setdefault(output.request_id, []).append(output)
    return told


def tokens_of(told: dict[str, list[Output]], asked: BeamSearch) -> list[list[int]]:
    return [[token for output in told[name] for token in output.tokens] for name in asked.answers]


@lru_cache(4096)
def _hashed(key: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    logits = np.random.default_rng(zlib.crc32(key)).standard_normal(NUM)
    return logits - np.log(np.exp(logits).sum())


def hashed(tokens: Sequence[int]) -> list[float]:
    """A distribution that any change of any token changes."""
    values: list[float] = _hashed(array("i", tokens).tobytes()).tolist()
    return values


class HashedRunner(TokenCacheRunner):
    """The likeliest tokens after what the request's blocks hold."""

    def run(self, step: Step) -> Result:
        plain = super().run(step)
        tokens, logprobs = [], {}
        size = self.cache.shape[1]
        for chunk in step.chunks:
            if not chunk.samples:
                continue
            request = chunk.request
            held = self.cache[np.array(request.blocks)].ravel()[: chunk.end]
            assert len(request.blocks) * size >= chunk.end
            values = _hashed(held.tobytes())
            order = np.argsort(-values, kind="stable")
            count = request.sampling.logprobs
            if count is not None:
                top = tuple((int(token), float(values[token])) for token in order[:count])
                logprobs[len(tokens)] = Logprobs(int(order[0]), float(values[order[0]]), 1, top)
            tokens.append(int(order[0]))
        return Result(tokens, logprobs, {}, plain.scores)
