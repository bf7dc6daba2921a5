"""Each reasoning parser keeps the contract's rules and reads what its models write."""

from __future__ import annotations

import pytest

from turnout.plugins import reasoning_parser as own
from turnout.testing.parsers import ReasoningParserContract

ASSISTANT = "<|im_start|>assistant\n"
HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
CASES = {  # kind -> (templates, answers)
    own.Think: (
        ["{%- if '</think>' in content %}"],
        [
            (ASSISTANT, "<think>\nHm, 2 < 3.\n</think>\n\nYes.", "Hm, 2 < 3.", "Yes."),
            (ASSISTANT + "<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
            (ASSISTANT + "<think>\n\n</think>\n\n", "Yes <think>.", "", "Yes <think>."),
            (ASSISTANT, "\nYes.", "", "\nYes."),
            (ASSISTANT + "<think>\n", "Hm", "Hm", ""),
            (ASSISTANT, "<think>\n\n</think>\n\nNo.", "", "No."),
            (ASSISTANT, "<think>Call.<|tool_calls_section_begin|>x", "Call.", "<|tool_calls_section_begin|>x"),
        ],
    ),
    own.DeepSeekR1: (
        ["'<｜Assistant｜>' + content.split('</think>')[-1]"],
        [
            ("<｜Assistant｜><think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
            ("<｜Assistant｜>", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
            ("<｜Assistant｜>", "Hm.</think>Yes.", "Hm.", "Yes."),
            ("<｜Assistant｜></think>", "Yes.", "", "Yes."),
        ],
    ),
    own.MistralThink: (
        ["[THINK]' + content + '[/THINK]"],
        [("[/INST]", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."), ("[/INST]", "Yes.", "", "Yes.")],
    ),
    own.SeedThink: (
        ["{%- set think_end_token = '</seed:think>' -%}"],
        [
            ("<seed:bos>assistant\n", "<seed:think>Hm.</seed:think>\nYes.", "Hm.", "Yes."),
            ("<seed:bos>assistant\n<seed:think>", "Hm.</seed:think>Yes.", "Hm.", "Yes."),
            ("<seed:bos>assistant\n", "Yes.", "", "Yes."),
        ],
    ),
    own.GraniteThought: (
        ["your thoughts after 'Here is my thought process:' and"],
        [("", "Here is my thought process: Hm.\n\nHere is my response: Yes.", "Hm.", "Yes."), ("", "Here", "", "Here")],
    ),
    own.GemmaThought: (
        ["<|channel>thought\n<channel|>"],
        [("<|turn>model\n", "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes.")],
    ),
    own.NoReasoning: ([], [(ASSISTANT, "<think>Hm.</think>", "", "<think>Hm.</think>")]),
    own.Harmony: (
        ["<|start|>assistant<|channel|>final<|message|>"],
        [
            (
                "<|start|>assistant",
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
                "Hm.",
                "Yes.",
            ),
            (
                "<|start|>assistant",
                f"<|channel|>analysis<|message|>Hm.<|end|>{HARMONY_CALL}",
                "Hm.",
                HARMONY_CALL,
            ),
            ("<|start|>assistant", "<|channel|>commentary<|message|>I look.<|end|>", "", "I look."),
            ("<|start|>assistant", "Yes.", "", "Yes."),
        ],
    ),
}
CONTRACTS = {
    kind: type(kind.__name__, (ReasoningParserContract,), {"make": kind, "templates": templates, "answers": answers})
    for kind, (templates, answers) in CASES.items()
}


@pytest.mark.parametrize("kind", CONTRACTS, ids=lambda kind: kind.__name__)
def test_every_rule_holds(kind: type) -> None:
    for rule in vars(ReasoningParserContract):
        if rule.startswith("test_"):
            getattr(CONTRACTS[kind](), rule)()


def test_every_parser_is_looked_at() -> None:
    offered: list[type] = []
    own.register_reasoning_parsers(lambda name, component: offered.append(component))
    assert set(offered) == set(CONTRACTS)


def test_no_template_fits_two_parsers() -> None:
    for kind, (templates, _) in CASES.items():
        for template in templates:
            assert [other for other in CASES if other().fits(template)] == [kind]


@pytest.mark.parametrize(
    ("prompt", "prefill", "thinking", "expected"),
    [
        (ASSISTANT, "", False, True),
        (ASSISTANT + "<think>\n", "", True, True),
        (ASSISTANT + "<think>\n\n</think>\n\n", "", False, False),
        ("user: <think> " + ASSISTANT, "", False, True),
        (ASSISTANT + "<think>\nHm", "<think>\nHm", True, True),
        (ASSISTANT + "<think>Hm.</think> Yes", "<think>Hm.</think> Yes", False, False),
    ],
)
def test_the_prompt_tells_whether_reasoning_comes(prompt: str, prefill: str, thinking: bool, expected: bool) -> None:
    stream = own.Think().start(prompt, prefill)
    assert (stream.thinking, stream.expected) == (thinking, expected)
