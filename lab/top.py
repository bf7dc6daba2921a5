"""`turnout top`: what a running server is doing, in this terminal. It knows the server only by its HTTP routes.

Everything comes from /metrics, as two scrapes apart; the steps themselves from /debug/engine where server.debug=true.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from turnout.server.cli.overrides import Usage
from turnout.server.cli.progress import complain

if TYPE_CHECKING:
    from rich.console import RenderableType

USAGE = "turnout top [url=http://127.0.0.1:8000] [every=1.0] [once=true] [api_key=KEY]"
TIMEOUT = 5.0  # seconds a server has to answer
NUM_STEPS = 12  # steps shown
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # no proxy leads there


class NoServer(Exception):
    """Nothing can be shown; the message says why, and what to do."""


@dataclass(frozen=True)
class TopOptions:
    """Of the command line."""

    url: str = "http://127.0.0.1:8000"
    every: float = 1.0  # seconds between frames
    once: bool = False
    api_key: str | None = None


@dataclass(frozen=True)
class MetricsSample:
    """A server at one moment."""

    at: float  # seconds, this machine's monotonic clock
    series: Mapping[str, float]  # sums over all labels
    modes: Mapping[str, float]  # preemptions by mode
    plugins: Mapping[str, str]
    model: str
    steps: list[dict[str, Any]] = field(default_factory=list)  # the last ones, where the server tells

    def of(self, name: str) -> float:
        return self.series.get(name, 0.0)


def run(args: list[str]) -> int:
    """Returns the exit code: 1 when no server answers. Raises Usage."""
    if args and args[0] in ("-h", "--help"):
        print(f"usage: {USAGE}")
        return 0
    options = parsed(args)
    try:
        _watch(options)
    except NoServer as error:
        complain(error)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def parsed(args: list[str]) -> TopOptions:
    given: dict[str, Any] = {}
    for arg in args:
        key, equals, value = ("once", "=", "true") if arg == "--once" else arg.partition("=")
        if not equals or key not in TopOptions.__dataclass_fields__:
            raise Usage(f"{arg!r} is nothing turnout top takes; usage: {USAGE}")
        given[key] = value
    if "once" in given:
        given["once"] = given["once"].lower() == "true"
    if "every" in given:
        try:
            given["every"] = float(given["every"])
        except ValueError:
            raise Usage(f"every must be a number of seconds, got {given['every']!r}") from None
        if not given["every"] > 0:
            raise Usage(f"every must be above 0, got {given['every']}")
    if "url" in given and urlsplit(given["url"]).scheme not in ("http", "https"):
        raise Usage(f"url must begin with http:// or https://, got {given['url']!r}")
    return TopOptions(**given)


def _watch(options: TopOptions) -> None:
    from rich.console import Console
    from rich.live import Live

    console, before = Console(), scrape(options)  # raises before the screen is taken
    in_place = console.is_terminal and not options.once
    with Live(console=console, screen=True, auto_refresh=False) if in_place else nullcontext() as live:
        while True:
            time.sleep(options.every)
            now = scrape(options)
            picture, before = frame(before, now, options.url), now
            console.print(picture) if live is None else live.update(picture, refresh=True)
            if options.once:
                return


def scrape(options: TopOptions) -> MetricsSample:
    """Raises NoServer."""
    from prometheus_client.parser import text_string_to_metric_families

    text = _get(options, "/metrics")
    if text is None:
        raise NoServer(f"{options.url} has no /metrics, so it is no Turnout server; name another with url=URL")
    series: dict[str, float] = {}
    modes: dict[str, float] = {}
    plugins: Mapping[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "turnout:engine_plugins_info":
                plugins = sample.labels
            elif sample.name == "turnout:preemptions_total":
                modes[sample.labels["mode"]] = sample.value
            elif not sample.name.endswith("_bucket"):
                series[sample.name] = series.get(sample.name, 0.0) + sample.value
    if not plugins:
        raise NoServer(f"{options.url} answers, but its metrics are not Turnout's; name another with url=URL")
    if "vllm:num_requests_running" not in series:
        raise NoServer(f"{options.url} does not show the metrics of v1; start it with server.metrics_compat=[v1]")
    debug = _get(options, "/debug/engine")
    steps = [] if debug is None else json.loads(debug)["steps"]
    return MetricsSample(time.monotonic(), series, modes, plugins, plugins.get("model_name", ""), steps)


def _get(options: TopOptions, route: str) -> str | None:
    """The reply's text; None: the route is not there, or not open to us."""
    url = options.url.rstrip("/") + route
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    direct = urlsplit(options.url).hostname in LOOPBACK
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if direct else []))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (401, 404):
                return None
            raise NoServer(f"{url} answers {error.code} {error.reason}: {_message(error.read())}") from error
    except OSError as error:  # URLError is one
        reason = getattr(error, "reason", error)
        raise NoServer(
            f"no server answers at {options.url}: {reason}. Start one with turnout serve, or name another with url=URL"
        ) from error


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "no reason given"


def frame(before: MetricsSample, now: MetricsSample, url: str) -> RenderableType:
    """One picture: what holds now, and what happened between the two."""
    from rich.console import Group
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(before, now):
        table.add_row(name, value)
    parts: list[RenderableType] = [f"[bold]Turnout[/bold] · {now.model} at {url}", "", table]
    parts.append("")
    parts.append(_steps(now.steps) if now.steps else "single steps: start the server with server.debug=true")
    return Group(*parts)


def rows(before: MetricsSample, now: MetricsSample) -> list[tuple[str, str]]:
    """The lines of a frame."""
    seconds = max(now.at - before.at, 1e-9)

    def grown(name: str) -> float:
        return now.of(name) - before.of(name)

    steps = grown("turnout:step_seconds_count")
    computed = grown("vllm:prompt_tokens_total") - grown("vllm:prompt_tokens_cached_total")
    computed += grown("turnout:recomputed_tokens_total")
    made = grown("vllm:generation_tokens_total")
    looked, found = now.of("vllm:prefix_cache_queries_total"), now.of("vllm:prefix_cache_hits_total")
    preempted = ", ".join(f"{count:.0f} by {mode}" for mode, count in sorted(now.modes.items()))
    a_step, itself = "nothing was computed", "none"
    if steps:
        a_step = f"{computed / steps:.1f} prompt + {made / steps:.1f} decode tokens"
        took, decided = grown("turnout:step_seconds_sum"), grown("turnout:scheduler_decision_seconds_sum")
        itself = f"{steps / seconds:.1f} a second, {took / steps * 1e3:.1f} ms each, {decided / steps * 1e3:.2f} ms to schedule"
    use = now.of("vllm:kv_cache_usage_perc")
    return [
        ("queue", f"{now.of('vllm:num_requests_waiting'):.0f} waiting"),
        ("running", f"{now.of('vllm:num_requests_running'):.0f}"),
        ("blocks", f"{_bar(use)} {use:.0%} in use"),
        ("tokens/s", f"{computed / seconds:.0f} prompt, {made / seconds:.0f} generated"),
        ("steps", itself),
        ("a step", a_step),
        ("prefix cache", f"{found / looked:.0%} of {looked:.0f} prompt tokens found" if looked else "not asked yet"),
        (
            "preemptions",
            f"{preempted or 'none'}; {now.of('turnout:recomputed_tokens_total'):.0f} tokens computed again",
        ),
        ("plugins", " ".join(f"{k}={v}" for k, v in sorted(now.plugins.items()) if k not in _NO_PLUGIN)),
    ]


_NO_PLUGIN = ("model_name", "engine", "plugin_version")  # labels that stand beside the plugins


def _bar(share: float, width: int = 30) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "░" * (width - full)


def _steps(steps: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    names = ("step", "prompt", "decode", "waiting", "running", "free", "ms", "preempted")
    table = Table(*names, box=None, padding=(0, 2))
    for step in steps[-NUM_STEPS:]:
        keys = ("number", "prefill_tokens", "decodes", "waiting", "running", "blocks_free")
        preempted = ", ".join(f"{rid} ({how})" for rid, how in step["preempted"])
        table.add_row(*(str(step[key]) for key in keys), f"{step['seconds'] * 1e3:.1f}", preempted)
    return table
