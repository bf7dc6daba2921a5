"""Chat messages from the wire to what a chat template reads. It knows no tokenizer.

A template meets plain texts: parts are joined by line breaks, a missing or null content becomes "", fields that are null
are absent, the arguments of a past tool call become an object. The developer role is called system, as templates know it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from turnout.server.api.errors import ApiError, bad_request, show, unsupported
from turnout.server.text.tokenizer import RESERVED

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}  # type -> its field
MEDIA_PARTS = {"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file"}
Message = dict[str, object]


def normalize(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Messages for the template, in order. Raises ApiError naming the message that is wrong."""
    if not messages:
        raise bad_request("messages is empty: a chat needs at least one message", "messages")
    plain = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    _name_results(plain)
    return plain


def _name_results(messages: Sequence[Message]) -> None:
    """Give each tool's result the name of the function that was called: some templates ask for it, most clients send the
    call's id alone."""
    names: dict[object, str] = {}
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            names[call.get("id")] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


def check_template_kwargs(kwargs: Mapping[str, object]) -> None:
    """Raise ApiError for a name that is not the template's to read."""
    for name in sorted(kwargs.keys() & RESERVED):
        raise bad_request(f"chat_template_kwargs may not set {name}", "chat_template_kwargs")


def check_tools(tools: Sequence[Mapping[str, object]]) -> None:
    """Raise ApiError for a tool that is not a function with a name."""
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
            raise bad_request(f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}', "tools")
        if not isinstance(function.get("parameters"), dict | None):
            raise bad_request(f"tools[{index}].function.parameters must be a JSON schema, an object", "tools")


def _message(message: Mapping[str, object], place: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{place}.role must be one of {', '.join(ROLES)}, got {show(role)}", f"{place}.role")
    kept = {name: value for name, value in message.items() if value is not None}
    kept["role"] = "system" if role == "developer" else role
    kept["content"] = _content(message.get("content"), f"{place}.content")
    if thought := kept.get("reasoning_content", kept.get("reasoning")):  # templates have either name
        kept |= {"reasoning_content": thought, "reasoning": thought}
    calls = kept.pop("tool_calls", None)
    if calls:
        kept["tool_calls"] = _calls(calls, f"{place}.tool_calls")
    return kept


def _content(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, (dict, str)) for part in content):
        raise bad_request(f"{place} must be a text or a list of parts, got {show(content)}", place)
    return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if not isinstance(part, dict):
        return str(part)
    kind = part.get("type")
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        raise _no_media(kind, place)
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise bad_request(f"{place}.type must be text, got {show(kind)}", f"{place}.type")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise bad_request(f"{place}.{TEXT_PARTS[kind]} must be a text, got {show(text)}", f"{place}.{TEXT_PARTS[kind]}")
    return text


def _no_media(kind: str, place: str) -> ApiError:
    error = unsupported(f"a part of type {kind}", "send parts of type text only")
    error.param = place
    return error


def _calls(calls: object, place: str) -> list[Message]:
    if not isinstance(calls, list):
        raise bad_request(f"{place} must be a list, got {show(calls)}", place)
    read: list[Message] = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            form = '{"id", "type": "function", "function": {"name", "arguments"}}'
            raise bad_request(f"{place}[{index}] must be {form}, got {show(call)}", f"{place}[{index}]")
        read.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return read


def _arguments(arguments: object) -> object:
    """Templates print the arguments themselves, so they want the object, not its text. What is no object stays as it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
