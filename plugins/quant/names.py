"""Which layers a list of patterns means. It knows no quantizer; all that take such a list use this one rule."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase


def listed(name: str, patterns: Iterable[str]) -> str | None:
    """The first of the patterns that means the layer `name`, a path such as model.layers.3.self_attn.q_proj.

    A pattern means a layer when it is a run of whole parts of the path: q_proj, self_attn.q_proj, layers.3 and
    model.layers.3.self_attn do, layers.30 and proj do not. A part may hold * and ?, which stay within one part. A
    pattern that begins with re: is a regular expression the whole path must begin with, as in compressed-tensors.
    """
    parts = name.split(".")
    return next((pattern for pattern in patterns if _means(pattern, name, parts)), None)


def _means(pattern: str, name: str, parts: list[str]) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    wanted = pattern.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(fnmatchcase(parts[start + i], part) for i, part in enumerate(wanted)) for start in starts)


def is_head(name: str) -> bool:
    """Whether a linear layer stands outside the numbered decoder layers: the output head, and what projects there."""
    return not any(part.isdigit() for part in name.split("."))
