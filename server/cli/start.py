"""Entry of the console script: what must hold before anything heavy is imported. It knows no command.

Ctrl-C ends the program without a traceback at any moment, and standard streams that are closed are opened on nothing, or
the next file to be opened would take their place.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command that the arguments name."""
    open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds, and there is nothing to tidy up
        from turnout.server.cli.main import main as run

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:  # ignored, as of a background job
        from turnout.server.cli.main import main as run
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def open_closed_streams() -> None:
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)  # the lowest number there is, which is this one
            if nothing != fd:
                os.dup2(nothing, fd)
                os.close(nothing)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115
