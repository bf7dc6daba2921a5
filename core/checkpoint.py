"""What the user named as `model`, turned into a local Hugging Face folder. Knows no engine and no request."""

from __future__ import annotations


class ModelError(ValueError):
    """The model can't be served; the message says why and what to do."""
