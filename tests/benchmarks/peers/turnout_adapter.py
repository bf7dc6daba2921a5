"""Turnout as one of the peers of an offline comparison: the engine in this process, greedy, end tokens ignored.

A comparison driver imports it as a module with `SUPPORTS`, `versions()` and `Engine(model, **options).run(requests)`;
a request has `prompt` (token ids), `n` (exact output length) and `at` (arrival in seconds); an answer has `tokens`, `t`
(when each became visible) and `start`. Every option is a Hydra override with its value: `scheduler=chunked_prefill`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

SUPPORTS = {"w1", "w2", "w3", "w4", "check"}


@dataclass
class Out:
    tokens: list[int] = field(default_factory=list)
    t: list[float] = field(default_factory=list)
    start: float = 0.0


def versions() -> dict[str, str]:
    from turnout.compose import plugins

    return plugins.versions()


class Engine:
    """Composed by overrides on `turnout serve`'s own configuration."""

    def __init__(self, model: str, threads: str = "2", **overrides: str) -> None:
        import torch
        from hydra import compose, initialize_config_module

        import turnout.server.config  # noqa: F401  stores the schema of `serve`
        from turnout.compose import plugins
        from turnout.compose.build import build_engine
        from turnout.compose.config import resolve

        torch.set_num_threads(int(threads))
        plugins.load()
        chosen = [f"{key}={value}" for key, value in overrides.items()]
        with initialize_config_module("turnout.conf", version_base=None):
            composed = compose("serve", [f"model={model}", "blocks.prefix_cache=false", *chosen])
        self.engine = build_engine(resolve(composed))
        self.served = 0

    def run(self, requests: list[Any]) -> list[Out]:
        from turnout.core import Request, Sampling

        outs, began = [Out() for _ in requests], time.perf_counter()
        due = sorted(range(len(requests)), key=lambda i: requests[i].at)
        open_ids: dict[str, int] = {}
        while due or open_ids:
            now = time.perf_counter() - began
            while due and requests[due[0]].at <= now:
                index = due.pop(0)
                self.served += 1
                name, asked = f"r{self.served}", requests[index]
                self.engine.add(Request(name, list(asked.prompt), Sampling(temperature=0, max_tokens=asked.n)))
                open_ids[name], outs[index].start = index, now
            if not open_ids:
                time.sleep(max(0.0, requests[due[0]].at - now))
                continue
            for output in self.engine.step():
                out = outs[open_ids[output.request_id]]
                out.tokens += output.tokens
                out.t += [time.perf_counter() - began] * len(output.tokens)
                if output.finish:
                    del open_ids[output.request_id]
        return outs
