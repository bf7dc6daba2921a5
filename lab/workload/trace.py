"""`workload=FILE`: requests from a file. What it holds is told from its first line, not from its name."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from turnout.core.types import Request
from turnout.lab.workload import formats, recorded
from turnout.lab.workload.arrivals import Arrival, in_order
from turnout.lab.workload.files import objects, opened, parsed

Lines = Iterator[tuple[Arrival, str]]


@dataclass
class TraceFile:
    """The requests of a file, perhaps gzipped. Raises ValueError with the file and the line for what can't be read."""

    path: str = ""
    num_requests: int | None = None  # the first so many; null: all
    speed: float = 1.0  # arrivals come so many times faster than recorded
    hash_block: int = 512  # tokens that one of `hash_ids` stands for

    def __post_init__(self) -> None:
        for name in ("num_requests", "speed", "hash_block"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"workload.{name} must be above 0, got {value}")
        self._skipped = 0

    def asked(self, factor: float, num_requests: int, seconds: float) -> float | None:
        return num_requests / seconds if seconds else None

    def notes(self) -> list[str]:
        skipped = f"{self.path}: left out, having no prompt or no answer: {self._skipped} requests"
        return [skipped] if self._skipped else []

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        self._skipped, first = 0, None
        for arrival in itertools.islice(in_order(self._lines()), self.num_requests):
            first = arrival.request.arrived if first is None else first
            arrival.request.arrived = (arrival.request.arrived - first) / (self.speed * factor)
            yield arrival

    def _lines(self) -> Lines:
        """By the shape of the first line. Raises ValueError naming the shapes there are."""
        if not self.path:
            raise ValueError("workload.path is empty: workload=FILE names the trace")
        with opened(self.path) as file:
            head = next((line.strip() for line in file if line.strip()), "")
        if head.startswith("{"):
            fields = parsed(head, f"{self.path}: line 1")
            if "turnout" in fields:
                return recorded.arrivals(self.path)
            if set(formats.MOONCAKE) & fields.keys():
                return self._parsed(objects(self.path), partial(formats.mooncake, block=self.hash_block))
        columns = [name.strip() for name in next(csv.reader([head]), [])]
        for names, parse in ((formats.AZURE, formats.azure), (formats.BURSTGPT, formats.burstgpt)):
            if set(names) <= set(columns):
                return self._parsed(_rows(self.path, names), parse)
        raise ValueError(
            f"{self.path}: line 1 is {head[:80]!r}, none of the shapes known: {','.join(formats.AZURE)} (Azure), "
            f"{','.join(formats.BURSTGPT)},… (BurstGPT), JSON lines with {', '.join(formats.MOONCAKE)} and hash_ids "
            f"(Mooncake), or what record=FILE wrote"
        )

    def _parsed(
        self, rows: Iterator[tuple[formats.Row, str]], parse: Callable[[formats.Row, int, str], Request | None]
    ) -> Lines:
        for count, (row, where) in enumerate(rows):
            request = parse(row, count, where)
            if request is None:
                self._skipped += 1
            else:
                yield Arrival(request), where


def _rows(path: str, names: tuple[str, ...]) -> Iterator[tuple[formats.Row, str]]:
    """The rows of a CSV file by column; each has the columns in `names`."""
    with opened(path) as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        for row in reader:
            where = f"{path}: line {reader.line_num}"
            if any(row[name] is None for name in names):
                raise ValueError(f"{where}: it has fewer fields than the first line")
            yield row, where
