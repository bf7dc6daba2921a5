"""The server that is measured: what it says of itself, and how to start our own and be rid of it."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from turnout.lab.bench.config import Remote
from turnout.lab.bench.prompts import PromptModel

Values = dict[str, Any]
ORIGIN = ("model", "architecture", "dtype", "device", "fingerprint", "composition", "plugins", "versions", "notes")
STOP = 20.0  # seconds our server has to leave when told to
TIMEOUT = 10.0  # seconds for a question about the server itself


class ServedModel(NamedTuple):
    """A server as it is asked and recorded."""

    url: str
    name: str  # of the model, in requests
    model: PromptModel
    ours: bool
    seats: int  # requests it runs at once; 0: it does not say
    origin: Values  # what it is made of, as far as it says


def look(url: str, options: Remote) -> ServedModel:
    """Ask a server what it is. Raises ValueError saying which option would tell what it does not."""
    url = url.rstrip("/").removesuffix("/v1")
    models, info = _get(f"{url}/v1/models", options), _info(url, options)
    listed = (models or {}).get("data") or []
    if models is None and options.model_name is None:
        raise ValueError(
            f"{url}/v1/models does not answer as OpenAI's does: is it such a server? remote.model_name names a model"
        )
    name = options.model_name or (listed[0]["id"] if listed else "")
    if not name:
        raise ValueError(f"{url} lists no model: name one with remote.model_name")
    card: Values = next((card for card in listed if card.get("id") == name), {})
    vocab_size = _known("vocab_size", options.vocab_size or info.get("vocab_size"), url)
    longest = options.max_model_len or info.get("max_model_len") or card.get("max_model_len")
    max_model_len = min(_known("max_model_len", longest, url), info.get("capacity", math.inf))
    ours = "turnout" in (info.get("versions") or {})
    origin = {key: info[key] for key in ORIGIN if key in info} | {"url": url}
    return ServedModel(
        url, name, PromptModel(vocab_size, int(max_model_len)), ours, info.get("max_num_seqs", 0), origin
    )


def is_local(url: str) -> bool:
    """Whether it is on this machine: then no proxy is between."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def counters(url: str, options: Remote) -> Values:
    """Our server's own counters; empty for another's."""
    stats: Values = _info(url, options).get("stats") or {}
    return stats


def _known(key: str, value: Any, url: str) -> int:
    if isinstance(value, int):
        return value
    raise ValueError(f"{url} does not say its model's {key}, and prompts are made of token ids: give remote.{key}")


@contextmanager
def serving(overrides: Sequence[str], threads: int | None) -> Iterator[str]:
    """Our server on a free port, in a process group that hears no Ctrl-C. Stopped, or else killed, at the end.

    Raises ValueError with its own words when it does not start.
    """
    command = [sys.executable, "-P", "-c", "from turnout.server.cli.main import main; main()", "serve"]
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with tempfile.TemporaryDirectory(prefix="turnout-bench-") as folder:
        said, complained = Path(folder, "out"), Path(folder, "err")
        with said.open("wb") as out, complained.open("wb") as err:
            process = subprocess.Popen(
                [*command, "server.port=0", *overrides],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )
        try:
            while "Ready after" not in said.read_text():
                if process.poll() is not None:
                    raise ValueError(f"the server did not start: {complained.read_text().strip()[-2000:]}")
                time.sleep(0.1)
            found = re.search(r" at (http://\S+)", said.read_text())
            assert found is not None
            yield found.group(1)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _info(url: str, options: Remote) -> Mapping[str, Any]:
    return _get(f"{url}/server_info", options) or {}


def _get(url: str, options: Remote) -> Values | None:
    """A JSON object; None: there is none. Raises ValueError when nobody is there."""
    import httpx

    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        reply = httpx.get(url, headers=headers, timeout=TIMEOUT, trust_env=not is_local(url))
    except httpx.HTTPError as error:
        raise ValueError(f"{url} cannot be reached: {error or type(error).__name__}") from None
    if reply.status_code == 401:
        raise ValueError(f"{url} asks for a key: give remote.api_key")
    try:
        found = reply.json() if reply.status_code == 200 else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
