"""Text to token ids and back: the tokenizer, the chat template, what the model's folder says about generation.

It wraps a tokenizer of the `tokenizers` library and knows no request and no engine. Its methods may be called from
several threads at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from turnout.core import ModelError

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
RESERVED = {  # what a template's variables can't be called: the call's own arguments
    "messages",
    "conversation",
    "conversations",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "sanitize_control_tokens",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
}
SHORT = 1024  # tokens that are decoded without letting others run meanwhile
PROBE = "Hello wörld, 世界 สวัสดี 🎉\n\tif x: return"

Message = Mapping[str, Any]  # with a role and its content as one text


class Text:
    """A model's tokenizer and chat template. Make one with `load`."""

    def __init__(self, tokenizer: Any, generation: Mapping[str, Any], ends: Sequence[int] = ()) -> None:
        """`tokenizer`: a fast tokenizer of transformers; `generation`: what generation_config.json holds; `ends`: end ids
        that others of the model's files name."""
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._tokens: dict[int, str] = {
            i: token for token, i in self._backend.get_vocab(with_added_tokens=True).items()
        }
        self._bytes: dict[int, bytes] = {}  # by id, filled when asked for
        self.vocab_size = max(self._tokens) + 1  # every id the tokenizer knows is below it
        self.special_ids = frozenset(i for i, t in self._backend.get_added_tokens_decoder().items() if t.special)
        self.eos_ids = frozenset([*_ints(tokenizer.eos_token_id), *_ints(generation.get("eos_token_id")), *ends])
        self.generation_defaults = {k: generation[k] for k in DEFAULTS if generation.get(k) is not None}
        decoders = _types(self._backend.decoder)
        self.bytewise = "ByteLevel" in decoders  # the text of ids is their joined bytes, as UTF-8
        self._byte_ids = (
            {i for i, t in self._tokens.items() if _byte(t) is not None} if "ByteFallback" in decoders else set()
        )
        if self.bytewise:
            self._check_bytes()

    @classmethod
    def load(cls, folder: str) -> Text:
        """Read the tokenizer in a Hugging Face folder. Raises ModelError when there is none that can be used."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # what transformers raises depends on what the files lack
            raise ModelError(f"the tokenizer in {folder} can't be read: {error}") from error
        if not tokenizer.is_fast:
            raise ModelError(
                f"the tokenizer in {folder} is a {type(tokenizer).__name__}, which the tokenizers library can't run; "
                "put a tokenizer.json into the folder"
            )
        generation, config = (_object(Path(folder) / f"{name}.json") for name in ("generation_config", "config"))
        inner = config.get("text_config")
        ends = [config.get("eos_token_id"), inner.get("eos_token_id") if isinstance(inner, dict) else None]
        return cls(tokenizer, generation, [i for end in ends for i in _ints(end)])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Special tokens that are spelled out in it become ids too."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half a surrogate pair at character {error.start}, which is no text"
            ) from None
        # a batch of one: the other call keeps the interpreter to itself while it works, seconds for a long text
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids the tokenizer does not know are left out; invalid bytes become U+FFFD."""
        known = [i for i in ids if i in self._tokens]
        if len(known) <= SHORT:
            text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        else:  # as in `encode`
            (text,) = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)
        return text

    def knows(self, token: int) -> bool:
        return token in self._tokens

    def is_byte(self, token: int) -> bool:
        """Whether the id is one byte spelled <0xNN>, whose meaning depends on the bytes around it."""
        return token in self._byte_ids

    @cached_property
    def anchor(self) -> int:
        """An ordinary token: what another one adds to a text shows behind it, not at a text's start."""
        for token in sorted(self._tokens.keys() - self.special_ids - self._byte_ids):
            if self.decode([token]).isalnum():
                return token
        raise ModelError("the tokenizer has no token that is a word or a number, so texts can't be told apart")

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id adds to a text; those of several ids, joined, are the UTF-8 of theirs. Unknown ids: none.

        Tokenizers that drop a space from the start of a text still have it here.
        """
        found = self._bytes.get(token)
        if found is None:
            if token not in self._tokens:
                return b""
            found = self._bytes[token] = self._find_bytes(token)
        return found

    @cached_property
    def template(self) -> str:
        """The chat template's source, of several all of them; "": there is none."""
        found = self._tokenizer.chat_template
        return "\n".join(found.values()) if isinstance(found, dict) else found or ""

    @cached_property
    def added(self) -> Mapping[str, int]:
        """The ids of the tokens that were added to the vocabulary, by their texts: those that stand for themselves."""
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt ids of a conversation: those of what `render` makes of it. Raises ValueError as it does."""
        text = self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation of messages whose content is a text. With `continue_final_message` it ends with the
        last message, to the character.

        Start tokens are the template's business: none is added. Raises ValueError, with the template's own message
        where there is one, for whatever can't be rendered.
        """
        if add_generation_prompt and continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other: set one of them")
        if self._tokenizer.chat_template is None:
            raise ValueError("this model has no chat template, so it takes completions only")
        if not messages:
            raise ValueError("messages must not be empty")
        options = dict(template_kwargs or {})
        for name in sorted(options.keys() & RESERVED):
            raise ValueError(f"a chat template's variable can't be called {name}: the name is taken")
        options |= {"tools": [dict(tool) for tool in tools] if tools else None}
        if not self.calls_as_objects:
            messages = [_with_text_arguments(message) for message in messages]
        if continue_final_message:
            return self._continued(messages, options)
        return self._render(messages, options, add_generation_prompt)

    @cached_property
    def calls_as_objects(self) -> bool:
        """Whether the template wants the arguments of past calls as objects, which it prints itself, or as JSON text, which
        it copies. Found out by rendering a call."""
        if not self.template:
            return True
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "probe", "arguments": {"probe_key": "value"}},
        }
        said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "1", "name": "probe", "tool_call_id": "call00000"}
        turns: list[Message] = [{"role": "user", "content": "a"}, said, result]
        try:
            return "'probe_key'" not in self._render(turns, {"tools": None}, False)
        except ValueError:
            pass
        try:
            self._render([turns[0], _with_text_arguments(said), result], {"tools": None}, False)
        except ValueError:
            return True  # it can't show calls at all
        return False

    def _render(self, messages: Sequence[Message], options: Mapping[str, Any], prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **options
            )
        except TemplateError as error:
            raise ValueError(error.message or type(error).__name__) from error
        except Exception as error:  # a template is a program: what it may raise is not known
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return text

    def _continued(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """The conversation up to the last character of its last message."""
        last, start = messages[-1], messages[:-1]
        mark = "[the-answer-goes-on-here]"
        while any(mark in str(message) for message in messages):
            mark = f"[{mark}]"
        prefill: str = last["content"]
        for content in (prefill + mark, mark):  # the second when the template changes the text, trims it for one
            head, found, _ = self._render([*start, {**last, "content": content}], options, False).rpartition(mark)
            if found and (head.endswith(prefill) or content == mark):
                return head if content != mark else head + prefill
        raise ValueError("the chat template leaves the last message out, so it can't be continued")

    def _find_bytes(self, token: int) -> bytes:
        spelled = self._tokens[token]
        if self.bytewise:
            try:
                return bytes([_BYTE_OF[char] for char in spelled])
            except KeyError:  # an added token, written as it is
                return spelled.encode()
        if token in self.special_ids:
            return spelled.encode()
        if token in self._byte_ids:
            return bytes([_byte(spelled) or 0])
        return self.decode([self.anchor, token])[len(self.decode([self.anchor])) :].encode()

    def _check_bytes(self) -> None:
        ids = self.encode(PROBE) + sorted(self._tokens)[:: max(1, len(self._tokens) // 500)]
        text = b"".join(map(self.token_bytes, ids)).decode(errors="replace")
        if text != self.decode(ids, skip_special_tokens=False):
            raise ModelError(
                "the tokenizer's decoder does more than join bytes, so its text can't be streamed exactly; "
                f"its parts are {', '.join(_types(self._backend.decoder))}, and ByteLevel must stand alone"
            )


def _with_text_arguments(message: Message) -> Message:
    """The message, the arguments of its calls as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _printed(call["function"])} for call in calls]}


def _printed(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _object(path: Path) -> dict[str, Any]:
    """A JSON object, or nothing where there is no file. Raises ModelError for what is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object, got {found!r}")
    return found


def _ints(value: Any) -> list[int]:
    """The token ids among them."""
    return [v for v in (value if isinstance(value, list) else [value]) if type(v) is int and v >= 0]


def _types(decoder: Any) -> list[str]:
    """The kinds of decoders a tokenizer chains."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _byte(token: str) -> int | None:
    """The byte that a token like <0x0A> stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_chars() -> dict[str, int]:
    """How byte-level tokenizers spell bytes: printable ones as themselves, others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_chars()
