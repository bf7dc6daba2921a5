"""Text to ids and back, conversations to prompts, and text that arrives token by token."""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from grids import every
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from turnout.core import ModelError
from turnout.server.text.detokenizer import Detokenizer
from turnout.server.text.stop import StopStrings
from turnout.server.text.tokenizer import RESERVED, Text

SAMPLES = (
    "Hello, world!  Two spaces,\ttab,\r\nnewlines\n\n",
    "emoji 🎉 👨‍👩‍👧‍👦 🏳️‍🌈 end",
    "世界，你好。漢字かな交じり文",
    "สวัสดีชาวโลก",
    "e\u0301 a\u0308\u0323 combining, नमस्ते दुनिया",
    "  leading and trailing  ",
    "def f(x):\n    return x ** 2  # ½ ∑ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
)
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' if loop.first }}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if tools %}<tools:{{ tools | length }}>{% endif %}{% if loud %}!{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


def sentencepiece_like(decoder: decoders.Decoder, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of Llama 2: ▁ for spaces, <0xNN> for what is not in its small vocabulary."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = "the cat sat on a mat and then it ran off to see what the other cats were doing in the garden é ü"
    trained.train_from_iterator(
        [words] * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    )
    bpe = json.loads(trained.to_str())["model"]
    made = Tokenizer(
        models.BPE(
            bpe["vocab"], [tuple(m) for m in bpe["merges"]], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    made.normalizer, made.decoder = trained.normalizer, decoder
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.fixture(scope="module")
def smol(smollm2: str) -> Text:
    return Text.load(smollm2)


@pytest.fixture(scope="module")
def small() -> Text:
    return Text(sentencepiece_like(LLAMA), {})


KINDS = ("smol", "llama", "gemma", "metaspace")


@pytest.fixture(scope="module")
def texts(smol: Text, small: Text) -> dict[str, Text]:
    more = {"gemma": GEMMA, "metaspace": METASPACE}
    return {"smol": smol, "llama": small} | {kind: Text(sentencepiece_like(d), {}) for kind, d in more.items()}


def streamed(detokenizer: Detokenizer, ids: Sequence[int], size: int) -> list[str]:
    """What each push of `size` tokens returns, then what `finish` does."""
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, detokenizer.finish()]


@cache
def single_bytes(text: Text) -> list[int]:
    return [i for i in range(text.vocab_size) if len(text.token_bytes(i)) == 1]


def id_of(raw: bytes, text: Text) -> int:
    return next(i for i in range(text.vocab_size) if text.token_bytes(i) == raw)


def random_ids(rng: random.Random, text: Text) -> list[int]:
    """Ids from the whole vocabulary and beyond it; half of them single bytes, which seldom make characters."""
    single = single_bytes(text)
    return [
        rng.choice(single) if rng.random() < 0.5 else rng.randrange(text.vocab_size + 3)
        for _ in range(rng.randrange(1, 40))
    ]


# Text that arrives token by token


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_a_text_are_the_text_and_hold_no_broken_character(texts: dict[str, Text], kind: str) -> None:
    text = texts[kind]
    for sample in SAMPLES:
        ids = text.encode(sample, add_special_tokens=False)
        for size in (1, 2, 3, 4, 5, 8):
            pieces = streamed(Detokenizer(text), ids, size)
            assert "".join(pieces) == text.decode(ids) == (sample if kind != "gemma" else " " + sample)
            assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_stream_as_they_decode_at_once(texts: dict[str, Text], kind: str, skip: bool) -> None:
    text, rng = texts[kind], random.Random(7)
    for _ in range(3000 if kind == "smol" else 1000):
        ids = random_ids(rng, text)
        whole = text.decode(ids, skip_special_tokens=skip)
        for size in (1, 2, 8):
            assert "".join(streamed(Detokenizer(text, skip_special_tokens=skip), ids, size)) == whole, (ids, size)


def test_every_id_of_the_vocabulary_streams_between_two_words(smol: Text) -> None:
    before, after = smol.encode("so"), smol.encode(" on")
    for token in range(smol.vocab_size):
        ids = [*before, token, *after]
        assert "".join(streamed(Detokenizer(smol), ids, 1)) == smol.decode(ids)


def test_a_character_is_sent_with_its_last_byte(smol: Text) -> None:
    ids = smol.encode("ab 🎉c")
    detokenizer, sent = Detokenizer(smol), ""
    for count, token in enumerate(ids, 1):
        sent += detokenizer.push([token])
        assert sent == smol.decode(ids[:count]).rstrip("\ufffd")


def test_bytes_that_make_no_character_become_marks_and_later_text_goes_on(texts: dict[str, Text]) -> None:
    for text in texts.values():
        lone = id_of(b"\x96", text)
        ids = [lone, *text.encode(" cat", add_special_tokens=False)]
        detokenizer = Detokenizer(text)
        assert "".join(streamed(detokenizer, ids, 1)).startswith("\ufffd")
        assert detokenizer.text.endswith(" cat")


def test_an_unfinished_character_at_the_end_becomes_one_mark(smol: Text) -> None:
    ids = smol.encode("世")[:-1]
    detokenizer = Detokenizer(smol)
    assert (detokenizer.push(ids), detokenizer.finish(), detokenizer.finish()) == ("", "\ufffd", "")


def test_one_invalid_byte_spoils_its_run_of_byte_tokens_as_in_a_full_decode(small: Text) -> None:
    ids = [*small.encode("世", False)[1:], id_of(b"\xff", small)]
    detokenizer = Detokenizer(small)
    assert detokenizer.push(ids) == ""  # it can still go either way
    assert detokenizer.push(small.encode("cat", False)) == "\ufffd\ufffd\ufffd\ufffd cat"


def test_ids_beyond_the_tokenizer_are_no_text(texts: dict[str, Text]) -> None:
    for text in texts.values():
        ids = text.encode("the cat", False)
        gaps = [text.vocab_size, text.vocab_size + 100, 10**12]
        mixed = [gaps[0], *ids[:1], gaps[1], *ids[1:], gaps[2]]
        assert "".join(streamed(Detokenizer(text), mixed, 1)) == text.decode(ids) == text.decode(mixed)
        assert text.token_bytes(gaps[1]) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_left_out_or_spelled(texts: dict[str, Text], kind: str) -> None:
    text = texts[kind]
    end = max(text.eos_ids)
    ids = [end, *text.encode("the cat", False), end]
    assert "".join(streamed(Detokenizer(text), ids, 1)) == text.decode(ids[1:-1])
    shown = Detokenizer(text, skip_special_tokens=False)
    assert "".join(streamed(shown, ids, 1)).endswith("cat" + text.token_bytes(end).decode())


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_an_answer_that_continues_a_prompt_keeps_its_leading_space(texts: dict[str, Text], kind: str) -> None:
    text = texts[kind]
    ids = text.encode("the cat", False)
    assert Detokenizer(text).push(ids) == "the cat"
    for prompt in ("on a mat", "🎉", "x 🎉"):
        assert Detokenizer(text, prompt_tail=text.encode(prompt)[-6:]).push(ids) == " the cat"


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_begun_in_the_prompt_is_completed_by_the_answer(texts: dict[str, Text], kind: str) -> None:
    text = texts[kind]
    ids = text.encode("a 世界 cat", False)
    whole = next(n for n in range(len(ids)) if text.decode(ids[:n]).endswith(" 世"))
    cut = next(n for n in range(whole, len(ids)) if text.decode(ids[:n]).endswith("界")) - 1
    detokenizer = Detokenizer(text, prompt_tail=ids[:cut])
    assert "".join(streamed(detokenizer, ids[cut:], 1)) == "界 cat"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["words", "broken bytes", "spaces"])
def test_the_work_per_token_does_not_grow(
    texts: dict[str, Text], kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, num_tokens = texts[kind], 2000
    broken = id_of(b"\x96", text)
    space = id_of(b" ", text)
    ids = {
        "words": text.encode("the cat sat on a mat", False) * 400,
        "broken bytes": [broken] * 2000,
        "spaces": [space] * 2000,
    }
    decoded = 0
    decode = text.decode

    def counted(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(text, "decode", counted)
    detokenizer = Detokenizer(text, stop=StopStrings(["never here"]))
    pieces = streamed(detokenizer, ids[what][:num_tokens], 1)
    assert decoded <= 20 * num_tokens
    assert "".join(pieces) == decode(ids[what][:num_tokens])


# Stop strings

KNOWN = "The capital of France is Paris. 🎉 It has 2,1 million people; 巴黎 is its name."


@pytest.mark.parametrize("size", [1, 2, 8])
@every("kind", KINDS)
def test_every_short_substring_works_as_a_stop_string(texts: dict[str, Text], kind: str, size: int) -> None:
    text = texts[kind]
    ids = text.encode(KNOWN, False)
    full = text.decode(ids)
    reached = ["".join(streamed(Detokenizer(text), ids[:n], 1)[:-1]) for n in range(len(ids) + 1)]
    for length in range(2, 7):
        for start in range(len(full) - length + 1):
            stop = full[start : start + length]
            for include in (False, True):
                detokenizer = Detokenizer(text, stop=StopStrings([stop, "never here"]), include_stop=include)
                pieces = streamed(detokenizer, ids, size)
                end = full.index(stop) + (length if include else 0)
                assert "".join(pieces) == detokenizer.text == full[:end]
                assert detokenizer.stopped == stop
                used = next((n for n, shown in enumerate(reached) if stop in shown), len(ids))
                assert detokenizer.num_tokens_used == used


def letters(text: Text, word: str) -> list[int]:
    return [i for letter in word for i in text.encode(letter, False)]


def slow_stop(word: str, stops: Sequence[str], ignored: int) -> tuple[str, str | None]:
    for end in range(ignored + 1, len(word) + 1):
        found = [stop for stop in stops if word[:end].endswith(stop)]
        if found:
            return word[: end - max(map(len, found))], max(found, key=len)
    return word, None


def test_of_many_stop_strings_the_first_complete_counts_then_the_longest(smol: Text) -> None:
    rng = random.Random(3)
    for _ in range(1500):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 5))]
        word = "".join(rng.choices("abc", weights=[4, 4, 1], k=rng.randrange(1, 20)))
        ignored = rng.choice([0, 0, 3, 8])
        expected = slow_stop(word, stops, ignored)
        for size in (1, 2, 8):
            detokenizer = Detokenizer(smol, stop=StopStrings(stops), min_tokens=ignored)
            sent = "".join(streamed(detokenizer, letters(smol, word), size))
            assert (sent, detokenizer.stopped) == expected, (word, stops, ignored)


def test_only_a_real_beginning_of_a_stop_string_is_held_back(smol: Text) -> None:
    rng = random.Random(5)
    for _ in range(500):
        stops = ["".join(rng.choices("ab", k=rng.randrange(2, 11))) + "z" for _ in range(4)]
        word = "".join(rng.choices("abc", weights=[4, 4, 1], k=30))
        detokenizer, sent = Detokenizer(smol, stop=StopStrings(stops)), ""
        for count, token in enumerate(letters(smol, word), 1):
            sent += detokenizer.push([token])
            held = max(n for n in range(count + 1) if any(s.startswith(word[count - n : count]) for s in stops))
            assert sent == word[: count - held]
        assert sent + detokenizer.finish() == word


def test_a_stop_string_that_never_comes_delays_nothing(smol: Text) -> None:
    ids = smol.encode("Nothing in here begins like that, so it flows.")
    detokenizer = Detokenizer(smol, stop=StopStrings(["<|never|>", "§§§§§§§§§§"]))
    assert [detokenizer.push([i]) for i in ids] == [smol.decode([i]) for i in ids]


def test_what_was_held_for_a_stop_is_sent_once_at_the_end(smol: Text) -> None:
    detokenizer = Detokenizer(smol, stop=StopStrings(["abcd"]))
    assert detokenizer.push(letters(smol, "xabc")) == "x"
    assert (detokenizer.finish(), detokenizer.finish()) == ("abc", "")
    assert (detokenizer.text, detokenizer.stopped, detokenizer.num_tokens_used) == ("xabc", None, 4)


def test_after_a_stop_nothing_more_is_sent(smol: Text) -> None:
    detokenizer = Detokenizer(smol, stop=StopStrings(["b"]))
    assert detokenizer.push(letters(smol, "abcabc")) == "a"
    assert (detokenizer.push(letters(smol, "xyz")), detokenizer.finish()) == ("", "")
    assert (detokenizer.stopped, detokenizer.num_tokens_used) == ("b", 2)


def test_a_stop_within_the_first_min_tokens_is_ordinary_text(smol: Text) -> None:
    for min_tokens, expected in ((0, "a"), (1, "a"), (2, "aba"), (4, "ababa"), (6, "ababab")):
        detokenizer = Detokenizer(smol, stop=StopStrings(["b"]), min_tokens=min_tokens)
        assert "".join(streamed(detokenizer, letters(smol, "ababab"), 1)) == expected


def test_a_stop_in_what_only_the_end_reveals_still_counts(smol: Text) -> None:
    detokenizer = Detokenizer(smol, stop=StopStrings(["\ufffd"]))
    assert detokenizer.push(smol.encode("ab世")[:-1]) == "ab"
    assert (detokenizer.finish(), detokenizer.stopped) == ("", "\ufffd")


def test_an_empty_stop_string_is_refused(smol: Text) -> None:
    with pytest.raises(ValueError, match="stop must not contain an empty string"):
        Detokenizer(smol, stop=StopStrings(["a", ""]))


# Single tokens


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_joined_are_the_text(texts: dict[str, Text], kind: str) -> None:
    text = texts[kind]
    for sample in SAMPLES:
        ids = text.encode(sample, False)
        joined = b"".join(map(text.token_bytes, ids)).decode()
        assert joined == (sample if kind == "smol" else " " + sample)


def test_the_bytes_of_random_ids_joined_are_their_text(smol: Text) -> None:
    rng = random.Random(11)
    for _ in range(1000):
        ids = random_ids(rng, smol)
        assert b"".join(map(smol.token_bytes, ids)).decode(errors="replace") == smol.decode(ids, False)


def test_special_tokens_have_their_own_text(texts: dict[str, Text]) -> None:
    assert texts["smol"].token_bytes(2) == b"<|im_end|>"
    assert texts["llama"].token_bytes(max(texts["llama"].eos_ids)) == b"</s>"
    assert texts["llama"].special_ids == {0, 1, 2}


def test_tokens_that_are_no_whole_text_are_shown_as_bytes(smol: Text, small: Text) -> None:
    first = smol.encode("世")[0]
    assert smol.token_bytes(first) == b"\xe4\xb8"
    assert smol.token_bytes(smol.encode(" France")[0]) == b" France"
    assert small.token_bytes(small.encode("世", False)[1]) == b"\xe4"


# Ids


def test_encoding_and_decoding_agree_with_the_tokenizer(smol: Text, smollm2: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    for sample in SAMPLES:
        ids = tokenizer.encode(sample)
        assert smol.encode(sample) == ids
        assert smol.decode(ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False) == sample
    assert smol.decode(smol.encode("Hello , world .")) == "Hello , world ."


def test_special_tokens_are_added_only_when_asked_for(small: Text) -> None:
    assert small.encode("the cat") == [1, *small.encode("the cat", add_special_tokens=False)]
    assert small.decode(small.encode("the cat")) == "the cat"
    assert small.decode(small.encode("the cat"), skip_special_tokens=False) == "<s> the cat"


def test_half_a_surrogate_pair_is_refused(smol: Text) -> None:
    with pytest.raises(ValueError, match="surrogate pair at character 2"):
        smol.encode("ab\ud83c")


def test_the_vocabulary_size_lies_above_every_id(smol: Text, small: Text) -> None:
    assert smol.vocab_size == 49152
    assert small.knows(small.vocab_size - 1) and not small.knows(small.vocab_size) and not small.knows(-1)


# A model's folder


def saved(folder: Path, generation: object = None) -> str:
    sentencepiece_like(LLAMA).save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(
            generation if isinstance(generation, str) else json.dumps(generation)
        )
    return str(folder)


def test_the_folder_says_what_ends_a_text_and_how_to_sample(tmp_path: Path) -> None:
    given = {"eos_token_id": [5, 9], "temperature": 0.7, "top_k": None, "top_p": 1.0, "max_length": 20}
    text = Text.load(saved(tmp_path, given))
    assert text.eos_ids == {2, 5, 9}
    assert text.generation_defaults == {"temperature": 0.7, "top_p": 1.0}
    assert not text.bytewise
    assert text.decode(text.encode("the cat 世")) == "the cat 世"


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({"eos_token_id": 7}, {2, 5, 7}),
        ({"eos_token_id": [7, 8]}, {2, 5, 7, 8}),
        ({"text_config": {"eos_token_id": 9}}, {2, 5, 9}),
        ({"eos_token_id": None, "text_config": None}, {2, 5}),
    ],
)
def test_end_ids_count_whichever_file_names_them(tmp_path: Path, config: dict[str, Any], ends: set[int]) -> None:
    folder = saved(tmp_path, {"eos_token_id": 5})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    assert Text.load(folder).eos_ids == ends


@pytest.mark.parametrize("generation", [None, {"eos_token_id": 2}, {}])
def test_a_folder_may_say_nothing_about_generation(tmp_path: Path, generation: object) -> None:
    text = Text.load(saved(tmp_path, generation))
    assert (text.eos_ids, text.generation_defaults) == ({2}, {})


def test_a_folder_without_a_usable_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=f"the tokenizer in {tmp_path} can't be read"):
        Text.load(str(tmp_path))


def test_a_broken_generation_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json is not valid JSON"):
        Text.load(saved(tmp_path, "{"))


def test_a_decoder_that_cannot_be_streamed_exactly_is_refused(smollm2: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{smollm2}/tokenizer.json")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("e", "E")])
    with pytest.raises(ModelError, match="ByteLevel, Replace, and ByteLevel must stand alone"):
        Text(tokenizer, {})


def test_importing_the_module_loads_no_tokenizer_library() -> None:
    code = "import sys, turnout.server.text.tokenizer; print(sorted({'transformers', 'tokenizers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Conversations


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def with_template(template: str | None) -> Text:
    return Text(sentencepiece_like(LLAMA, template), {})


def shown(text: Text, ids: list[int]) -> str:
    return text.decode(ids, skip_special_tokens=False)


def test_a_conversation_gives_the_ids_that_transformers_gives(smol: Text, smollm2: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Hi 🎉"),
        {"role": "assistant", "content": "Ho"},
        user("?"),
    ]
    for count in (1, 2, 4):
        for prompt in (True, False):
            theirs = tokenizer.apply_chat_template(messages[:count], add_generation_prompt=prompt, return_dict=False)
            assert smol.chat(messages[:count], add_generation_prompt=prompt) == theirs


def test_there_is_exactly_one_start_token_where_both_template_and_tokenizer_write_one(small: Text) -> None:
    ids = small.chat([user("the cat")])
    assert ids.count(1) == 1 and ids[0] == 1
    assert small.encode("the cat").count(1) == 1


def test_a_turn_without_content_stays_in_its_place(small: Text) -> None:
    turns = [user("a"), {"role": "tool", "content": ""}, user("b")]
    assert small.chat(turns) == small.encode("<s>[user]a</s>[tool]</s>[user]b</s>[assistant]", False)


def test_a_conversation_needs_a_message(small: Text) -> None:
    with pytest.raises(ValueError, match="messages must not be empty"):
        small.chat([])


def test_every_argument_of_the_template_call_is_reserved(smol: Text) -> None:
    arguments = inspect.signature(smol._tokenizer.apply_chat_template).parameters.keys() - {"kwargs"}
    assert arguments <= RESERVED


def test_the_messages_of_the_caller_stay_as_they_are(small: Text) -> None:
    messages = [user("a"), {"role": "assistant", "content": ""}]
    before = json.dumps(messages)
    small.chat(messages)
    small.chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


def test_a_template_that_refuses_does_so_with_its_own_words_and_the_next_is_served() -> None:
    text = with_template(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + TEMPLATE
    )
    with pytest.raises(ValueError, match="^System role not supported$"):
        text.chat([{"role": "system", "content": "a"}])
    assert shown(text, text.chat([user("a")])).endswith("[assistant]")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_breaks_is_a_value_error(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_template(template).chat([user("a")])


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        with_template(None).chat([user("a")])


def test_tools_and_variables_reach_the_template(small: Text) -> None:
    ids = small.chat([user("a")], tools=[{"type": "function"}] * 2, template_kwargs={"loud": True})
    assert shown(small, ids).endswith("<tools:2>![assistant]")


@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "messages", "tools", "add_generation_prompt", "conversation"]
)
def test_a_variable_cannot_take_the_place_of_an_option(small: Text, name: str) -> None:
    with pytest.raises(ValueError, match=f"can't be called {name}"):
        small.chat([user("a")], template_kwargs={name: "x"})


@every("prefill", ["Sure", "Sure, here:\n", "  two ", "", "\n", "🎉", "a</s>b", "ends with \t"])
@pytest.mark.parametrize("trims", [False, True])
def test_a_continued_message_is_kept_to_the_character_and_nothing_follows(prefill: str, trims: bool) -> None:
    text = with_template(TEMPLATE.replace("m['content']", "m['content'] | trim") if trims else TEMPLATE)
    turns = [user("a"), {"role": "assistant", "content": prefill}]
    ids = text.chat(turns, add_generation_prompt=False, continue_final_message=True)
    assert ids == text.encode(f"<s>[user]a</s>[assistant]{prefill}", add_special_tokens=False)


def test_a_continued_message_ends_the_prompt_of_the_real_template(smol: Text) -> None:
    turns = [user("Count."), {"role": "assistant", "content": "One, two,\n"}]
    ids = smol.chat(turns, add_generation_prompt=False, continue_final_message=True)
    assert smol.decode(ids, False).endswith("<|im_start|>assistant\nOne, two,\n")
    assert ids[-len(smol.encode("One, two,\n")) :] == smol.encode("One, two,\n")


def test_to_continue_and_to_begin_contradict_each_other(small: Text) -> None:
    with pytest.raises(ValueError, match="contradict"):
        small.chat([user("a")], add_generation_prompt=True, continue_final_message=True)


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    text = with_template("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ValueError, match="leaves the last message out"):
        text.chat(
            [user("a"), {"role": "assistant", "content": "b"}], add_generation_prompt=False, continue_final_message=True
        )


def test_a_message_that_spells_the_internal_mark_is_harmless(small: Text) -> None:
    turns = [user("[the-answer-goes-on-here]"), {"role": "assistant", "content": "x [the-answer-goes-on-here] y"}]
    ids = small.chat(turns, add_generation_prompt=False, continue_final_message=True)
    assert shown(small, ids).endswith("[assistant]x [the-answer-goes-on-here] y")
