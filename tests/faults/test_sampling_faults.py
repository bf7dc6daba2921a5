"""Faults other engines had in sampling and log-probabilities: each trigger through the whole server on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import BOTH, Api
from engines import engine_on, outputs_of, words

from turnout.core import Request, Sampling
from turnout.core.engine import Engine
from turnout.plugins.loader.model import Model
from turnout.plugins.preemption import Recompute
from turnout.plugins.scheduler import FCFS, ChunkedPrefill
from turnout.server.text.tokenizer import Text

Tiny = Callable[..., Model]
Http = Callable[[Engine], Api]


@pytest.fixture
def api(worded: Model, http: Http) -> Api:
    return http(engine_on(worded))


def call(**fields: Any) -> tuple[str, str, dict[str, Any]]:
    body = {"prompt": words(9), "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
    return "POST", BOTH[0], {"json": body}


def test_tiny_temperatures_are_greedy_and_harm_no_neighbour(api: Api) -> None:
    greedy = api.together([call()])[0].good["choices"][0]["text"]
    tiny = [0, 1e-300, 1e-40, 1e-10, 1e-8, 1e-5, 1.1e-5, 1e-4]
    neighbour = {"temperature": 1, "seed": 3, "top_p": 0.9}
    alone = api.together([call(**neighbour)])[0].good["choices"][0]["text"]
    replies = api.together([call(**neighbour), *(call(temperature=t, seed=i) for i, t in enumerate(tiny))])
    assert [reply.good["choices"][0]["text"] for reply in replies] == [alone, *[greedy] * len(tiny)]


def by_hand(net: Any, prompt: list[int], asked: dict[str, float], num_tokens: int) -> list[int]:
    """Greedy tokens of transformers' logits, the penalties applied token by token in plain Python."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = net(input_ids=torch.tensor([tokens])).logits[0, -1].tolist()
        made = tokens[len(prompt) :]
        for token in set(tokens):
            by = asked.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        for token in set(made):
            logits[token] -= asked.get("presence_penalty", 0.0) + asked.get("frequency_penalty", 0.0) * made.count(
                token
            )
        tokens.append(logits.index(max(logits)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("scheduler", [FCFS(), ChunkedPrefill(chunk=3)], ids=["fcfs", "chunked_prefill"])
def test_penalties_look_at_what_they_should_cached_chunked_and_preempted(
    tiny: Tiny, scheduler: FCFS | ChunkedPrefill
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny("llama")
    net = AutoModelForCausalLM.from_pretrained(model.info.path, dtype=torch.float32)
    asks: list[dict[str, float]] = [
        {},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ]
    prompts = [[token] * 9 for token in (16, 40)]  # 16 is what this model likes to repeat
    engine = engine_on(model, scheduler, block_size=4, num_blocks=16, preemption=Recompute())
    wanted, said = {}, {}
    for turn in range(2):  # the second time on cached prompts
        asked = []
        for i, prompt in enumerate(prompts):
            for j, ask in enumerate(asks):
                sampling = Sampling(0, max_tokens=14, **ask)  # type: ignore[arg-type]
                asked.append(Request(f"{turn} {i} {j}", list(prompt), sampling))
                wanted[asked[-1].id] = by_hand(net, prompt, ask, 14) if not turn else wanted[f"0 {i} {j}"]
        found = outputs_of(engine, asked)
        said |= {rid: [token for output in outputs for token in output.tokens] for rid, outputs in found.items()}
    assert said == wanted
    assert len(set(map(tuple, wanted.values()))) > len(asks)  # the penalties matter
    assert engine.stats.preemptions_recompute > 0 and engine.stats.cached_tokens > 0


def test_a_bias_bans_and_forces_and_stays_with_its_request(api: Api, text: Text) -> None:
    def ids(reply: Any) -> list[list[int]]:
        return [choice["token_ids"] for choice in reply.good["choices"]]

    fields = {"return_token_ids": True}
    (plain,) = ids(api.together([call(**fields)])[0])
    banned = {"logit_bias": {str(token): -100 for token in set(plain)}}
    last = text.vocab_size - 1
    calls = [
        call(**fields),
        call(**fields, **banned),
        call(**fields, **banned, temperature=2, n=8, seed=1),
        call(**fields, logit_bias={str(last): 100}),
        call(**fields, logit_bias={"0": 100}, temperature=1),
        *(call(logit_bias={key: 1}) for key in (str(last + 1), "-1", "abc", "10" * 20, "1.5", "")),
        call(**fields),
    ]
    replies = api.together(calls)
    assert ids(replies[0]) == ids(replies[-1]) == [plain]
    assert not {token for tokens in ids(replies[1]) + ids(replies[2]) for token in tokens} & set(plain)
    assert ids(replies[3]) == [[last] * 12] and ids(replies[4]) == [[0] * 12]
    for reply in replies[5:-1]:
        assert reply.status == 400 and "logit_bias" in reply.error["message"]


def test_ignoring_the_end_ignores_every_end_the_model_has(
    worded: Model, http: Http, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = http(engine_on(worded))
    (plain,) = api.together([call(max_tokens=50, return_token_ids=True)])[0].good["choices"]
    ends = plain["token_ids"][10], plain["token_ids"][20]
    monkeypatch.setattr(text, "eos_ids", frozenset(ends))  # of the tokenizer and of generation_config.json
    replies = api.together([call(max_tokens=50), call(max_tokens=50, ignore_eos=False)])
    assert [r.good["usage"]["completion_tokens"] for r in replies] == [50, min(map(plain["token_ids"].index, ends)) + 1]
    assert [r.good["choices"][0]["finish_reason"] for r in replies] == ["length", "stop"]


class TestLogprobs:
    @pytest.mark.parametrize("best", [0, 1, 5, 20])
    def test_as_many_alternatives_come_as_were_asked_for(self, api: Api, best: int) -> None:
        marks = api.together([call(logprobs=best)])[0].good["choices"][0]["logprobs"]
        assert [len(top) for top in marks["top_logprobs"]] == [max(best, 1)] * 12  # the token itself is always shown
        chat = api.chat(max_tokens=3, ignore_eos=True, logprobs=True, top_logprobs=best).good["choices"][0]["logprobs"]
        assert [len(entry["top_logprobs"]) for entry in chat["content"]] == [best] * 3
        for entry in chat["content"] if best else []:
            assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy

    def test_a_chat_may_ask_for_them_without_alternatives(self, api: Api) -> None:
        chat = api.chat(max_tokens=3, ignore_eos=True, logprobs=True).good["choices"][0]["logprobs"]
        assert [entry["top_logprobs"] for entry in chat["content"]] == [[]] * 3

    @pytest.mark.parametrize(
        ("path", "fields"),
        [(BOTH[0], {"logprobs": 21}), (BOTH[0], {"logprobs": -1}), (BOTH[1], {"logprobs": True, "top_logprobs": 21})],
    )
    def test_more_than_there_may_be_is_a_400(self, api: Api, path: str, fields: dict[str, Any]) -> None:
        reply = api.ask(path, **fields)
        assert reply.status == 400 and "logprobs" in str(reply.error["param"])

    def test_every_special_token_has_its_entry(self, api: Api, text: Text) -> None:
        """Each is forced in its turn; the alternatives beside it hold tokens of every kind."""
        special = [token for token in range(30) if text.decode([token], skip_special_tokens=True) == ""]
        assert len(special) > 10 and text.eos_ids <= set(special)
        calls = []
        for token in special:
            fields: dict[str, Any] = {
                "max_tokens": 2,
                "temperature": 0,
                "ignore_eos": True,
                "logit_bias": {str(token): 100},
            }
            calls.append(("POST", BOTH[0], {"json": {"prompt": "The sea", "logprobs": 5} | fields}))
            messages = [{"role": "user", "content": "The sea"}]
            chat = {"messages": messages, "logprobs": True, "top_logprobs": 5, "skip_special_tokens": False}
            calls.append(("POST", BOTH[1], {"json": chat | fields}))
        replies = api.together(calls)
        for token, completion, chat in zip(special, replies[::2], replies[1::2], strict=True):
            name = text.decode([token], skip_special_tokens=False)
            marks = completion.good["choices"][0]["logprobs"]
            assert marks["tokens"] == [name] * 2 and None not in marks["token_logprobs"]
            assert all(
                top[name] == own for top, own in zip(marks["top_logprobs"], marks["token_logprobs"], strict=True)
            )
            assert all(len(top) in (5, 6) for top in marks["top_logprobs"])
            entries = chat.good["choices"][0]["logprobs"]["content"]
            assert [entry["token"] for entry in entries] == [name] * 2
            assert all(len(entry["top_logprobs"]) == 5 for entry in entries)


def test_each_of_many_requests_ends_on_its_own_and_has_nothing_behind_its_end(api: Api, text: Text) -> None:
    (plain,) = api.together([call(max_tokens=30, return_token_ids=True)])[0].good["choices"]
    ids: list[int] = plain["token_ids"]
    stops = {6: plain["text"][14:18], 7: plain["text"][40:44]}
    calls = [call(max_tokens=1 + 5 * i) for i in range(3)]
    calls += [call(max_tokens=30, stop_token_ids=[ids[i]]) for i in (4, 8, 12)]
    calls += [call(max_tokens=30, stop=[stop]) for stop in stops.values()]
    calls = [
        (method, path, {"json": {**rest["json"], "return_token_ids": True, "logprobs": 0}})
        for method, path, rest in calls
    ]
    replies = [reply.good for reply in api.together(calls)]
    for i, reply in enumerate(replies):
        (choice,), used = reply["choices"], reply["usage"]["completion_tokens"]
        assert choice["token_ids"] == ids[:used] and len(choice["logprobs"]["tokens"]) == used
        if i < 3:
            assert (used, choice["finish_reason"]) == (1 + 5 * i, "length")
        elif i < 6:
            assert (used, choice["finish_reason"]) == (ids.index(ids[4 * (i - 2)]) + 1, "stop")
        else:
            assert (
                choice["text"] == plain["text"][: plain["text"].index(stops[i])] and choice["finish_reason"] == "stop"
            )
            assert stops[i] in text.decode(ids[:used]) and stops[i] not in text.decode(ids[: used - 1])
