"""Requests and step times of a run recorded with `record=FILE`: prompts, arrivals, labels and every token are real.

A request says as many tokens as the recording shows, so one that was aborted ends where it was. Each is held back until
the recording has its end: what is in memory is what was open at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from turnout.core.types import Chunk, Request
from turnout.lab.workload.arrivals import Arrival, sampling
from turnout.lab.workload.files import opened
from turnout.lab.workload.work import Work, work_of
from turnout.server.steplog.events import Aborted, Added, Event, Stepped, parse

ENOUGH = 50  # steps


def events(path: str) -> Iterator[Event]:
    """The recording, which may be gzipped."""
    with opened(path) as file:
        yield from parse(file, path)


def arrivals(path: str) -> Iterator[tuple[Arrival, str]]:
    """In the order they were recorded, each with the name of its place."""
    open_: dict[str, list[int]] = {}  # what each request has said so far
    held: deque[tuple[Request, list[int]]] = deque()
    for event in events(path):
        if isinstance(event, Added):
            said: list[int] = []
            open_[event.request.id] = said
            held.append((event.request, said))
        else:
            for request_id in _ended(event, open_):
                open_.pop(request_id, None)
        while held and held[0][0].id not in open_:
            yield _arrival(*held.popleft(), path)
    while held:
        yield _arrival(*held.popleft(), path)


def _ended(event: Event, open_: dict[str, list[int]]) -> list[str]:
    """Note what an event says of the open requests; the ids of those it ends."""
    if isinstance(event, Aborted):
        return [event.request_id]
    if not isinstance(event, Stepped):
        return []
    sampled = [request_id for request_id, _, _, samples in event.chunks if samples]
    for request_id, token in zip(sampled, event.tokens, strict=False):  # a step that failed said nothing
        if request_id in open_:
            open_[request_id].append(token)
    return [end.request_id for end in event.finished]


def _arrival(recorded: Request, said: list[int], path: str) -> tuple[Arrival, str]:
    request = Request(
        recorded.id,
        recorded.tokens,
        sampling(len(said)),
        recorded.arrived,
        recorded.priority,
        recorded.labels,
        recorded.salt,
        recorded.parent,
    )
    return Arrival(request, said), f"{path}: request {recorded.id}"


def steps(path: str) -> tuple[list[Work], np.ndarray]:
    """The work and the seconds [N] of every step that computed something, up to the next step of a busy engine.

    Raises ValueError when there are too few to learn from.
    """
    works: list[Work] = []
    took: list[float] = []
    open_end: Stepped | None = None  # the step before, if its engine had more to do: the next one ends its time
    somebody = Request("", [0])
    for event in events(path):
        if not isinstance(event, Stepped):
            continue
        if open_end is not None:
            took[-1] = event.began - open_end.began
        open_end = None
        if event.chunks and event.error is None and event.ended > event.began:
            chunks = [Chunk(somebody, start, count, samples) for _, start, count, samples in event.chunks]
            works.append(work_of(chunks, event.swap_out + event.swap_in, event.copies))
            took.append(event.ended - event.began)
            open_end = event if event.running else None
    if len(works) < ENOUGH:
        raise ValueError(f"latency.log={path} has {len(works)} steps that computed something; {ENOUGH} are needed")
    return works, np.array(took)
