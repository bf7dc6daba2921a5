"""`turnout replay`, `turnout why`, `turnout trace`: what can be done with a recording, made by `record=FILE`."""

from __future__ import annotations

from turnout.server.cli.overrides import Usage

USAGE = {
    "replay": "turnout replay FILE\n  run a recording again: do the policies decide the same? Exit code 1 when they do not",
    "why": "turnout why FILE REQUEST_ID\n  where the time of a recorded request went; the id is the engine's or the client's",
    "trace": "turnout trace FILE [out=FILE.trace.json]\n  a trace of a recording, for https://ui.perfetto.dev",
}


def replay(args: list[str]) -> int:
    """Returns the exit code. Raises Usage."""
    return _run("replay", args)


def why(args: list[str]) -> int:
    """Returns the exit code. Raises Usage."""
    return _run("why", args)


def trace(args: list[str]) -> int:
    """Returns the exit code. Raises Usage."""
    return _run("trace", args)


def _run(command: str, args: list[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        print(f"usage: {USAGE[command]}")
        return 0
    try:
        match command, args:
            case "replay", [path]:
                return _replay(path)
            case "why", [path, name]:
                return _why(path, name)
            case "trace", [path]:
                return _trace(path, f"{path.removesuffix('.jsonl')}.trace.json")
            case "trace", [path, out] if out.startswith("out="):
                return _trace(path, out.removeprefix("out="))
    except OSError as error:
        raise Usage(f"{args[0]}: {error.strerror or error}") from error
    except ValueError as error:  # a file that is no recording
        raise Usage(str(error)) from error
    raise Usage(f"usage: {USAGE[command]}")


def _replay(path: str) -> int:
    from turnout.lab.record import replay

    result = replay.replay(path)
    done = f"{result.num_steps} steps, {result.num_requests} requests"
    if result.difference is not None:
        print(f"{path}: {done} came out the same, then a difference\n{result.difference}")
        return 1
    print(f"{path}: {done}, every decision the same")
    if result.stopped:
        print(f"the recording stops there: {result.stopped}")
    return 0


def _why(path: str, name: str) -> int:
    from turnout.server.steplog import why

    print("\n".join(why.told(account) for account in why.why(path, name)))
    return 0


def _trace(path: str, out: str) -> int:
    from turnout.lab.record.perfetto import export

    print(f"{out}: {export(path, out)} events; open it at https://ui.perfetto.dev")
    return 0
