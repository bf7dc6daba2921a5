"""Why a request took as long as it did: its account as data and as text, from a recording or a running engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from turnout.server.steplog.account import Account
from turnout.server.steplog.events import Aborted, Added, Event, Stepped, read
from turnout.server.steplog.pieces import DECODE, PREFILL, Piece, Record, Seen


def why(path: str | Path, name: str) -> list[dict[str, object]]:
    """The accounts of a recorded request, by its id or by the id its client knows; several where one call made several.

    Each is as `view` makes it. Raises ValueError when the recording has no such request, or is none.
    """
    account = _followed(path)
    found = account.find(name)
    if not found:
        some = ", ".join(list(account.ended | account.open)[:5])
        raise ValueError(f"{path} has no request {name!r}; it begins with {some or 'none at all'}")
    return [view(account, record, account.now) for record in found]


def _followed(path: str | Path) -> Account:
    account = Account(num_ended=2**62, most_pieces=None)
    for _ in follow(read(path), account):
        pass
    return account


def follow(events: Iterable[Event], account: Account) -> Iterator[Event]:
    """Pass the events on, each when `account` knows of it."""
    for event in events:
        if isinstance(event, Added):
            account.added(event.request)
        elif isinstance(event, Aborted):
            account.aborted(event.request_id, event.at)
        elif isinstance(event, Stepped):
            account.step(seen_of(event, account))
        yield event


def seen_of(step: Stepped, account: Account) -> Seen:
    """A recorded step as an account wants it."""
    special = account.special
    chunks = [chunk for chunk in step.chunks if chunk[0] in special]
    return Seen(
        step.began,
        step.ended,
        chunks,
        len(step.chunks),
        step.preempted,
        step.reasons,
        step.finished,
        lambda: {chunk[0] for chunk in step.chunks},
    )


def view(account: Account, record: Record, now: float) -> dict[str, object]:
    """A record as plain values. The pieces' seconds add up to `seconds`, the time from its arrival to its end or `now`."""
    pieces = account.pieces(record, now)
    until = record.ended_at if record.ended_at is not None else max(now, record.since)
    totals: dict[str, float] = {}
    for piece in pieces:
        totals[piece.what] = totals.get(piece.what, 0.0) + piece.seconds
    request, end = record.request, record.end
    first = record.first_token_at
    return {
        "id": record.id,
        "client_id": record.labels.get("request"),
        "state": end.why if end else record.what,
        "arrived": record.arrived,
        "seconds": until - record.arrived,
        "seconds_to_first_token": None if first is None else first - record.arrived,
        "prompt_tokens": record.num_prompt,
        "cached_tokens": end.num_cached if end else request.num_cached if request else None,
        "generated_tokens": end.num_generated if end else request.num_generated if request else None,
        "preemptions": end.num_preemptions if end else request.num_preemptions if request else None,
        "totals": totals,
        "pieces": [asdict(piece) for piece in pieces],
    }


def told(account: dict[str, object]) -> str:
    """What `view` made, for a terminal."""
    facts = [f"{account['prompt_tokens']} prompt tokens"]
    for key, what in (("cached_tokens", "cached"), ("generated_tokens", "generated"), ("preemptions", "preemptions")):
        if account[key] is not None:
            facts.append(f"{account[key]} {what}")
    first = account["seconds_to_first_token"]
    if first is not None:
        facts.append(f"first token after {_seconds(first)}")
    client = f" ({account['client_id']} for its client)" if account["client_id"] else ""
    lines = [
        f"{account['id']}{client}: {account['state']}, {_seconds(account['seconds'])} in all",
        f"  {', '.join(facts)}",
    ]
    pieces, arrived = account["pieces"], account["arrived"]
    assert isinstance(pieces, list) and isinstance(arrived, float | int)
    for values in pieces:
        piece = Piece(**values)
        lines.append(f"  at {piece.began - arrived:9.3f} s  {_seconds(piece.seconds):>10}  {_what(piece)}")
    totals = account["totals"]
    assert isinstance(totals, dict)
    lines.append("  together: " + ", ".join(f"{what} {_seconds(seconds)}" for what, seconds in totals.items()))
    return "\n".join(lines)


def _what(piece: Piece) -> str:
    text = piece.what
    if piece.what in (PREFILL, DECODE):
        chunks = "chunk" if piece.what == PREFILL else "step"
        text += f" in {piece.steps} {chunks}{'s' * (piece.steps != 1)}"
        details = [f"{_seconds(piece.seconds - piece.in_steps)} between steps"]
        if piece.what == DECODE:
            details.insert(0, f"{_seconds(piece.beside_prompts)} in steps that computed prompts too")
        text += f" ({', '.join(details)})"
    elif piece.reason:
        text += f": {piece.reason}"
    return text + (f" ({piece.times} times)" if piece.times > 1 else "")


def _seconds(value: object) -> str:
    assert isinstance(value, float | int)
    return f"{value:.3f} s"
