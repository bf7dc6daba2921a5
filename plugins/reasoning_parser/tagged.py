"""The formats that put their reasoning between two texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from turnout.plugins.reasoning_parser.think import Tags, closed, opened

THINK, THINK_END = "<think>", "</think>"


@dataclass
class Think:
    """`<think>…</think>` where the answer begins with it or the prompt has opened it: Qwen3, GLM, MiniMax M2, Kimi K2
    Thinking, DeepSeek V3.1, SmolLM3, Granite 3.3's successors, and most others. An answer without it has no reasoning."""

    markers: ClassVar[tuple[str, ...]] = (THINK, THINK_END)
    end: ClassVar[str] = THINK_END

    def fits(self, template: str) -> bool:
        return THINK_END in template and not DeepSeekR1().fits(template)

    def start(self, prompt: str, prefill: str) -> Tags:
        ends = ("<|tool_calls_section_begin|>",)  # Kimi ends its reasoning with a call
        thinking, over = opened(THINK, THINK_END, prompt, prefill), closed(THINK_END, prompt, prefill)
        return Tags(THINK, THINK_END, thinking=thinking, expected=not over, ends=ends)


@dataclass
class DeepSeekR1:
    """`…</think>` without an opening tag that could be relied on: DeepSeek R1 and its distillates. All is reasoning up to
    the end tag, unless the prompt has ended it."""

    markers: ClassVar[tuple[str, ...]] = (THINK, THINK_END)
    end: ClassVar[str] = THINK_END

    def fits(self, template: str) -> bool:
        return "<｜Assistant｜>" in template and THINK_END in template and "thinking" not in template

    def start(self, prompt: str, prefill: str) -> Tags:
        return Tags(THINK, THINK_END, thinking=not closed(THINK_END, prompt, prefill))


@dataclass
class MistralThink:
    """`[THINK]…[/THINK]`: Magistral and Mistral's later models that reason."""

    markers: ClassVar[tuple[str, ...]] = ("[THINK]", "[/THINK]")
    end: ClassVar[str] = "[/THINK]"

    def fits(self, template: str) -> bool:
        return self.end in template

    def start(self, prompt: str, prefill: str) -> Tags:
        thinking = opened("[THINK]", self.end, prompt, prefill)
        return Tags("[THINK]", self.end, thinking=thinking, expected="[THINK]" in prompt and not prefill)


@dataclass
class SeedThink:
    """`<seed:think>…</seed:think>`: Seed-OSS."""

    markers: ClassVar[tuple[str, ...]] = ("<seed:think>", "</seed:think>")
    end: ClassVar[str] = "</seed:think>"

    def fits(self, template: str) -> bool:
        return self.end in template

    def start(self, prompt: str, prefill: str) -> Tags:
        thinking, over = opened("<seed:think>", self.end, prompt, prefill), closed(self.end, prompt, prefill)
        return Tags("<seed:think>", self.end, thinking=thinking, expected=not over)


@dataclass
class GraniteThought:
    """`Here is my thought process: … Here is my response: …`: Granite 3.2, which writes its reasoning in words."""

    markers: ClassVar[tuple[str, ...]] = ()
    end: ClassVar[str] = "Here is my response:"

    def fits(self, template: str) -> bool:
        return "Here is my thought process:" in template

    def start(self, prompt: str, prefill: str) -> Tags:
        begin = "Here is my thought process:"
        thinking = opened(begin, self.end, prompt, prefill)
        return Tags(begin, self.end, thinking=thinking, expected=begin in prompt and not prefill)


@dataclass
class GemmaThought:
    """`<|channel>thought … <channel|>`: Gemma 4."""

    markers: ClassVar[tuple[str, ...]] = ("<|channel>", "<channel|>")
    end: ClassVar[str] = "<channel|>"

    def fits(self, template: str) -> bool:
        return self.end in template

    def start(self, prompt: str, prefill: str) -> Tags:
        begin = "<|channel>thought"
        thinking = opened(begin, self.end, prompt, prefill)
        return Tags(begin, self.end, thinking=thinking, expected="<|think|>" in prompt and not prefill)
