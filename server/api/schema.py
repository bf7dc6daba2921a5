"""The wire types of requests: what each field may hold. It knows no tokenizer and no engine.

Three rules hold for every body. A field that is null, {} or [] counts as absent, unless it is the prompt itself. An
unknown field is ignored, with a debug log line: clients add some every year. A known field whose effect this server
cannot give is refused by name (`refusals.py`), never dropped.
"""

from __future__ import annotations

import codecs
import logging
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from turnout.server.api import errors, fields
from turnout.server.api.connection import MAX_BODY
from turnout.server.api.errors import ApiError, bad_request
from turnout.server.api.refusals import refuse_beam, refuse_chat, refuse_common, refuse_completion

MAX_MESSAGES = 10_000  # in one chat
MAX_LOGPROBS = 20
MAX_BEST_OF = 20

log = logging.getLogger("turnout.server")

Count = Annotated[int, Field(ge=0, lt=2**53)]
Name = Annotated[str, Field(max_length=64)]


class Wire(BaseModel):
    """A JSON object from a client."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())
    kept_empty: ClassVar[frozenset[str]] = frozenset()  # fields in which null, {} and [] are not the same as absent

    @model_validator(mode="before")
    @classmethod
    def _tidied(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        given = {k: v for k, v in body.items() if k in cls.kept_empty or not (v is None or v == {} or v == [])}
        cls.refuse(given)
        unknown = given.keys() - cls.model_fields.keys()
        if unknown:
            log.debug("ignored unknown fields: %s", ", ".join(sorted(unknown)))
        return given

    @classmethod
    def refuse(cls, given: dict[str, object]) -> None:
        """Raise ApiError for a field whose effect this server cannot give."""


class StreamOptions(Wire):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(Wire):
    """What both endpoints take. Fields that are None were not given; a 0 was."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=MAX_BEST_OF)
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-10, le=10)
    early_stopping: Annotated[bool | Literal["never"], BeforeValidator(fields.early)] = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None  # the newer name wins
    min_tokens: Count = 0
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(fields.biases)] = {}
    stop: Annotated[list[str], BeforeValidator(fields.stops)] = []
    stop_token_ids: list[int] = Field([], max_length=1024)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | bool | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=1024)
    request_id: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = Field(None, max_length=1024)
    service_tier: str | None = Field(None, max_length=64)
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)] = {}

    @classmethod
    def refuse(cls, given: dict[str, object]) -> None:
        refuse_common(given)
        if "stream_options" in given and given.get("stream") in (None, False):
            raise bad_request("stream_options is for streams: send it with stream: true", "stream_options")
        if "prompt_logprobs" in given and given.get("stream") not in (None, False):
            raise bad_request("prompt_logprobs come with a whole answer: send stream: false", "prompt_logprobs")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        """Raise ApiError for fields that do not go together."""
        if self.num_made < self.n:
            raise bad_request(
                f"best_of must be at least n: of {self.num_made} answers {self.n} are asked for", "best_of"
            )
        refuse_beam({name: getattr(self, name) for name in self.model_fields_set}, beam=self.use_beam_search)
        if self.stream and self.num_made > self.n:
            raise bad_request(
                "which answers of best_of are the best is known at their end: send stream: false", "best_of"
            )
        return self

    @property
    def num_made(self) -> int:
        """Answers made for each prompt, of which `n` are returned. In a beam search, its width."""
        return self.n if self.best_of is None else self.best_of

    @property
    def limit(self) -> int | None:
        """The most tokens the client wants; None: it did not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Generation):
    """POST /v1/completions"""

    kept_empty = frozenset({"prompt"})
    prompt: Annotated[list[fields.Prompt], PlainValidator(fields.prompts)]  # millions of ids: looked at once
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @classmethod
    def refuse(cls, given: dict[str, object]) -> None:
        super().refuse(given)
        refuse_completion(given)


class Templated(Wire):
    """Messages, and how the chat template turns them into a prompt. `conversation.py` checks what a message may be."""

    kept_empty = frozenset({"messages"})
    messages: list[dict[str, object]] = Field(max_length=MAX_MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}
    tools: list[dict[str, object]] = []


class ChatRequest(Generation, Templated):
    """POST /v1/chat/completions"""

    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = Field(None, max_length=64)
    include_reasoning: bool = True

    @classmethod
    def refuse(cls, given: dict[str, object]) -> None:
        super().refuse(given)
        refuse_chat(given)
        if given.get("top_logprobs") not in (None, 0) and given.get("logprobs") is not True:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")


class Tokenize(Templated):
    """POST /tokenize, with a prompt or with messages"""

    kept_empty = frozenset()
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] = Field([], max_length=MAX_MESSAGES)
    add_special_tokens: bool = True  # of a prompt; the chat template writes them itself
    return_token_strs: bool = False

    @classmethod
    def refuse(cls, given: dict[str, object]) -> None:
        if ("prompt" in given) == ("messages" in given):
            raise bad_request("send either prompt or messages", "prompt")


class Detokenize(Wire):
    """POST /detokenize"""

    kept_empty = frozenset({"tokens"})
    model: str | None = None
    tokens: list[int]


WireT = TypeVar("WireT", bound=Wire)


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError for one that is too long or does not say that it is JSON.

    A web page can send any other type to a server on this machine without asking the browser first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
        raise ApiError(415, f"send the header Content-Type: application/json, got {errors.show(kind)}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, f"send the body as it is: Content-Encoding {errors.show(encoding)} is not understood here")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise ApiError(413, f"the body is longer than {MAX_BODY} bytes")
    return bytes(body.removeprefix(codecs.BOM_UTF8))


def parse(kind: type[WireT], body: bytes) -> WireT:
    """Raises ApiError naming the field, the rule and the value."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise errors.invalid(error) from None
