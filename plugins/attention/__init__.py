"""Attention backends. Listing them imports no kernel library: each backend imports its own when it is chosen."""

from typing import Any

from turnout.core import AttentionBackend, Register, hookimpl
from turnout.plugins.attention.cpu import CpuAttention
from turnout.plugins.attention.flash_attn import FlashAttention
from turnout.plugins.attention.flashinfer import FlashInfer
from turnout.plugins.attention.flex import FlexAttention
from turnout.plugins.attention.torch_sdpa import TorchAttention
from turnout.plugins.attention.triton import TritonAttention


@hookimpl
def register_attention(register: Register[AttentionBackend[Any, Any]]) -> None:
    register("cpu", CpuAttention)
    register("flash_attn", FlashAttention)
    register("flashinfer", FlashInfer)
    register("flex", FlexAttention)
    register("torch", TorchAttention)
    register("triton", TritonAttention)
