"""Workloads drawn from a seed. Lengths are in tokens, rates in requests a second.

Prompt lengths are lognormal with the stated mean and a sigma of 1 (long tails), answer lengths geometric; both are cut
at ten times their mean. Clients arrive as a Poisson process unless a workload says otherwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from turnout.core.types import Request
from turnout.lab.workload.arrivals import NO_LABELS, Arrival, prompt, sampling

CUT = 10  # times the mean


@dataclass
class Synthetic:
    """What all of them have. Raises ValueError naming the option."""

    num_requests: int = 1000
    rate: float | None = None  # requests a second; null: as many clients as seats, each asks again when answered
    seed: int = 0
    tenants: int = 1  # labels tenant=t0, t1, …; tenant k sends 1/(k+1) times as much as t0; 1: no label
    prompt: int = 200  # tokens, mean
    output: int = 100  # tokens, mean

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "seed" and value is not None and value <= 0:
                raise ValueError(f"workload.{name} must be above 0, got {value}")
        self._labels: list[Mapping[str, str]] = [{"tenant": f"t{i}"} for i in range(self.tenants)]
        self._shares = [1 / (i + 1) for i in range(self.tenants)]

    def asked(self, factor: float, num_requests: int, seconds: float) -> float | None:
        return None if self.rate is None else self.rate * factor

    def notes(self) -> list[str]:
        return []

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        """The same requests at every rate."""
        dice, gaps = random.Random(self.seed), random.Random(f"gaps of {self.seed}")
        drawn = (self.draw(dice, number) for number in range(self.num_requests))

        def ask(now: float) -> Arrival | None:
            request = next(drawn, None)
            if request is not None:
                request.arrived = now
            return None if request is None else Arrival(request, None, ask)

        if self.rate is None:
            yield from filter(None, (ask(0.0) for _ in range(min(seats, self.num_requests))))
            return
        now = 0.0
        for request in drawn:
            now += self.gap(gaps, self.rate * factor)
            request.arrived = now
            yield Arrival(request)

    def gap(self, dice: random.Random, rate: float) -> float:
        """Seconds before the next request."""
        return dice.expovariate(rate)

    def draw(self, dice: random.Random, number: int) -> Request:
        tokens, num_output = self.shape(dice, number)
        return Request(f"r{number}", tokens, sampling(num_output), labels=self.label(dice))

    def shape(self, dice: random.Random, number: int) -> tuple[list[int], int]:
        """Its prompt and how many tokens the answer has."""
        return prompt(number, lognormal(dice, self.prompt)), geometric(dice, self.output)

    def label(self, dice: random.Random) -> Mapping[str, str]:
        return dice.choices(self._labels, self._shares)[0] if self.tenants > 1 else NO_LABELS


def lognormal(dice: random.Random, mean: float, sigma: float = 1.0) -> int:
    """At least 1, at most CUT times the mean."""
    return max(1, min(round(dice.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), round(CUT * mean)))


def geometric(dice: random.Random, mean: float) -> int:
    """At least 1, at most CUT times the mean."""
    if mean <= 1.0:
        return 1
    return min(1 + int(math.log(1.0 - dice.random()) / math.log(1.0 - 1.0 / mean)), round(CUT * mean))


def needs_rate(workload: Synthetic) -> None:
    if workload.rate is None:
        raise ValueError("workload.rate must be given: this workload is about when its requests arrive")


@dataclass
class Chat(Synthetic):
    """Single questions of many people."""


@dataclass
class Poisson(Synthetic):
    """Every prompt and every answer is of one length, so that only the arrivals are random."""

    rate: float | None = 10.0
    prompt: int = 512
    output: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_rate(self)

    def shape(self, dice: random.Random, number: int) -> tuple[list[int], int]:
        return prompt(number, self.prompt), self.output


@dataclass
class Bursts(Synthetic):
    """Chat whose gaps between arrivals follow a gamma distribution, as found in BurstGPT (arXiv 2401.17644)."""

    rate: float | None = 10.0
    cv: float = 3.0  # standard deviation of the gaps, divided by their mean; 1: Poisson

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_rate(self)

    def gap(self, dice: random.Random, rate: float) -> float:
        shape = 1.0 / self.cv**2
        return dice.gammavariate(shape, 1.0 / (rate * shape))


@dataclass
class SharedPrefix(Synthetic):
    """Questions behind one of a few long instructions; popular ones are asked more often (Zipf)."""

    rate: float | None = 10.0
    prompt: int = 100  # after the prefix
    prefixes: int = 8
    prefix: int = 2000  # tokens, each of them

    def shape(self, dice: random.Random, number: int) -> tuple[list[int], int]:
        weights = [1 / (i + 1) for i in range(self.prefixes)]
        which = dice.choices(range(self.prefixes), weights)[0]
        tokens = prompt(self.num_requests + which, self.prefix) + prompt(number, lognormal(dice, self.prompt))
        return tokens, geometric(dice, self.output)


@dataclass
class LongDocuments(Synthetic):
    """Documents to be summed up: very long prompts, answers of a page."""

    num_requests: int = 200
    rate: float | None = 0.5
    prompt: int = 16_000
    output: int = 300

    def shape(self, dice: random.Random, number: int) -> tuple[list[int], int]:
        return prompt(number, lognormal(dice, self.prompt, 0.6)), geometric(dice, self.output)


@dataclass
class Mixed(Synthetic):
    """Chat with now and then a long document between: tenants `chat` (priority 0) and `documents` (priority 1)."""

    rate: float | None = 10.0
    documents: float = 0.05  # share of the requests
    document: int = 8000  # tokens, mean
    document_ttft: float = 10.0  # seconds until a document's answer should begin: its label `ttft_target`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tenants != 1:
            raise ValueError(f"workload.tenants must stay 1 for workload=mixed, which has its own, got {self.tenants}")
        self._labels = [{"tenant": "chat"}, {"tenant": "documents", "ttft_target": str(self.document_ttft)}]

    def draw(self, dice: random.Random, number: int) -> Request:
        kind = int(dice.random() < self.documents)
        length = lognormal(dice, self.document, 0.6) if kind else lognormal(dice, self.prompt)
        said = sampling(geometric(dice, self.output))
        return Request(f"r{number}", prompt(number, length), said, priority=kind, labels=self._labels[kind])


@dataclass
class Interference(Synthetic):
    """Clients whose answers are long, and a long prompt every now and then: tenants `streams` and `documents`.

    Each client asks again when it is answered; a document comes every `every` seconds until `num_requests` were asked.
    What the documents do to the streams' ITL is the question.
    """

    num_requests: int = 100  # of the streams
    output: int = 200
    streams: int = 4  # clients
    document: int = 4000  # tokens, each of them
    every: float = 5.0  # seconds

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, neutral in (("rate", None), ("tenants", 1)):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"workload.{name} does not go with workload=interference, whose load is workload.streams clients and a "
                    f"document every workload.every seconds"
                )

    def arrivals(self, factor: float, seats: int) -> Iterator[Arrival]:
        """`factor` brings documents so many times as often."""
        dice, asked = random.Random(self.seed), 0

        def ask(now: float) -> Arrival | None:
            nonlocal asked
            if asked == self.num_requests:
                return None
            asked += 1
            tokens, num_output = self.shape(dice, asked)
            labels = {"tenant": "streams"}
            return Arrival(Request(f"r{asked}", tokens, sampling(num_output), now, labels=labels), None, ask)

        yield from filter(None, (ask(0.0) for _ in range(self.streams)))
        number = 0
        while asked < self.num_requests:
            number += 1
            tokens, labels = prompt(self.num_requests + number, self.document), {"tenant": "documents"}
            at = number * self.every / factor
            yield Arrival(Request(f"d{number}", tokens, sampling(8), at, priority=1, labels=labels))
