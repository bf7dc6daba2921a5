"""What compiles the form of an answer and says which tokens may follow."""

from turnout.core import Register, hookimpl
from turnout.core.structured import Structured
from turnout.plugins.structured.llguidance import LLGuidance
from turnout.plugins.structured.none import NoStructured
from turnout.plugins.structured.xgrammar import XGrammar


@hookimpl
def register_structured(register: Register[Structured]) -> None:
    register("llguidance", LLGuidance)
    register("none", NoStructured)
    register("xgrammar", XGrammar)
