"""Parallel sampling: the requests that give several answers to one prompt. It knows no text and no HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from turnout.core.types import Request, Sampling
from turnout.server.engine.messages import ParallelSampling


def requests_of(asked: ParallelSampling) -> Iterator[Request]:
    """A request for each answer, in order.

    The first computes and scores the prompt, the others are its children: they begin when it has, and share its blocks.
    With a seed each has its own, seed + place.
    """
    first = asked.request
    yield first
    prompt = first.tokens[: first.num_prompt]
    for place, name in enumerate(asked.answers[1:], 1):
        yield Request(
            name,
            list(prompt),
            _sampling(first.sampling, place),
            priority=first.priority,
            labels=first.labels,
            salt=first.salt,
            parent=first.id,
        )


def _sampling(sampling: Sampling, place: int) -> Sampling:
    seed = None if sampling.seed is None else sampling.seed + place
    if seed is not None and seed >= 2**64:
        seed -= 2**64
    return replace(sampling, seed=seed, prompt_logprobs=None)
