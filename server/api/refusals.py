"""Fields of the OpenAI API and its common extensions that change an answer and that this server cannot honour yet.

Each is refused by name with what to do instead. A field that is false or "" counts as not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

from turnout.server.api.errors import bad_request, unsupported

COMMON = {
    "guided_whitespace_pattern": "send structured_outputs with whitespace: compact or any",
    "allowed_token_ids": "ban the others with logit_bias",
    "bad_words": "ban their tokens with logit_bias",
    "logits_processors": "leave it out",
    "kv_transfer_params": "leave it out",
    "prompt_embeds": "send text or token ids",
    "truncate_prompt_tokens": "shorten the prompt before sending it; POST /tokenize counts its tokens",
}
COMPLETION = {"suffix": "leave it out; a model made for filling gaps takes its own markers in the prompt"}
CHAT = {
    "functions": "send tools, whose older form they are",
    "thinking_token_budget": "leave it out; max_tokens bounds reasoning and answer together",
    "audio": "ask for text",
    "chat_template": "set up the model's own template; chat_template_kwargs reaches its options",
    "documents": "put their text into a message",
    "echo": "leave it out; the client has the messages",
    "mm_processor_kwargs": "send text only",
}
BEAM = {  # the value that asks for nothing, and what to do
    "temperature": (0, "nothing is drawn: send 0 or leave it out"),
    "stream": (False, "the answers are known at the end only: send stream: false"),
    "stop": ([], "a beam is tokens, not text: end it with stop_token_ids, or cut the text where you get it"),
    "logit_bias": ({}, "beams are ranked by the model's own log-probabilities: leave it out"),
    "presence_penalty": (0, "beams are ranked by the model's own log-probabilities: leave it out"),
    "frequency_penalty": (0, "beams are ranked by the model's own log-probabilities: leave it out"),
    "repetition_penalty": (1, "beams are ranked by the model's own log-probabilities: leave it out"),
}
BEAM_ONLY = {"length_penalty": 1, "early_stopping": False}


def refuse_common(given: Mapping[str, object]) -> None:
    """Raise ApiError for a field neither endpoint can honour."""
    _refuse(given, COMMON)


def refuse_completion(given: Mapping[str, object]) -> None:
    """Raise ApiError for a field /v1/completions cannot honour."""
    _refuse(given, COMPLETION)


def refuse_chat(given: Mapping[str, object]) -> None:
    """Raise ApiError for a field /v1/chat/completions cannot honour."""
    _refuse(given, CHAT)
    kinds = given.get("modalities", ["text"])
    if kinds != ["text"]:
        raise unsupported("modalities", 'this server answers with text: leave it out or send ["text"]')
    if given.get("function_call", "none") not in ("none", "auto"):
        raise unsupported("function_call", CHAT["functions"])


def refuse_beam(given: Mapping[str, object], *, beam: bool) -> None:
    """Raise ApiError for a field that a beam search has no use for, or that has no use without one."""
    for name, (nothing, remedy) in BEAM.items() if beam else ():
        if given.get(name, nothing) != nothing:
            raise bad_request(f"{name} does not go with use_beam_search: {remedy}", name)
    for name, nothing in () if beam else BEAM_ONLY.items():
        if given.get(name, nothing) != nothing:
            raise bad_request(f"{name} is for beam search: send it with use_beam_search: true", name)


def _refuse(given: Mapping[str, object], table: Mapping[str, str]) -> None:
    for name, remedy in table.items():
        if given.get(name, False) not in (False, ""):
            raise unsupported(name, remedy)
