"""Faults other engines had where tokens become text: spaces, ids without a text, answers in the terminal and over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from callers import BOTH, Api
from engines import LocalEngine, engine_on
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from turnout.core.engine import Engine
from turnout.core.types import Finish, Output, Request
from turnout.plugins.loader.model import Model, inspect, load
from turnout.plugins.quant.none import Unquantized
from turnout.server.api.app import create_app
from turnout.server.cli import offline
from turnout.server.config import GenerateConfig, ServerConfig
from turnout.server.text.tokenizer import Text

Tiny = Callable[..., Model]


def sentencepiece(template: str | None = None) -> Text:
    """A tokenizer of whole words in the manner of Llama 2: ▁ stands for a space, and a text's first one is dropped."""
    words = ["<unk>", "<s>", "</s>", *["▁the", "▁cat", "▁sat", "▁on", "▁a", "▁mat"]]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return Text(PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **names), {})


class Repeating:
    """An engine that answers every prompt with the same tokens, one in a step."""

    def __init__(self, engine: Engine, tokens: Sequence[int]) -> None:
        self.info, self.tokens = engine.info, tokens
        self.seen: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[Output]:
        self.seen += requests
        for place, token in enumerate(self.tokens, 1):
            finish = Finish.LENGTH if place == len(self.tokens) else None
            yield Output(requests[0].id, (token,), finish)


@pytest.fixture
def generate(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, list[Request]]]:
    """`turnout generate` on a tokenizer, with an engine that says `tokens`: what it prints, and what it was asked."""

    def run(text: Text, tokens: Sequence[int], prompt: str, **options: Any) -> tuple[str, list[Request]]:
        engine = Repeating(engine_on(tiny("llama", vocab_size=text.vocab_size)), tokens)
        monkeypatch.setattr(offline, "open_engine", lambda config: (engine, text))
        assert offline.generate(GenerateConfig(prompt=prompt, **options)) == 0
        return capsys.readouterr().out.removesuffix("\n"), engine.seen

    return run


def test_the_terminal_keeps_the_space_between_prompt_and_answer_and_begins_a_chat_without_one(generate: Any) -> None:
    text = sentencepiece("{{ messages[0]['content'] }}")
    ids = text.encode("on a mat", add_special_tokens=False)
    assert text.decode(ids) == "on a mat"
    assert generate(text, ids, "the cat sat")[0] == " on a mat"
    assert generate(text, ids, "the cat sat", chat=True)[0] == "on a mat"


def test_there_is_one_start_token_in_every_path_where_template_and_tokenizer_both_write_one(
    generate: Any, tiny: Tiny
) -> None:
    text = sentencepiece("<s>{{ messages[0]['content'] }}")
    prompts = [generate(text, [5], "the cat")[1][0].tokens, generate(text, [5], "the cat", chat=True)[1][0].tokens]
    api = Api(
        create_app(LocalEngine(engine_on(tiny("llama", vocab_size=text.vocab_size))), text, ServerConfig()), "tiny"
    )
    prompts.append(api.complete("the cat", return_token_ids=True).good["choices"][0]["prompt_token_ids"])
    prompts.append(api.chat("the cat", return_token_ids=True).good["prompt_token_ids"])
    prompts.append(api.post("/tokenize", {"prompt": "the cat"}).good["tokens"])
    prompts.append(api.post("/tokenize", {"messages": [{"role": "user", "content": "the cat"}]}).good["tokens"])
    for ids in prompts:
        assert ids[0] == 1 and ids.count(1) == 1, ids


class TestIdsWithoutAText:
    """The model's output is larger than the tokenizer: 49,280 rows for 49,152 tokens."""

    GAPS = range(49152, 49280)

    @pytest.fixture
    def padded(self, tiny: Tiny, http: Callable[[Engine], Api]) -> Api:
        return http(engine_on(tiny("llama", vocab_size=49280)))

    @pytest.fixture
    def babbling(self, tiny: Tiny, http: Callable[[Engine], Api]) -> Api:
        """Its head makes the ids without a text likelier than all others."""
        model = load(inspect(tiny("llama", vocab_size=49280).info.path, dtype="float32", device="cpu"), Unquantized())
        head = model._net.lm_head
        plain = head.forward

        def raised(x: torch.Tensor) -> torch.Tensor:
            logits = plain(x)
            logits[..., 49152:] += 100.0
            return logits

        head.forward = raised
        return http(engine_on(model))

    @pytest.mark.parametrize("path", BOTH)
    def test_a_hot_model_never_gives_a_broken_reply(self, padded: Api, path: str) -> None:
        for seed in range(2):
            fields = {"temperature": 2, "seed": seed, "max_tokens": 10, "logprobs": 5 if path == BOTH[0] else True}
            whole, stream = padded.ask(path, **fields).good["choices"][0], padded.ask(path, stream=True, **fields)
            assert stream.text() == (whole["text"] if "text" in whole else whole["message"]["content"])

    @pytest.mark.parametrize("path", BOTH)
    @pytest.mark.parametrize("stream", [False, True])
    def test_they_count_as_tokens_and_are_no_text(self, babbling: Api, path: str, stream: bool) -> None:
        fields = {"max_tokens": 5, "return_token_ids": True, "ignore_eos": True}
        fields |= {"logprobs": 2} if path == BOTH[0] else {"logprobs": True, "top_logprobs": 2}
        reply = babbling.ask(path, stream=stream, **fields)
        choices = reply.choices() if stream else reply.good["choices"]
        ids = [token for choice in choices for token in choice.get("token_ids", ())]
        assert len(ids) == 5 and set(ids) <= set(self.GAPS)
        text = reply.text() if stream else choices[0].get("text", choices[0].get("message", {}).get("content"))
        assert text == ""

    def test_nobody_can_ask_for_one_by_bias(self, padded: Api) -> None:
        reply = padded.complete(logit_bias={"49152": 100})
        assert reply.status == 400 and "token ids go from 0 to 49151" in reply.error["message"]
