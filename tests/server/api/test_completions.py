"""Completions: the forms of a prompt, choices, echo, stopping, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from callers import Api
from scripted import ScriptedEngine

from turnout.core.types import Request
from turnout.server.text.tokenizer import Text

SEA = "The sea is"


def story(engine: ScriptedEngine, text: Text, count: int) -> str:
    return text.decode(engine.story[:count])


def test_a_reply_has_the_agreed_form(api: Api, engine: ScriptedEngine, text: Text) -> None:
    reply = api.complete(SEA, max_tokens=4).good
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    assert (reply["model"], reply["system_fingerprint"]) == ("models/smol", "fp_scripted")
    (choice,) = reply["choices"]
    expected = {
        "index": 0,
        "text": story(engine, text, 4),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert choice == expected
    num = len(text.encode(SEA))
    usage = {"prompt_tokens": num, "completion_tokens": 4, "total_tokens": num + 4}
    assert reply["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_the_four_forms_of_a_prompt_are_the_same(api: Api, engine: ScriptedEngine, text: Text) -> None:
    ids = text.encode(SEA)
    for prompt in (SEA, [SEA], ids, [ids]):
        reply = api.complete(prompt, max_tokens=2, echo=True).good
        assert engine.requests[-1].tokens[: len(ids)] == ids
        assert reply["choices"][0]["text"] == SEA + story(engine, text, 2)
        assert reply["usage"]["prompt_tokens"] == len(ids)


def test_choices_are_numbered_prompt_by_prompt_and_a_prompt_counts_once(api: Api, engine: ScriptedEngine) -> None:
    engine.num_cached = 2
    reply = api.complete([[5] * 5, [6] * 7], n=3, max_tokens=2).good
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [request.tokens[0] for request in engine.requests] == [5, 5, 5, 6, 6, 6]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (12, 12)
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("prompt", [SEA, [SEA, "Birds"], [4, 5, 6], [[4, 5], [6]]], ids=str)
@pytest.mark.parametrize(("n", "logprobs", "max_tokens"), [(1, None, 0), (2, None, 3), (1, 0, 3), (2, 2, 0)])
def test_echo_works_with_every_form_streamed_or_not(
    api: Api, text: Text, prompt: Any, n: int, logprobs: int | None, max_tokens: int
) -> None:
    fields = {"n": n, "logprobs": logprobs, "max_tokens": max_tokens, "echo": True}
    whole, stream = api.complete(prompt, **fields).good, api.complete(prompt, **fields, stream=True)
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts = [prompt] if single else prompt
    assert len(whole["choices"]) == len(prompts) * n
    for choice in whole["choices"]:
        given = prompts[choice["index"] // n]
        given = given if isinstance(given, str) else text.decode(given, skip_special_tokens=False)
        assert choice["text"].startswith(given) and (len(choice["text"]) > len(given)) is (max_tokens > 0)
        assert stream.text(choice["index"]) == choice["text"]
        marks = choice["logprobs"]
        streamed = [c["logprobs"] for c in stream.choices(choice["index"]) if c["logprobs"]]
        if logprobs is None:
            assert marks is None and not streamed
            continue
        for name, values in marks.items():
            assert values == [value for part in streamed for value in part[name]]
            assert len(values) == len(text.encode(given)) + max_tokens
        assert marks["token_logprobs"][0] is None and marks["top_logprobs"][0] is None
        assert None not in marks["token_logprobs"][1:] and None not in marks["top_logprobs"][1:]
        assert "".join(marks["tokens"]) == choice["text"]
        assert marks["text_offset"] == [len("".join(marks["tokens"][:i])) for i in range(len(marks["tokens"]))]


def test_scoring_a_prompt_makes_no_token(api: Api) -> None:
    reply = api.complete(SEA, max_tokens=0, echo=True, logprobs=1).good
    assert reply["choices"][0]["text"] == SEA and reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0


def test_an_echoed_special_token_counts_where_the_prompt_spells_it(api: Api) -> None:
    prompt = "<|im_start|>user"
    marks = api.complete(prompt, max_tokens=0, echo=True, logprobs=0).good["choices"][0]["logprobs"]
    assert marks["tokens"] == ["<|im_start|>", "user"]
    assert marks["text_offset"] == [0, len("<|im_start|>")]


class TestStopping:
    def test_every_stop_string_of_a_known_answer_cuts_exactly_before_it(
        self, api: Api, engine: ScriptedEngine, text: Text
    ) -> None:
        answer = story(engine, text, 12)
        for start in range(0, 30, 3):
            for size in (1, 2, 5, 9):
                stop = answer[start : start + size]
                expected = answer[: answer.find(stop)]
                for stream in (False, True):
                    reply = api.complete(max_tokens=12, stop=stop, stream=stream)
                    choice = reply.choices()[-1] if stream else reply.good["choices"][0]
                    assert (reply.text() if stream else choice["text"]) == expected
                    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
                    assert engine.left  # the engine was told to stop
                    engine.left.clear()

    def test_tokens_count_up_to_the_stop_string_whatever_comes_with_them(
        self, api: Api, engine: ScriptedEngine, text: Text
    ) -> None:
        stop, used = " harbour", engine.story.index(text.encode(" harbour")[0]) + 1
        for engine.per_output in (1, 4, 50):
            reply = api.complete(max_tokens=50, stop=[stop], logprobs=0, return_token_ids=True).good
            (choice,) = reply["choices"]
            assert choice["text"] == story(engine, text, used - 1)
            assert reply["usage"]["completion_tokens"] == used
            assert choice["token_ids"] == engine.story[:used]
            assert len(choice["logprobs"]["tokens"]) == used

    def test_a_stop_string_can_be_kept(self, api: Api, engine: ScriptedEngine, text: Text) -> None:
        answer = story(engine, text, 12)
        reply = api.complete(max_tokens=12, stop=answer[4:9], include_stop_str_in_output=True).good
        assert reply["choices"][0]["text"] == answer[: answer.find(answer[4:9]) + 5]

    def test_a_stop_that_never_comes_holds_nothing_back(self, api: Api, engine: ScriptedEngine, text: Text) -> None:
        reply = api.complete(max_tokens=12, stop=["\u0001", "never this"], stream=True)
        assert reply.text() == story(engine, text, 12)
        assert len([choice for choice in reply.choices() if choice["text"]]) == 12

    def test_a_stop_string_within_the_first_min_tokens_is_ordinary_text(
        self, api: Api, engine: ScriptedEngine, text: Text
    ) -> None:
        reply = api.complete(max_tokens=6, min_tokens=6, stop=text.decode(engine.story[1:2])).good
        assert reply["choices"][0]["text"] == story(engine, text, 6)

    def test_a_stop_id_ends_before_its_text_and_is_the_reason(
        self, api: Api, engine: ScriptedEngine, text: Text
    ) -> None:
        for stream in (False, True):
            reply = api.complete(max_tokens=10, stop_token_ids=[engine.story[5]], stream=stream)
            choice = reply.choices()[-1] if stream else reply.good["choices"][0]
            assert (reply.text() if stream else choice["text"]) == story(engine, text, 5)
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", engine.story[5])
        reply = api.complete(max_tokens=10, stop_token_ids=[engine.story[5]]).good
        assert reply["usage"]["completion_tokens"] == 6  # the token that ends it was generated too

    def test_an_end_token_is_no_text_and_no_reason_but_has_a_logprob(self, api: Api) -> None:
        reply = api.complete(max_tokens=9, logit_bias={"2": 100}, logprobs=1, skip_special_tokens=False).good
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
        assert choice["logprobs"]["tokens"] == ["<|im_end|>"]
        assert reply["usage"]["completion_tokens"] == 1

    def test_special_tokens_are_hidden_unless_asked_for(self, api: Api) -> None:
        fields = {"max_tokens": 2, "ignore_eos": True, "logit_bias": {"2": 100}}
        assert api.complete(**fields).good["choices"][0]["text"] == ""
        assert api.complete(**fields, skip_special_tokens=False).good["choices"][0]["text"] == "<|im_end|>" * 2

    def test_each_choice_ends_on_its_own(self, api: Api, engine: ScriptedEngine) -> None:
        def script(request: Request) -> list[int]:
            return [*engine.story[: 2 + engine.requests.index(request)], 2]

        engine.script = script
        for stream in (False, True):
            engine.requests.clear()
            reply = api.complete(["a", "b", "c"], max_tokens=20, stream=stream)
            if stream:
                ends = [[c["finish_reason"] for c in reply.choices(i) if c["finish_reason"]] for i in range(3)]
                assert ends == [["stop"]] * 3
                assert len({reply.text(i) for i in range(3)}) == 3
            else:
                assert len({choice["text"] for choice in reply.good["choices"]}) == 3


class TestLogprobs:
    @pytest.mark.parametrize("best", [0, 1, 2, 5, 20])
    def test_the_chosen_token_is_always_among_the_best(self, api: Api, best: int) -> None:
        marks = api.complete(max_tokens=3, logprobs=best).good["choices"][0]["logprobs"]
        for token, value, top in zip(marks["tokens"], marks["token_logprobs"], marks["top_logprobs"], strict=True):
            assert top[token] == value == -1.0
            assert len(top) == max(best, 1) + (best == 1)  # the scripted engine's token is the second likeliest

    @pytest.mark.parametrize("lowest", [float("-inf"), float("nan"), -1e30])
    def test_a_number_json_cannot_hold_is_minus_9999(self, api: Api, engine: ScriptedEngine, lowest: float) -> None:
        engine.lowest = lowest
        for stream in (False, True):
            reply = api.complete(max_tokens=1, logprobs=20, stream=stream)
            marks = (reply.choices() if stream else reply.good["choices"])[0]["logprobs"]
            assert -9999.0 in marks["top_logprobs"][0].values()

    def test_bytes_that_are_no_character_are_written_as_bytes(
        self, api: Api, engine: ScriptedEngine, text: Text
    ) -> None:
        emoji = text.encode("🦜")
        assert len(emoji) > 1
        engine.script = lambda request: emoji + text.encode(" ok")
        (choice,) = api.complete(max_tokens=10, logprobs=0).good["choices"]
        tokens = choice["logprobs"]["tokens"]
        raw = b"".join(
            bytes.fromhex(t.removeprefix("bytes:").replace("\\x", "")) for t in tokens if t.startswith("bytes:")
        )
        assert raw.decode() == "🦜" and choice["text"] == "🦜 ok"
        assert choice["logprobs"]["text_offset"] == [0] * len(emoji) + [1]

    def test_two_tokens_with_one_text_are_both_kept(
        self, api: Api, engine: ScriptedEngine, text: Text, monkeypatch: Any
    ) -> None:
        plain = text.token_bytes
        monkeypatch.setattr(text, "token_bytes", lambda token: plain(1000 if token == 2000 else token))
        top = api.complete(max_tokens=1, logprobs=3).good["choices"][0]["logprobs"]["top_logprobs"][0]
        assert top["token_id:2000"] == -2.0 and top[text.decode([1000])] == -0.5

    def test_prompt_logprobs_have_an_entry_for_each_token_but_the_first(self, api: Api, text: Text) -> None:
        for reply in (
            api.complete(SEA, prompt_logprobs=3),
            api.complete(SEA, prompt_logprobs=3, echo=True, logprobs=5),
        ):
            entries = reply.good["choices"][0]["prompt_logprobs"]
            first, *rest = entries
            assert first is None and len(rest) == len(text.encode(SEA)) - 1
            for token, entry in zip(text.encode(SEA)[1:], rest, strict=True):
                assert entry[str(token)] == {"logprob": -1.0, "rank": 2, "decoded_token": text.decode([token])}
                assert len(entry) == 3

    def test_tokens_can_be_named_by_their_ids(self, api: Api, engine: ScriptedEngine, text: Text) -> None:
        fields = {"logprobs": 2, "echo": True, "max_tokens": 2, "return_tokens_as_token_ids": True}
        (choice,) = api.complete(SEA, **fields).good["choices"]
        marks = choice["logprobs"]
        ids = text.encode(SEA) + engine.story[:2]
        assert marks["tokens"] == [f"token_id:{token}" for token in ids]
        assert all(f"token_id:{token}" in top for token, top in zip(ids[1:], marks["top_logprobs"][1:], strict=True))
        plain = api.complete(SEA, **fields | {"return_tokens_as_token_ids": False}).good["choices"][0]
        assert plain["text"] == choice["text"] and plain["logprobs"]["text_offset"] == marks["text_offset"]

    def test_token_ids_come_when_asked_for(self, api: Api, engine: ScriptedEngine, text: Text) -> None:
        (choice,) = api.complete(SEA, max_tokens=3, return_token_ids=True).good["choices"]
        assert choice["token_ids"] == engine.story[:3] and choice["prompt_token_ids"] == text.encode(SEA)
        pieces = api.complete(SEA, max_tokens=3, return_token_ids=True, stream=True).choices()
        assert [token for piece in pieces for token in piece["token_ids"]] == engine.story[:3]
        assert [piece.get("prompt_token_ids") for piece in pieces] == [text.encode(SEA), None, None]


def test_a_character_split_between_prompt_and_answer_is_made_whole(
    api: Api, engine: ScriptedEngine, text: Text
) -> None:
    emoji = text.encode("🦜")
    engine.script = lambda request: emoji[1:]
    for stream in (False, True):
        reply = api.complete(emoji[:1], max_tokens=10, stream=stream)
        assert (reply.text() if stream else reply.good["choices"][0]["text"]) == "🦜"


def test_the_start_token_can_be_left_out(api: Api, engine: ScriptedEngine, text: Text, monkeypatch: Any) -> None:
    asked = []
    plain = text.encode
    monkeypatch.setattr(text, "encode", lambda t, add_special_tokens=True: asked.append(add_special_tokens) or plain(t))
    api.complete(add_special_tokens=False)
    api.complete()
    assert asked == [False, True]
