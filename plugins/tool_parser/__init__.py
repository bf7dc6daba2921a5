"""Parsers of tool calls."""

from turnout.core import Register, hookimpl
from turnout.core.parsers import ToolParser
from turnout.plugins.tool_parser.deepseek import DeepSeek
from turnout.plugins.tool_parser.gemma import Gemma
from turnout.plugins.tool_parser.glm import GLM
from turnout.plugins.tool_parser.granite import Granite
from turnout.plugins.tool_parser.harmony import Harmony
from turnout.plugins.tool_parser.hermes import Hermes
from turnout.plugins.tool_parser.kimi import Kimi
from turnout.plugins.tool_parser.llama3 import Llama3
from turnout.plugins.tool_parser.llama4 import Llama4
from turnout.plugins.tool_parser.minimax import MiniMax
from turnout.plugins.tool_parser.mistral import Mistral
from turnout.plugins.tool_parser.none import NoCalls
from turnout.plugins.tool_parser.phi4 import Phi4
from turnout.plugins.tool_parser.qwen3_coder import Qwen3Coder


@hookimpl
def register_tool_parsers(register: Register[ToolParser]) -> None:
    register("hermes", Hermes)
    register("qwen3_coder", Qwen3Coder)
    register("llama3", Llama3)
    register("llama4", Llama4)
    register("mistral", Mistral)
    register("deepseek", DeepSeek)
    register("glm", GLM)
    register("kimi", Kimi)
    register("minimax", MiniMax)
    register("harmony", Harmony)
    register("granite", Granite)
    register("phi4", Phi4)
    register("gemma", Gemma)
    register("none", NoCalls)
