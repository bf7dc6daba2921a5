"""Helpers of the tests of block managers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `hands` is imported by name
