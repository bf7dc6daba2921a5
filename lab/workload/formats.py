"""The public trace shapes, each as a function from a row to a request.

azure      TIMESTAMP,ContextTokens,GeneratedTokens          AzurePublicDataset, 2023 and 2024; a date and time
burstgpt   Timestamp,Model,Request tokens,Response tokens…  seconds; a failed request has 0 response tokens
mooncake   {"timestamp", "input_length", "output_length", "hash_ids"}   milliseconds; one id per block of the prompt,
           equal ids mean an equal prefix up to and with that block

They give lengths, no text: a prompt is made up so that it begins like no other, unless its block ids say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from turnout.core.types import Request
from turnout.lab.workload.arrivals import VOCAB_SIZE, prompt, sampling
from turnout.lab.workload.files import number, whole

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens")
MOONCAKE = ("timestamp", "input_length", "output_length")

Row = Mapping[str, Any]


def azure(row: Row, count: int, where: str) -> Request | None:
    """None: nothing was computed for the request."""
    prompt_len = whole(row["ContextTokens"], "ContextTokens", where)
    num_output = whole(row["GeneratedTokens"], "GeneratedTokens", where)
    at = _moment(row["TIMESTAMP"], where)
    return _request(count, prompt_len, num_output, at, {})


def burstgpt(row: Row, count: int, where: str) -> Request | None:
    prompt_len = whole(row["Request tokens"], "Request tokens", where)
    num_output = whole(row["Response tokens"], "Response tokens", where)
    at = number(row["Timestamp"], "Timestamp", where)
    labels = {"tenant": str(row["Model"]), "model": str(row["Model"])}
    if row.get("Log Type"):
        labels["log"] = str(row["Log Type"])
    if row.get("Session ID"):
        labels["session"] = str(row["Session ID"])
    return _request(count, prompt_len, num_output, at, labels)


def mooncake(row: Row, count: int, where: str, block: int) -> Request | None:
    for name in MOONCAKE:
        if name not in row:
            raise ValueError(f"{where}: {name} is missing")
    prompt_len = whole(row["input_length"], "input_length", where)
    num_output = whole(row["output_length"], "output_length", where)
    at = number(row["timestamp"], "timestamp", where) / 1000.0
    ids = row.get("hash_ids")
    request = _request(count, prompt_len, num_output, at, {})
    if request is None or not ids:
        return request
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids) or len(ids) * block < prompt_len:
        raise ValueError(
            f"{where}: hash_ids must be whole numbers, one per {block} tokens of input_length={prompt_len}; "
            f"workload.hash_block says how many tokens one stands for"
        )
    tokens = [1 + i % (VOCAB_SIZE // 2) for i in ids for _ in range(block)]
    request.tokens[:] = tokens[:prompt_len]
    return request


def _request(count: int, prompt_len: int, num_output: int, at: float, labels: dict[str, str]) -> Request | None:
    if not (prompt_len and num_output):
        return None
    tokens = prompt(VOCAB_SIZE // 2 + count, prompt_len)  # the upper half: block ids are in the lower one
    return Request(f"r{count}", tokens, sampling(num_output), at, labels=labels)


def _moment(text: str, where: str) -> float:
    """Seconds since 1970 of an ISO date and time; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"{where}: TIMESTAMP must be like 2023-11-16 18:17:03.9799600, got {text!r}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
