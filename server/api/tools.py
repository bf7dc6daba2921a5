"""tools, tool_choice and parallel_tool_calls of a chat: what may be called, what is shown to the model, what is forced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from turnout.core.parsers import Tool
from turnout.core.types import Sampling
from turnout.server.api.errors import bad_request, show
from turnout.server.api.schema import ChatRequest
from turnout.server.api.service import Service
from turnout.server.text import call_grammar

MODES = ("none", "auto", "required")
SHAPE = (
    '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)


class ToolUse(NamedTuple):
    """What a request's tools come to."""

    mode: str = "none"  # one of MODES
    tools: Sequence[Tool] = ()  # that may be called
    most: int | None = None  # calls in one answer
    narrowed: bool = False  # of the request's tools some may not be called

    @property
    def read(self) -> Sequence[Tool] | None:
        """What a tool parser is given; None: the answer is not looked at."""
        return None if self.mode == "none" else self.tools


def tool_use(body: ChatRequest) -> ToolUse:
    """Raises ApiError for a choice that can't be kept."""
    choice = body.tool_choice if body.tool_choice is not None else "auto" if body.tools else "none"
    most = None if body.parallel_tool_calls else 1
    if isinstance(choice, str):
        if choice not in MODES:
            raise bad_request(f"tool_choice must be {SHAPE}, got {show(choice)}", "tool_choice")
        if choice == "required" and not body.tools:
            raise bad_request("tool_choice is required, but there are no tools: send some", "tool_choice")
        return ToolUse(choice if body.tools else "none", body.tools, most)
    mode, names = _named(choice)
    tools = [tool for tool in body.tools if _name(tool) in names]
    for name in names:
        if name not in map(_name, tools):
            raise bad_request(f"tool_choice names {show(name)}, which is none of the tools", "tool_choice")
    return ToolUse(mode, tools, 1 if choice.get("type") == "function" else most, len(tools) < len(body.tools))


def _named(choice: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The mode and the functions that a choice in form of an object names."""
    found: object = None
    if choice.get("type") == "function":
        mode, found = "required", [choice]
    elif choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else ""
        found = allowed.get("tools") if isinstance(allowed, dict) and mode in ("auto", "required") else None
    names = [_name(tool) for tool in found] if isinstance(found, list) else []
    if not names or not all(names):
        raise bad_request(f"tool_choice must be {SHAPE}, got {show(choice)}", "tool_choice")
    return mode, names


def _name(tool: object) -> str:
    """The function's name; empty where there is none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def with_form(service: Service, body: ChatRequest, use: ToolUse, sampling: Sampling, *, reasons: bool) -> Sampling:
    """The sampling with the grammar that the tools ask for, which holds behind the reasoning. Raises ApiError."""
    asked, after = sampling.structured, service.parsers.reasoning.end if service.parsers.reasoning and reasons else ""
    form = service.parsers.tool.form(service.text.template) if service.parsers.tool and use.mode != "none" else None
    added, compact = service.text.added, service.config.whitespace == "compact"
    markers = service.parsers.tool.markers if service.parsers.tool else ()
    try:
        if use.mode == "required":
            if form is None:
                raise bad_request(_unforced(service), "tool_choice", "unsupported_parameter")
            spec = call_grammar.forced(form, use.tools, added, single=use.most == 1, compact=compact)
            after = form.follows if after and form.follows is not None else after
            return replace(sampling, structured=replace(spec, after=after))
        if form is not None and asked is not None:
            if asked.kind not in ("json_schema", "json_object"):
                raise ValueError(
                    f"tools go with response_format, not with a {asked.kind}: send one of them, or tool_choice: none"
                )
            schema = asked.value or '{"type": "object"}'
            spec = call_grammar.either(form, use.tools, added, schema, single=use.most == 1, compact=compact)
        elif form is not None and (use.narrowed or any(tool["function"].get("strict") for tool in use.tools)):
            found = call_grammar.strict(form, use.tools, markers, added, compact=compact)
            if found is None and use.narrowed:
                raise ValueError(
                    "allowed_tools can't be kept in this model's format with mode auto: send mode required"
                )
            if found is None:
                return sampling
            spec = found
        elif asked is not None and after:
            spec = asked
        else:
            return sampling
    except ValueError as error:
        raise bad_request(str(error), "tools") from None
    return replace(sampling, structured=replace(spec, after=after))


def _unforced(service: Service) -> str:
    name = service.parsers.tool_name
    return (
        f"calls can't be forced with tool_parser={name}: send tool_choice: auto"
        if name != "none"
        else "this server reads no tool calls (tool_parser=none): send tool_choice: none, or start it with tool_parser=auto"
    )
