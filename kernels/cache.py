"""Where things made once are kept: converted models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """TURNOUT_CACHE, else turnout/ in the user's cache folder. It may not exist yet."""
    if own := os.environ.get("TURNOUT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnout"
