"""Reading a trace's lines with their numbers: every error names the file and the line."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

GZIP = b"\x1f\x8b"


def opened(path: str) -> TextIO:
    """The file as text, unpacked if it is gzipped. Raises ValueError when it can't be opened."""
    try:
        with Path(path).open("rb") as file:
            packed = file.read(2) == GZIP
        binary = gzip.open(path, "rb") if packed else Path(path).open("rb")  # noqa: SIM115  closed by who reads it
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    return io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline="")


def objects(path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The JSON object of each line that is not empty, and the line's name."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}: line {number}"
                yield parsed(line, where), where


def parsed(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if isinstance(found, dict):
        return found
    raise ValueError(f"{where}: a JSON object is expected, got {line.strip()[:60]}")


def whole(value: object, name: str, where: str, least: int = 0) -> int:
    """A whole number, given as a number or as text."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.lstrip("-").isdigit() else _float(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < least:
        raise ValueError(f"{where}: {name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def number(value: object, name: str, where: str) -> float:
    """A finite number that is not negative, given as a number or as text."""
    if isinstance(value, str):
        value = _float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < float("inf"):
        raise ValueError(f"{where}: {name} must be a number that is not negative, got {value!r}")
    return float(value)


def _float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
