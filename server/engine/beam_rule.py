"""The rule of beam search, that of transformers' `generate(num_beams=width)`. It computes nothing and knows no engine.

A beam's total is the sum of its tokens' raw log-probabilities. In round t every live beam, at first the empty one, is
continued by every token, stop ids left out while t <= min_tokens, and the continuations are ranked by their totals. Of
the `width` best, those that end in a stop id, in round max_tokens all of them, are finished, with the score
total / t ** length_penalty; of all that are finished the `width` best scores stay. The `width` best that do not end live
on. The search is over after round max_tokens; and after a round with `width` finished ones if `early_stopping` is True,
or else if the best live beam's total / u ** length_penalty is no better than the worst of them: u is t, or max_tokens
with "never" and a length_penalty above 0. Of equals the one that extends the better beam wins, then the likelier token,
then the smaller id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from turnout.core.types import Logprobs
from turnout.server.engine.messages import BeamSearch

IMPOSSIBLE = -9999.0  # the log-probability of a token that may not follow
Tops = Sequence[tuple[int, float]]  # (token, log-probability), best first


class Beam(NamedTuple):
    """The beginning of an answer: the beam it extends, and by which token. The first one is empty."""

    before: Beam | None = None
    mark: Logprobs | None = None
    total: float = 0.0

    @property
    def marks(self) -> tuple[Logprobs, ...]:
        """One for each token, first to last."""
        found: list[Logprobs] = []
        beam = self
        while beam.before is not None and beam.mark is not None:
            found.append(beam.mark)
            beam = beam.before
        return tuple(reversed(found))


class Finished(NamedTuple):
    """An answer."""

    score: float
    beam: Beam


class Search:
    """A search, round by round."""

    def __init__(self, asked: BeamSearch) -> None:
        self._asked, self._sampling = asked, asked.request.sampling
        self._length = 0  # tokens of the live beams
        self.live = [Beam()]  # best first
        self.finished: list[Finished] = []  # best first

    @property
    def num_tops(self) -> int:
        """So many tops of every live beam decide a round: the `width` likeliest that do not end are among them."""
        return self._asked.width + len(self._sampling.stop_ids)

    def advance(self, found: Sequence[Tops]) -> list[int]:
        """A round, given the likeliest tokens after each live beam. Returns, for each beam that lives on, the place of
        the one it extends; nothing when the search is over."""
        asked, sampling = self._asked, self._sampling
        self._length += 1
        last, scale = self._length == sampling.max_tokens, self._length**asked.length_penalty
        best: list[tuple[int, Beam]] = []
        for standing, (total, place, rank) in enumerate(self._ranked(found)):
            if standing >= asked.width and (last or len(best) == asked.width):
                break
            final = last or found[place][rank][0] in sampling.stop_ids
            if final and standing < asked.width:
                self.finished.append(Finished(total / scale, self._extended(place, found[place], rank, total)))
            elif not final and len(best) < asked.width:
                best.append((place, self._extended(place, found[place], rank, total)))
        self.finished = sorted(self.finished, key=lambda answer: -answer.score)[: asked.width]
        self.live = [beam for _, beam in best]
        return [] if last or self._settled() else [place for place, _ in best]

    def _ranked(self, found: Sequence[Tops], *, early: bool = False) -> list[tuple[float, int, int]]:
        """Every continuation that counts, best first: its total, whom it extends, the rank of its token there. `early`:
        min_tokens does not count."""
        banned = self._sampling.stop_ids if self._length <= self._sampling.min_tokens and not early else ()
        continuations = [
            (beam.total + logprob, place, rank)
            for place, (beam, tops) in enumerate(zip(self.live, found, strict=True))
            for rank, (token, logprob) in enumerate(tops)
            if token not in banned and logprob > IMPOSSIBLE
        ]
        if not continuations and banned:  # the form of the answers lets them end only: that counts for more
            return self._ranked(found, early=True)
        return sorted(continuations, key=lambda continuation: -continuation[0])

    def _extended(self, place: int, tops: Tops, rank: int, total: float) -> Beam:
        token, logprob = tops[rank]
        above = sum(1 for _, other in tops[:rank] if other > logprob)
        mark = Logprobs(token, logprob, above + 1, tuple(tops[: self._sampling.logprobs or 0]))
        return Beam(self.live[place], mark, total)

    def _settled(self) -> bool:
        """Whether the finished answers are taken to be the best."""
        asked = self._asked
        if not self.live:
            return True
        if len(self.finished) < asked.width:
            return False
        if asked.early_stopping is True:
            return True
        far = asked.early_stopping == "never" and asked.length_penalty > 0
        hope = self.live[0].total / (self._sampling.max_tokens if far else self._length) ** asked.length_penalty
        return hope <= self.finished[-1].score
