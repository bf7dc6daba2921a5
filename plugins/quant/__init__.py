"""The built-in quantizers, offered through the same hook as a stranger's."""

from turnout.core import Quantizer, Register, hookimpl
from turnout.plugins.quant.awq import Awq
from turnout.plugins.quant.compressed import CompressedTensors
from turnout.plugins.quant.fp8 import Fp8
from turnout.plugins.quant.gguf import Gguf
from turnout.plugins.quant.gptq import Gptq
from turnout.plugins.quant.int8 import Int8
from turnout.plugins.quant.none import Unquantized


@hookimpl
def register_quantizers(register: Register[Quantizer]) -> None:
    register("awq", Awq)
    register("compressed-tensors", CompressedTensors)
    register("fp8", Fp8)
    register("gguf", Gguf)
    register("gptq", Gptq)
    register("int8", Int8)
    register("none", Unquantized)
