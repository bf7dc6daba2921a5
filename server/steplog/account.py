"""Where every second of a request went: from its arrival to its end, piece after piece, without a gap.

    arrived ─ queued ─ queued ─ prefill ─ left out ─ prefill ─ decode ─ preempted ─ prefill ─ decode ─ ended
              (behind   (out of  (3 chunks)                             (recompute)
              others)    blocks)

It is fed with what happens in steps, live or from a recording. A step is cheap: of its chunks it wants only those of
requests in `special`, so a request that just decodes costs nothing until something else happens to it. Who waits
without a reason of its own waits behind others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from turnout.core.types import Request
from turnout.server.steplog.events import Finished
from turnout.server.steplog.pieces import (
    DECODE,
    IDLE,
    LEFT_OUT,
    NEXT_STEP,
    OTHERS,
    PARENT,
    PREEMPTED,
    PREFILL,
    QUEUED,
    VARIOUS,
    Load,
    Piece,
    Record,
    Seen,
)


class Account:
    """Keeps the records of open requests and of the last `num_ended` that ended.

    `most_pieces` bounds what is kept of one request; None: everything. `on_piece` hears of each piece
    and when it ended, `on_end` of each record that is complete.
    """

    def __init__(
        self,
        num_ended: int = 1000,
        most_pieces: int | None = 100,
        on_piece: Callable[[Record, Piece, float], None] | None = None,
        on_end: Callable[[Record], None] | None = None,
    ) -> None:
        self.open: dict[str, Record] = {}
        self.ended: OrderedDict[str, Record] = OrderedDict()
        self.special: dict[str, Record] = {}  # open, and not just decoding
        self.now = 0.0  # of the last thing that happened
        self._num_ended, self._most_pieces, self._on_piece, self._on_end = num_ended, most_pieces, on_piece, on_end
        self._counts = (0, 0.0, 0.0)  # steps, their seconds, of these in steps with a prompt
        self._num_computing = 0
        self._fresh: list[Record] = []  # came since the last step
        self._explained: dict[str, Record] = {}  # wait for a reason that the last step gave
        self._children: dict[str, list[Record]] = {}  # by parent

    def added(self, request: Request, *, live: bool = False) -> Record:
        """A request was accepted. `live`: the request itself will say how far it is."""
        record = Record(
            request.id,
            request.arrived,
            request.num_prompt,
            request.labels,
            request if live else None,
            since=request.arrived,
            mark=self._counts,
        )
        self.open[request.id] = self.special[request.id] = record
        parent = None if request.parent is None else self.open.get(request.parent)
        if parent is not None and parent.first_token_at is None:
            record.reason = PARENT
            self._children.setdefault(parent.id, []).append(record)
        else:
            self._fresh.append(record)
        return record

    def aborted(self, request_id: str, at: float, end: Finished | None = None) -> None:
        """A request was ended between two steps."""
        record = self.open.get(request_id)
        if record is not None:
            self._end(record, end or Finished(request_id, "abort", 0, 0, 0), at)

    def step(self, seen: Seen) -> Load:
        """A step was computed, or failed."""
        began, special = seen.began, self.special
        for record in self._fresh:
            if record.reason == NEXT_STEP and record.ended_at is None:
                self._turn(record, QUEUED, OTHERS, began)
        self._fresh.clear()
        for rid, how in seen.preempted:
            if rid in self.open:
                special[rid] = self.open[rid]
                self._turn(self.open[rid], PREEMPTED[how], seen.reasons.get(rid, OTHERS), began)
        num_prefills = prefill_tokens = 0
        failed = {end.request_id for end in seen.finished if end.why == "error"}
        sampled = []
        for rid, start, count, samples in seen.chunks:
            record = special[rid]
            if not record.computes:
                decodes = count == 1 and samples and start >= record.num_prompt
                self._turn(record, DECODE if decodes else PREFILL, "", began)
            if record.what == PREFILL:
                num_prefills += 1
                prefill_tokens += count
            if samples and rid not in failed:
                sampled.append(record)
        if seen.num_chunks < self._num_computing:
            self._leave_out(seen)
        self._explain(seen)
        steps, seconds, beside = self._counts
        lasted = seen.ended - began
        self._counts = (steps + 1, seconds + lasted, beside + (lasted if num_prefills else 0.0))
        for record in sampled:
            self._sampled(record, seen.ended)
        for end in seen.finished:
            if end.request_id in self.open:
                self._end(self.open[end.request_id], end, seen.ended)
        self.now = seen.ended
        return Load(prefill_tokens, seen.num_chunks - num_prefills)

    def pieces(self, record: Record, now: float) -> list[Piece]:
        """The record's pieces up to `now`; their seconds add up to its time."""
        if record.ended_at is not None:
            return record.pieces
        return [*record.pieces, self._piece(record, max(now, record.since))]

    def find(self, name: str) -> list[Record]:
        """Records of a request by its id; else those whose label `request` is `name`, as a client knows it."""
        for records in (self.open, self.ended):
            if name in records:
                return [records[name]]
        known = {name, name.partition("-")[2]} - {""}  # a client reads it as cmpl-NAME
        return [r for r in (*self.ended.values(), *self.open.values()) if r.labels.get("request") in known]

    def _leave_out(self, seen: Seen) -> None:
        """Fewer requests than run were in the step: find those that were not."""
        there = seen.everybody()
        for rid, record in self.open.items():
            if record.computes and rid not in there:
                self.special[rid] = record
                self._turn(record, IDLE, seen.reasons.get(rid, LEFT_OUT), seen.began)
                self._explained[rid] = record

    def _explain(self, seen: Seen) -> None:
        """Who waits for a reason of its own; who did so up to now waits behind others again."""
        before, self._explained = self._explained, {}
        for rid, reason in seen.reasons.items():
            record = self.special.get(rid)
            if record is not None and not record.computes:
                self._turn(record, record.what, reason, seen.began)
                self._explained[rid] = record
        for rid, record in before.items():
            if rid not in self._explained and rid in self.special and not record.computes:
                default = LEFT_OUT if record.what == IDLE else OTHERS
                self._turn(record, record.what, default, seen.began)

    def _sampled(self, record: Record, at: float) -> None:
        self._turn(record, DECODE, "", at)
        del self.special[record.id]
        if record.first_token_at is None:
            record.first_token_at = at
            self._bear(record, at)

    def _bear(self, parent: Record, at: float) -> None:
        """Those that waited for `parent` wait in line from now on."""
        for child in self._children.pop(parent.id, ()):
            if child.ended_at is None:
                self._turn(child, QUEUED, OTHERS, at)

    def _turn(self, record: Record, what: str, reason: str, at: float) -> None:
        """From now on its time goes elsewhere."""
        if record.what == what and _head(record.reason) == _head(reason):
            record.reason = reason
            return
        at = max(at, record.since)
        self._num_computing += (what in (PREFILL, DECODE)) - record.computes
        self._keep(record, at)
        record.what, record.reason, record.since, record.mark = what, reason, at, self._counts

    def _keep(self, record: Record, at: float) -> None:
        """Close the piece under way."""
        piece = self._piece(record, at)
        if not piece.seconds and not piece.steps:
            return
        if self._on_piece is not None:
            self._on_piece(record, piece, at)
        pieces = record.pieces
        if self._most_pieces is not None and len(pieces) >= self._most_pieces:
            same = [p for p in pieces if p.what == piece.what]
            alike = next((p for p in same if _head(p.reason) == _head(piece.reason)), None)
            if alike is None and same:
                alike, same[-1].reason = same[-1], VARIOUS
            if alike is not None:
                alike.add(piece)
                return
        pieces.append(piece)

    def _piece(self, record: Record, at: float) -> Piece:
        steps, seconds, beside = (now - then for now, then in zip(self._counts, record.mark, strict=True))
        return Piece(record.what, record.reason, record.since, at - record.since, int(steps), seconds, beside)

    def _end(self, record: Record, end: Finished, at: float) -> None:
        at = self.now = max(at, record.since)
        self._keep(record, at)
        self._num_computing -= record.computes
        record.ended_at, record.end, record.request = at, end, None
        del self.open[record.id]
        self.special.pop(record.id, None)
        self._explained.pop(record.id, None)
        self._bear(record, at)
        if self._on_end is not None:
            self._on_end(record)
        self.ended[record.id] = record
        while len(self.ended) > self._num_ended:
            self.ended.popitem(last=False)


def _head(reason: str) -> str:
    """What makes two reasons the same: the text up to the details."""
    return reason.partition(":")[0]
