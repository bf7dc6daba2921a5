"""The server as a process among others: its port, its signals, its exit code, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from fake_server import serving, wait_until

from turnout.compose.plugins import PluginError
from turnout.server.cli.serve import _check_same, _url, listen
from turnout.server.config import ServerConfig


class Reader:
    """Reads a stream of lines on its own thread."""

    def __init__(self, url: str) -> None:
        self.lines: list[str] = []
        self._url = url
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("GET", self._url, timeout=20) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
        except httpx.HTTPError as error:
            self.lines.append(f"broken: {type(error).__name__}")

    def wait_for(self, num: int) -> None:
        wait_until(lambda: len(self.lines) >= num)

    def end(self) -> list[str]:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.lines


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.slow
def test_ctrl_c_drains_for_a_while_with_the_port_open_then_ends_the_rest_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, ServerConfig(port=0, drain_timeout=1.5)) as served:
        url = served.url
        assert served.health() == 200
        streams = [Reader(f"{url}/count/{name}") for name in ("a?n=100", "b?n=60", "endless?n=9&do=wait")]
        for stream, num_lines in zip(streams, (3, 3, 1), strict=True):
            stream.wait_for(num_lines)
        began = time.monotonic()
        os.killpg(served.pid, signal.SIGINT)
        wait_until(lambda: served.health() == 503)
        late = httpx.get(f"{url}/count/late?n=3")
        assert (late.status_code, late.text) == (503, "draining")
        assert streams[0].end() == ["begun", *map(str, range(100)), "done"]
        assert streams[1].end() == ["begun", *map(str, range(60)), "done"]
        refusal = "error: the server is shutting down and the request did not end in time"
        assert streams[2].end() == ["begun", refusal]
        assert served.exit_code() == 0
        assert 1.5 <= time.monotonic() - began < 5
        assert "3 open requests may take up to 1.5 s (server.drain_timeout)" in served.stderr
        assert served.left_behind() == []


def test_a_second_signal_ends_it_at_once_even_in_the_middle_of_a_step(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        stream = Reader(f"{served.url}/count/endless?n=9&do=freeze")
        stream.wait_for(1)
        os.kill(served.pid, signal.SIGTERM)
        wait_until(lambda: "stopping" in served.stderr)
        time.sleep(0.15)
        began = time.monotonic()
        os.kill(served.pid, signal.SIGTERM)
        assert served.exit_code() == 128 + signal.SIGTERM
        assert time.monotonic() - began < 3
        assert stream.end()[-1].startswith(("error: the server was ended at once", "broken"))
        assert served.left_behind() == []


def test_the_engines_process_goes_when_the_server_is_killed_even_in_the_middle_of_a_step(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        stream = Reader(f"{served.url}/count/endless?n=9&do=freeze")
        stream.wait_for(1)
        assert served.note_children()
        os.kill(served.pid, signal.SIGKILL)
        assert served.exit_code() == -signal.SIGKILL
        assert served.left_behind() == []
        stream.end()


def test_a_dead_engine_ends_the_server_with_a_code_of_its_own_for_a_supervisor(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        waiting = Reader(f"{served.url}/count/endless?n=9&do=wait")
        waiting.wait_for(1)
        guilty = Reader(f"{served.url}/count/guilty?n=9&do=exit")
        for stream in (waiting, guilty):
            assert stream.end() == ["begun", "error: the engine process died: exit code 7"]
        assert served.exit_code() == 70
        assert "the engine process died: exit code 7. The server ends with code 70" in served.stderr
        assert served.left_behind() == []


def test_or_the_engine_is_started_again_and_serves(tmp_path: Path) -> None:
    with serving(tmp_path, ServerConfig(port=0, on_engine_death="restart"), least_life="0") as served:
        for _ in range(2):
            guilty = Reader(f"{served.url}/count/guilty?n=9&do=exit")
            assert guilty.end() == ["begun", "error: the engine process died: exit code 7"]
            wait_until(lambda: served.health() == 200)
            served.note_children()
            again = Reader(f"{served.url}/count/next?n=2")
            assert again.end() == ["begun", "0", "1", "done"]
        assert served.stderr.count("the engine is back") == 2
        os.kill(served.pid, signal.SIGTERM)
        assert served.exit_code() == 0
        assert served.left_behind() == []


def test_an_engine_that_dies_at_once_is_not_started_again(tmp_path: Path) -> None:
    with serving(tmp_path, ServerConfig(port=0, on_engine_death="restart")) as served:
        Reader(f"{served.url}/count/guilty?n=9&do=exit").end()
        assert served.exit_code() == 70


def test_until_it_is_ready_every_route_answers_503_and_a_signal_ends_it(tmp_path: Path) -> None:
    half_written = tmp_path / "half written"
    half_written.touch()
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with serving(tmp_path, ServerConfig(port=port), load="tidy", file=str(half_written)) as served:
        wait_until(lambda: psutil.Process(served.pid).children())
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=20)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["message"] == "the server cannot answer now: loading"
        served.note_children()
        os.killpg(served.pid, signal.SIGINT)
        assert served.exit_code(within=5) == 0
        assert served.left_behind() == []
        assert "Ready" not in served.stdout


def test_an_engine_that_cannot_be_loaded_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    with serving(tmp_path, load="value error") as served:
        assert served.exit_code() == 1
        assert served.stderr == "turnout: attention=warp is not installed\n"
        assert served.stdout == ""


def test_a_taken_port_ends_it_before_anything_is_loaded(tmp_path: Path) -> None:
    with taken_port() as port, serving(tmp_path, ServerConfig(port=port), load="forever") as served:
        assert served.exit_code() == 1
        assert f"turnout: cannot listen on 127.0.0.1:{port}: " in served.stderr
        assert "server.port" in served.stderr and served.stderr.count("\n") == 1


def test_a_second_server_cannot_listen_where_one_listens_though_it_serves_nothing_yet() -> None:
    with listen("localhost", 0) as first:
        host, port = first.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(OSError):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:{}"), ("0.0.0.0", "http://127.0.0.1:{}"), ("::1", "http://[::1]:{}")],
)
def test_the_url_can_be_opened_from_this_machine(host: str, url: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with listen(host, 0) as listener:
        assert _url(listener) == url.format(listener.getsockname()[1])


def test_other_plugins_in_the_engines_process_are_refused() -> None:
    ours = {"scheduler": {"name": "sjf", "package": "mine", "version": "2"}}
    _check_same(ours, ours)
    with pytest.raises(PluginError, match="found other plugins"):
        _check_same({"scheduler": {"name": "sjf", "package": "mine", "version": "1"}}, ours)


def test_idle_connections_outlive_those_of_proxies() -> None:
    assert ServerConfig().keep_alive > 90, "what the usual ones keep, nginx 60 s, AWS and GCP up to 90"
    with pytest.raises(ValueError, match=r"server\.keep_alive must be above 0"):
        ServerConfig(keep_alive=0)


@pytest.mark.parametrize(
    ("options", "warned"), [({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_key": "k"}, False), ({}, False)]
)
def test_a_port_that_others_reach_without_a_key_is_warned_of(
    tmp_path: Path, options: dict[str, str], warned: bool
) -> None:
    with serving(tmp_path, ServerConfig(port=0, **options)) as served:  # type: ignore[arg-type]
        assert served.url
        assert ("it asks for no key" in served.stderr) == warned


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6 beside IPv4")
def test_every_address_is_of_either_family() -> None:
    try:
        found = listen("::", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with found, socket.create_connection(("127.0.0.1", found.getsockname()[1]), timeout=5):
        pass
