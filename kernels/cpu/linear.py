"""Linear layers computed by native kernels: what all kinds of weights share, and the plain kind, float32.

It knows no model and no checkpoint. A kind is a C function and a struct it reads (`struct Linear` of linear.h), so that
a whole decoder layer can call it without coming back to Python.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from turnout.kernels import cpu as native


class Descriptor(ctypes.Structure):
    """`struct Linear` of linear.h."""

    _fields_ = [("run", ctypes.c_void_p), ("data", ctypes.c_void_p)]


class NativeLinear(nn.Module):
    """[..., in_features] -> [..., out_features], float32 on the CPU, the bias added. Call `_describe` once."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._threads = torch.get_num_threads()

    def _describe(self, kernel: str, data: ctypes.Structure) -> None:
        """The C function of that name, in the form `Product` of linear.h, computes this layer from `data`. The tensors
        that `data` points into must live as long as the module."""
        function = getattr(native.library(), kernel)
        self._data = data
        self.descriptor = Descriptor(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(data))
        self._run = _PRODUCT(self.descriptor.run)

    def native_product(self) -> tuple[int, int]:
        """(run, data) of the descriptor, for kernels that call this one."""
        return self.descriptor.run, self.descriptor.data

    def __call__(self, x: Tensor) -> Tensor:  # nobody hooks a served model, and a module's call costs microseconds
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.numel() // self.in_features
        self._run(self.descriptor.data, x.data_ptr(), out.data_ptr(), rows, self._threads)
        return out


_PRODUCT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class _PackedData(ctypes.Structure):
    """`struct Packed` of gemm.cpp."""

    _fields_ = [*((n, ctypes.c_void_p) for n in ("weight", "bias")), *((n, ctypes.c_int64) for n in ("ins", "outs"))]


class PackedLinear(NativeLinear):
    """Float32 weights in panels of neighbouring outputs, `packed` [panels, in, panel]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: float32 [out, in]; bias: float32 [out]."""
        outs, ins = weight.shape
        super().__init__(ins, outs)
        self.register_buffer("packed", pack(weight))
        self.register_buffer("bias", None if bias is None else bias.contiguous())
        self.packed: Tensor
        self.bias: Tensor | None
        offset = None if self.bias is None else self.bias.data_ptr()
        self._describe("turnout_gemm", _PackedData(self.packed.data_ptr(), offset, ins, outs))

    @property
    def weight(self) -> Tensor:
        """[out, in], laid out anew at every look."""
        return self.packed.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]


class PackedEmbedding(nn.Module):
    """The embedding that shares its memory with a packed output layer; `scale` multiplies what is looked up (Gemma)."""

    def __init__(self, head: PackedLinear, scale: float = 1.0) -> None:
        super().__init__()
        self._scale = scale
        self._packed, self._shape = head.packed, (head.out_features, head.in_features)

    @property
    def weight(self) -> Tensor:
        """[vocab, dim], laid out anew at every look."""
        return self._packed.transpose(1, 2).reshape(-1, self._shape[1])[: self._shape[0]]

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> float32 [..., dim]."""
        panel = self._packed.shape[2]
        found = self._packed[ids // panel, :, ids % panel]
        return found if self._scale == 1.0 else found.mul_(self._scale)


def pack(weight: Tensor) -> Tensor:
    """float32 [out, in] -> [panels, in, panel], as turnout_gemm reads it."""
    library = native.library()
    outs, ins = weight.shape
    panel = int(library.turnout_panel())
    weight, packed = weight.contiguous(), torch.empty(-(-outs // panel), ins, panel)
    library.turnout_pack(weight.data_ptr(), packed.data_ptr(), outs, ins)
    return packed
