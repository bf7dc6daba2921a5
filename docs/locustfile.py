"""A load on an OpenAI-compatible server for users of Locust (https://locust.io), with TTFT, TPOT and failures that count as such.

    locust -f docs/locustfile.py --host http://127.0.0.1:8000 --headless --users 8 --spawn-rate 4 --run-time 60s

    MODEL         name in requests; default: the first that the server lists
    PROMPT_WORDS  words of a prompt, mean; default 100
    MAX_TOKENS    tokens of an answer; default 64

Each user asks again when it was answered: a closed loop. `turnout bench` has open loops, traces and sessions.
"""

from __future__ import annotations

import json
import os
import random
import time

from locust import HttpUser, constant, events, task

PROMPT_WORDS = int(os.environ.get("PROMPT_WORDS", "100"))
MAX_TOKENS = int(os.environ.get("MAX_TOKENS", "64"))
WORDS = [
    "the",
    "sea",
    "a",
    "train",
    "to",
    "station",
    "old",
    "slow",
    "on",
    "platform",
    "of",
    "light",
    "after",
    "when",
    "rain",
    "a",
    "city",
    "under",
    "and",
]


class Reader(HttpUser):
    """Asks for completions and reads them as they come."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.model = os.environ.get("MODEL") or self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def complete(self) -> None:
        count = max(1, round(random.expovariate(1 / PROMPT_WORDS)))
        body = {
            "model": self.model,
            "prompt": " ".join(random.choices(WORDS, k=count)),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        began = time.perf_counter()
        first = last = None
        num_tokens, ended, trouble = 0, False, None
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as reply:
            if reply.status_code != 200:
                reply.failure(f"HTTP {reply.status_code}: {reply.text[:200]}")
                return
            for line in reply.iter_lines():
                text = line.decode() if isinstance(line, bytes) else line
                if not text.startswith("data:"):
                    continue
                if text == "data: [DONE]":
                    ended = True
                    break
                event = json.loads(text[5:])
                trouble = trouble or event.get("error")
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                if any(choice.get("text") for choice in event.get("choices", ())):
                    last = time.perf_counter()
                    first = first or last
            if trouble or not ended:
                reply.failure(str(trouble or "the stream ended before the answer did"))
                return
        if first is not None:
            report("TTFT", first - began, num_tokens)
            if num_tokens > 1:
                report("TPOT", (last - first) / (num_tokens - 1), num_tokens)
            report("E2E", last - began, num_tokens)


def report(name: str, seconds: float, num_tokens: int) -> None:
    """A row of Locust's table; its length is the answer's tokens."""
    events.request.fire(
        request_type="LLM",
        name=name,
        response_time=seconds * 1e3,
        response_length=num_tokens,
        exception=None,
        context={},
    )
