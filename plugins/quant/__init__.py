"""The built-in quantizers, offered through the same hook as a stranger's."""

from turnout.core import Quantizer, Register, hookimpl
from turnout.plugins.quant.none import Unquantized


@hookimpl
def register_quantizers(register: Register[Quantizer]) -> None:
    register("none", Unquantized)
