"""The tokenizer of a .gguf file as a Hugging Face one. Knows no weights.

transformers rebuilds vocabulary and merges. How text is split before merging is only named in the file; where
transformers does not act on the name, it is done here, and a name nobody here knows is refused: ids would differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.plugins.formats.gguf.reader import Reader

if TYPE_CHECKING:
    from tokenizers import Tokenizer


CONTROL = 3  # the token type of special tokens
TURN_ENDS = (  # what llama.cpp takes for the end of an answer by its name, whatever type the file gives it
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endofturn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<EOT>",
    "_<EOT>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
)
PARTS = {"<|return|>", "<|call|>"}  # where both are, "<|end|>" ends a part of an answer only

# What llama.cpp does for each name of tokenizer.ggml.pre, beyond what transformers does.
_GPT2_SPLIT = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "trillion", "granite-docling"}
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_WORDS_FIRST = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}


def write_tokenizer(file: Reader, folder: Path, progress: Callable[[str], None]) -> list[int]:
    """Write the file's tokenizer and chat template, where it has them. Returns the ids that end a turn."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    tokens = file.get("tokenizer.ggml.tokens")
    if tokens is None:
        progress("it holds no tokenizer: prompts can only be token ids")
        return []
    architecture, vocabulary, options = get_gguf_tokenizer(str(file.path))
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    backend = _without_strangers(backend, len(tokens))
    if vocabulary["tokenizer_type"] == "gpt2":
        _split_like(file, backend, options, progress)
    elif vocabulary["tokenizer_type"] == "llama":
        _spaces(backend, prefix=vocabulary.get("add_prefix_space", not architecture.startswith("gemma")))
    kinds = file.get("tokenizer.ggml.token_type", [])
    control = {
        token: number for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == CONTROL
    }
    ends = _turn_ends(tokens)
    _make_special(backend, [t for n in ends if (t := tokens[n]) not in control and backend.token_to_id(t) == n])
    if wrong := [token for token, number in control.items() if backend.token_to_id(token) != number]:
        raise ValueError(f"its special tokens {wrong[:5]} get other ids than the file says")
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)
    stated = (file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys([n for n in stated if n is not None] + ends))


def _turn_ends(tokens: list[str]) -> list[int]:
    ends = {token: number for number, token in enumerate(tokens) if token in TURN_ENDS}
    if PARTS <= ends.keys():
        ends.pop("<|end|>", None)
    return [ends[token] for token in TURN_ENDS if token in ends]


def _make_special(backend: Tokenizer, tokens: list[str]) -> None:
    """Files that were made carelessly call them ordinary: their text must be one token all the same."""
    from tokenizers import AddedToken

    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])


def _split_like(file: Reader, backend: Tokenizer, options: dict[str, Any], progress: Callable[[str], None]) -> None:
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = file.get("tokenizer.ggml.pre", "default")
    if name == "default":
        progress("it does not say how its tokenizer splits text; taking GPT-2's way")
    elif name in _DIGITS_APART:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif name not in _GPT2_SPLIT and name not in GGUF_PRE_TOKENIZER_SPLITS:
        known = ", ".join(sorted(_GPT2_SPLIT | _DIGITS_APART | GGUF_PRE_TOKENIZER_SPLITS.keys()))
        raise ValueError(f"its tokenizer splits text like {name!r}, which isn't known; known: {known}")
    if name in _WORDS_FIRST:
        backend.model.ignore_merges = True
        options.setdefault("add_bos_token", True)


def _spaces(backend: Tokenizer, prefix: bool) -> None:
    """SentencePiece's way with spaces: each is a `▁`, and one more may stand before the text."""
    from tokenizers import decoders, normalizers

    spaces, bytes_too = normalizers.Replace(" ", "▁"), [decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefix else [spaces])
    backend.pre_tokenizer = None
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *bytes_too, *strip])


def _without_strangers(backend: Tokenizer, num_tokens: int) -> Tokenizer:
    """transformers adds the special tokens a family usually has, even where the file has none of that name."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < num_tokens]
    return Tokenizer.from_str(json.dumps(state))
