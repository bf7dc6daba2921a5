"""No structured output: every form is refused."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.core.structured import Grammar, StructuredSpec


@dataclass
class NoStructured:
    """Refuses every form of an answer. What `structured=auto` stands for where no library is installed."""

    def prepare(self, path: str, vocab_size: int) -> None:
        """Nothing to prepare."""

    def compile(self, spec: StructuredSpec) -> Grammar:
        raise ValueError(
            "this engine enforces no form of an answer: it was started with structured=none, or found nothing that can, "
            "and its notes in /server_info say why; pip install 'turnout[structured]' and structured=auto may help"
        )
