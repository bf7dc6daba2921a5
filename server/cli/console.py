"""What the terminal shows once a server is ready. It knows no engine, only what is said about one."""

from __future__ import annotations

import json
import shlex

from turnout.core.types import EngineInfo

SLOTS = ("attention", "scheduler", "preemption", "blocks", "quant")  # in the order they are shown


def welcome(info: EngineInfo, url: str, *, name: str, chats: bool, needs_key: bool) -> str:
    """What is served, by what, and how to try it. `name` is the model's name in requests."""
    composition = " ".join(f"{slot}={info.plugins[slot]['name']}" for slot in SLOTS if slot in info.plugins)
    lines = [
        f"Turnout serves {name} at {url}",
        "",
        f"  model        {info.architecture} in {info.dtype} on {info.device}, context {info.max_model_len} tokens",
        f"  composition  {composition}",
        f"  cache        {info.num_blocks} blocks × {info.block_size} = {info.capacity} tokens",
        f"  a step       up to {info.max_num_seqs} requests, {info.max_num_batched_tokens} tokens",
        f"  fingerprint  {info.fingerprint}",
        *(f"  note         {note}" for note in info.notes),
        "",
        "Try it:",
        f"  {_curl(url, name, chats, needs_key)}",
        f"  {_openai(url, name, chats, needs_key)}",
    ]
    return "\n".join(lines)


def _curl(url: str, name: str, chats: bool, needs_key: bool) -> str:
    body: dict[str, object] = {"model": name, "max_tokens": 64}
    if chats:
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    else:
        body["prompt"] = "Once upon a time"
    route = "chat/completions" if chats else "completions"
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url}/v1/{route}{key} -H 'Content-Type: application/json' -d {data}"


def _openai(url: str, name: str, chats: bool, needs_key: bool) -> str:
    client = f"OpenAI(base_url={url + '/v1'!r}, api_key={'KEY' if needs_key else 'none'!r})"
    if chats:
        call = f"chat.completions.create(model={name!r}, messages=[{{'role': 'user', 'content': 'Hello!'}}])"
        return f"python: from openai import OpenAI; {client}.{call}"
    return f"python: from openai import OpenAI; {client}.completions.create(model={name!r}, prompt='Once upon a time')"
