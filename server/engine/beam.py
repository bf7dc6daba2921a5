"""Beam search over an engine that knows no beams: a beam is a request for one token that forks the one it extends.

    abc ──┬─▶ abc/1.0 ──┬─▶ abc/2.0      id / tokens before . place, the best beam first
          │             └─▶ abc/2.1      A request keeps its blocks after its token, until those that extend it have
          └─▶ abc/1.1 ────▶ abc/2.2      theirs: full blocks are shared by all, one that is part-full is copied.

Where room is short the engine takes back what is kept, and a request that finds nothing to fork computes its tokens
again: the answers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from turnout.core.engine import Engine
from turnout.core.types import EngineInfo, Finish, Output, Request, Sampling, Stats, Timing
from turnout.server.engine.beam_rule import Search, Tops
from turnout.server.engine.messages import Ask, BeamSearch
from turnout.server.steplog.observe import Observers

OF_THE_PROMPT = {"pin"}  # labels that speak of a request's prompt: a beam's is not what the client sent


class Group:
    """A search on its way through the engine."""

    def __init__(self, asked: BeamSearch, root: Request, search: Search) -> None:
        self.asked, self.root, self.search = asked, root, search
        self.requests = [root]  # of this round, in the order of the live beams
        self.extended: list[Request] = []  # those of the round before, as far as somebody extends them
        self.found: dict[str, Tops] = {}  # by request id: what this round has told
        self.began: Timing | None = None  # the first round's

    def next_round(self, places: Sequence[int]) -> list[Request]:
        """Requests for the beams that live on, each a child of the one at its place."""
        labels = {name: value for name, value in self.root.labels.items() if name not in OF_THE_PROMPT}
        root, parents, size = self.root, self.requests, len(self.root.tokens) - 1  # the root's own token never counts
        length = len(parents[0].tokens) - size
        going_on = length + 1 < self.asked.request.sampling.max_tokens
        self.requests = [
            Request(
                f"{root.id}/{length}.{index}",
                parents[place].tokens[:-1] + [beam.mark.token],
                Sampling(
                    temperature=0.0,
                    max_tokens=1,
                    logprobs=self.search.num_tops,
                    **_form(self.asked.request.sampling),
                ),
                arrived=root.arrived,
                priority=root.priority,
                labels=labels,
                salt=root.salt,
                parent=parents[place].id,
                keep=going_on,
                num_begun=length,
            )
            for index, (place, beam) in enumerate(zip(places, self.search.live, strict=True))
            if beam.mark is not None
        ]
        self.found = {}
        return self.requests


def _form(sampling: Sampling) -> dict[str, Any]:
    """What a beam's own sampling says of the answer's form. Its stop tokens are those that may end it."""
    if sampling.structured is None:
        return {}
    return {"structured": sampling.structured, "fitting_tops": True, "stop_ids": sampling.stop_ids}


class ServedEngine:
    """The engine as its own process runs it: beam searches beside plain requests, and answers to questions about both."""

    def __init__(self, engine: Engine, observers: Observers | None = None) -> None:
        self.engine, self._observers = engine, observers
        if observers is not None:
            observers.begin(engine.info)
        self._groups: dict[str, Group] = {}  # by the id that was asked under
        self._owners: dict[str, Group] = {}  # by the id of each request on its way

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def stats(self) -> Stats:
        return self.engine.stats

    @property
    def busy(self) -> bool:
        """A search has a request in the engine until it is over."""
        return self.engine.busy

    @property
    def pause(self) -> float:
        """Seconds in which another step would find nothing to do."""
        return self.engine.pause

    def add(self, asked: Ask) -> None:
        """Queue a request or a search. Raises ValueError for one that could never run, naming the limit."""
        if asked.id in self._groups:
            raise ValueError(f"request id {asked.id!r} is already in use")
        if isinstance(asked, Request):
            return self.engine.add(asked)
        request, sampling, search = asked.request, asked.request.sampling, Search(asked)
        self._check(asked, search)
        root = Request(
            request.id,
            list(request.tokens),
            Sampling(
                temperature=0.0,
                max_tokens=min(1, sampling.max_tokens),
                logprobs=search.num_tops,
                prompt_logprobs=sampling.prompt_logprobs,
                **_form(sampling),
            ),
            arrived=request.arrived,
            priority=request.priority,
            labels=request.labels,
            salt=request.salt,
            keep=sampling.max_tokens > 1,
        )
        self.engine.add(root)
        self._groups[root.id] = self._owners[root.id] = Group(asked, root, search)

    def abort(self, request_id: str) -> None:
        """End a request or a search. Unknown ids are ignored."""
        group = self._groups.get(request_id)
        if group is None:
            self.engine.abort(request_id)
        else:
            self._end(group)

    def step(self) -> list[Output]:
        """A step of the engine. Of a search it tells prompt log-probabilities as they come, the answers at its end."""
        try:
            outputs = self.engine.step()
        except Exception:
            if self._observers is not None:
                self._observers.failed()
            raise
        return self._shown(outputs)

    def fail(self, reason: str) -> list[Output]:
        """End every request and search with this error."""
        return self._shown(self.engine.fail(reason))

    def overdue(self, seconds: float) -> str | None:
        """Why a step that has been under way for so long must be taken to hang. From any thread."""
        return self.engine.overdue(seconds)

    def _shown(self, outputs: list[Output]) -> list[Output]:
        """What the engine's outputs are to those who asked."""
        if not self._owners:
            return outputs
        shown: list[Output] = []
        owners = self._owners.copy()
        for output in outputs:
            group = owners.get(output.request_id)
            if group is None:
                shown.append(output)
            elif group.asked.id in self._groups:  # else another of its requests failed in this step
                shown += self._take(group, output)
        return shown

    def answer(self, topic: str, name: str) -> object:
        """See `Observers.answer`."""
        assert self._observers is not None
        return self._observers.answer(topic, name, self.stats)

    def close(self) -> None:
        """Write what is left of a recording."""
        if self._observers is not None:
            self._observers.close()

    def _check(self, asked: BeamSearch, search: Search) -> None:
        info, request, sampling = self.engine.info, asked.request, asked.request.sampling
        total = len(request.tokens) + sampling.max_tokens
        longest = min(info.max_model_len, info.capacity + 1)  # the last token is never fed back
        if total > longest:
            raise ValueError(
                f"the prompt has {len(request.tokens)} tokens and max_tokens is {sampling.max_tokens}: together {total}, "
                f"but the context length is {info.max_model_len} and the key/value cache holds {info.capacity}"
            )
        if sampling.structured is not None and not sampling.stop_ids:
            raise ValueError("a beam of a given form ends in a stop token, and there is none: leave ignore_eos out")
        if search.num_tops > info.vocab_size:
            raise ValueError(
                f"a beam width of {asked.width} and {len(sampling.stop_ids)} stop ids are more than the model's "
                f"{info.vocab_size} tokens"
            )

    def _take(self, group: Group, output: Output) -> list[Output]:
        """One of a search's requests got something."""
        asked = group.asked
        shown: list[Output] = []
        if output.prompt_logprobs:
            shown.append(Output(asked.id, prompt_logprobs=output.prompt_logprobs, num_cached=output.num_cached))
        if output.finish is None:
            return shown
        group.began = group.began or output.timing
        if output.finish is Finish.ERROR or not output.tokens:  # none: max_tokens is 0
            self._end(group)
            return shown + [output._replace(request_id=name, prompt_logprobs=()) for name in asked.answers]
        del self._owners[output.request_id]
        group.found[output.request_id] = output.logprobs[0].top
        if len(group.found) == len(group.requests):
            shown += self._advance(group, output)
        return shown

    def _advance(self, group: Group, output: Output) -> list[Output]:
        """A round is over: ask for the next one, or give the answers."""
        done = group.requests
        places = group.search.advance([group.found[request.id] for request in done])
        if not places:
            self._end(group)
            return list(self._answers(group, output))
        self._drop(group.extended)
        group.extended = [request for place, request in enumerate(done) if place in places]
        self._drop(request for place, request in enumerate(done) if place not in places)
        following = group.next_round(places)
        for request in reversed(following):  # each goes to the front of the queue
            self.engine.add(request)
            self._owners[request.id] = group
        self.engine.stats.num_running += len(following)  # a search between two rounds is not idle
        return []

    def _answers(self, group: Group, output: Output) -> Iterator[Output]:
        sampling, began, ended = group.asked.request.sampling, group.began, output.timing
        timing = None
        if began is not None and ended is not None:
            timing = Timing(began.arrived, began.scheduled, began.first_token, ended.finished)
        for name, (_, beam) in zip(group.asked.answers, group.search.finished, strict=False):
            marks = beam.marks
            tokens = tuple(mark.token for mark in marks)
            finish = Finish.STOP if tokens[-1] in sampling.stop_ids else Finish.LENGTH
            shown = () if sampling.logprobs is None else marks
            yield Output(name, tokens, finish, shown, num_cached=group.root.num_cached, timing=timing)
        found, names = len(group.search.finished), group.asked.answers
        for name in names[found:]:  # of a form that few answers have
            yield Output(name, (), Finish.REFUSED, error=f"only {found} answers have it, {len(names)} were asked for")

    def _end(self, group: Group) -> None:
        """Take everything of a search out of the engine."""
        del self._groups[group.asked.id]
        for request in group.requests:
            self._owners.pop(request.id, None)
            self.engine.abort(request.id)
        self._drop((*group.requests, *group.extended))

    def _drop(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.engine.drop(request.id)
