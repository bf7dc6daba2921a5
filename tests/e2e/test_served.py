"""The real model over HTTP, by the official client: the same tokens as transformers', and nobody pays for another."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from openai import OpenAI

if TYPE_CHECKING:
    from conftest import Served

PROMPTS = ["The capital of France is", "今天天气很好，我们去", "def fibonacci(n: int) -> int:\n    ", "🙂🚂 trains and"]


@pytest.fixture(scope="module")
def expected(smollm2: str) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
        found.append(tokenizer.decode(model.generate(ids, **settings)[0, ids.shape[1] :]))
    return found


def test_greedy_text_is_transformers_own_alone_together_and_streamed(server: Served, expected: list[str]) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}

    def whole(prompt: str) -> str:
        return client.completions.create(prompt=prompt, **settings).choices[0].text  # type: ignore[call-overload, no-any-return]

    def streamed(prompt: str) -> str:
        chunks = client.completions.create(prompt=prompt, stream=True, **settings)  # type: ignore[call-overload]
        return "".join(chunk.choices[0].text for chunk in chunks)

    assert [whole(prompt) for prompt in PROMPTS] == expected
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(whole, PROMPTS * 2)) == expected * 2
        assert list(pool.map(streamed, PROMPTS)) == expected


def test_a_chat_is_answered_whole_and_in_pieces(server: Served) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked = {
        "model": "smollm2",
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    answer = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(stream=True, **asked)  # type: ignore[call-overload]
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == answer.choices[0].message.content


def test_every_answer_says_what_produced_it_and_server_info_explains(server: Served) -> None:
    answer = server.complete("The sea is", max_tokens=1)
    info = server.http.get("/server_info").json()
    assert str(answer["system_fingerprint"]).startswith("fp_")
    assert answer["system_fingerprint"] in json.dumps(info)
    for part in ("torch", "fcfs", "recompute", "paged", "none", "transformers"):
        assert part in json.dumps(info)


@pytest.fixture(scope="module")
def searched(smollm2: str) -> list[str]:
    """The two best answers of `generate(num_beams=3)`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    settings = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **settings)
    return [tokenizer.decode(row) for row in said[:, ids.shape[1] :]]


@pytest.mark.slow
def test_a_beam_search_finds_what_transformers_does_and_leaves_no_block(server: Served, searched: list[str]) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    extra = {"use_beam_search": True, "best_of": 3, "ignore_eos": True}
    asked = {"model": "smollm2", "prompt": PROMPTS[0], "max_tokens": 8, "n": 2}

    def search() -> list[str]:
        answer = client.completions.create(**asked, logprobs=1, extra_body=extra)  # type: ignore[call-overload]
        totals = [sum(choice.logprobs.token_logprobs) for choice in answer.choices]
        assert totals == sorted(totals, reverse=True)
        return [choice.text for choice in answer.choices]

    assert search() == searched
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(search) for _ in range(4)]
        pool.submit(server.complete, PROMPTS[1])
    assert [found.result() for found in together] == [searched] * 4
    chat = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4, "n": 2}
    reply = server.http.post("/v1/chat/completions", json=chat | {"use_beam_search": True}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert server.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.slow
def test_the_terminal_finds_the_same(searched: list[str]) -> None:
    command = [
        f"{sysconfig.get_path('scripts')}/turnout",
        "generate",
        PROMPTS[0],
        "dtype=float32",
        "sampling.use_beam_search=true",
    ]
    command += ["sampling.beam_width=3", "sampling.n=2", "sampling.max_tokens=8", "sampling.ignore_eos=true"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    _, first, second = re.split(r"--- \d of 2: log-probability [-.\d]+, 8 tokens\n", said)
    assert [first, second] == [answer + "\n" for answer in searched]


def test_a_client_that_leaves_a_beam_search_frees_every_block(server: Served) -> None:
    fields = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "use_beam_search": True, "n": 4}
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(head.encode() + b"\r\n\r\n" + body)
        while server.metric("vllm:num_requests_running") < 4:
            time.sleep(0.05)
    end = time.monotonic() + 20
    while server.metric("vllm:kv_cache_usage_perc") and time.monotonic() < end:
        time.sleep(0.05)
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0


def test_answers_to_one_prompt_compute_it_once(server: Served) -> None:
    before = server.metric("vllm:prompt_tokens_total")
    ids = list(range(2000, 2200))
    answer = server.complete(ids, n=4, max_tokens=3, temperature=1, seed=1)
    assert len(answer["choices"]) == 4  # type: ignore[arg-type]
    assert server.metric("vllm:prompt_tokens_total") - before == len(ids)


BAD = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [999_999_999_999]},
    {"prompt": [-1]},
    {"prompt": "x", "max_tokens": 100_000},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "logit_bias": {"191222": -100}},
    {"prompt": "x", "stream_options": {"include_usage": True}},
    {"prompt": "x", "model": "no-such-model"},
]


def test_bad_requests_get_4xx_while_a_stream_runs_on_untouched(server: Served) -> None:
    lines: list[str] = []

    def follow() -> None:
        body = {"prompt": "The sea is", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as reply:
            lines.extend(line for line in reply.iter_lines() if line)

    running = threading.Thread(target=follow)
    running.start()
    for body in BAD:
        reply = server.http.post("/v1/completions", json=body)
        assert 400 <= reply.status_code < 500, (body, reply.text)
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    running.join(60)
    assert lines[-1] == "data: [DONE]"
    assert server.complete("The sea is", max_tokens=1)


def test_closing_the_connection_frees_the_request_and_its_blocks(server: Served) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 2}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
        assert server.metric("vllm:num_requests_running") >= 1
    end = time.monotonic() + 10
    while server.metric("vllm:num_requests_running") and time.monotonic() < end:
        time.sleep(0.05)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.slow
def test_ctrl_c_lets_a_stream_end_and_leaves_nothing_behind(serve: Callable[..., Served]) -> None:
    served = serve("dtype=float32", "scheduler=chunked_prefill", "preemption=swap").ready()
    assert f"http://127.0.0.1:{served.port}" in served.output and "chunked_prefill" in served.output
    lines: list[str] = []
    started = threading.Event()

    def follow() -> None:
        body = {"prompt": "The sea is", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                started.set()

    running = threading.Thread(target=follow)
    running.start()
    assert started.wait(60)
    assert served.stop(signal.SIGINT) == 0
    running.join(30)
    assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.slow
def test_an_engine_killed_under_load_fails_what_waits_and_ends_the_server(serve: Callable[..., Served]) -> None:
    import psutil

    served = serve("dtype=float32").ready()
    replies: list[int] = []

    def ask() -> None:
        body = {"prompt": "The sea is", "max_tokens": 2000, "ignore_eos": True}
        replies.append(served.http.post("/v1/completions", json=body).status_code)

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    while served.metric("vllm:num_requests_running") < 3:
        time.sleep(0.05)
    for child in psutil.Process(served.process.pid).children():
        child.kill()
    for thread in asking:
        thread.join(20)
    assert replies == [503] * 3
    assert served.process.wait(20) == 70


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("attention=flashy", "attention=flashy: there is no such choice. Installed here: .*torch"),
        ("scheduler.chunk=5", "scheduler=fcfs of turnout .* has no options"),
        ("limits.max_num_seqs=0", "limits.max_num_seqs must be at least 1, got 0"),
        ("model=/no/such/model", "does not exist"),
        ("dtype=float12", "dtype=float12 is unknown; choose auto"),
        ("limits.max_model_len=100000", "the model was made for 8192 tokens"),
        ("experiment=nope", "(?s)Could not find 'experiment/nope'.*low_latency"),
    ],
)
def test_a_wrong_start_ends_with_one_screen_that_says_what_was_expected(
    serve: Callable[..., Served], override: str, message: str
) -> None:
    served = serve(override)
    assert served.process.wait(60) != 0
    assert re.search(message, served.output), served.output
    assert "Traceback" not in served.output
    assert len(served.output.splitlines()) < 24
