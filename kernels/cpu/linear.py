"""Linear layers computed by native kernels: what all kinds of weights share, and the plain kinds, floats of 32 and 16 bits.

It knows no model and no checkpoint. A kind is a C function and a struct it reads (`struct Linear` of linear.h), so that
a whole decoder layer can call it without coming back to Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turnout.kernels import cpu as native
from turnout.kernels.cpu import pages

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # as the kernels number them: `outside_numbered` of elements.h
PANEL16, BLOCK16, STEP16 = 16, 32, 32  # of the 16-bit layout: outputs of a panel, outputs and inputs filled up to


class NativeLinear(nn.Module):
    """[..., in_features] -> [..., out_features] in x's float type, computed in float32 on the CPU, the bias added.

    A kind names its C function, in the form `Product` of linear.h, makes the struct that it reads (`_struct`), and calls
    `_describe` once its tensors are there. Moving or casting it is refused: the weights lie as their kernel reads them.
    """

    function: ClassVar[str]

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._threads = torch.get_num_threads()
        self._data: ctypes.Structure | None = None

    def _struct(self) -> ctypes.Structure:
        """What the C function reads, pointing into this module's tensors."""
        raise AssertionError("each kind of weights has its own")

    def _describe(self) -> None:
        """Point at the tensors as they are now. Kernels that hold the struct's address see it change."""
        made = self._struct()
        if self._data is not None:
            ctypes.memmove(ctypes.addressof(self._data), ctypes.addressof(made), ctypes.sizeof(made))
        else:
            self._data, self._address = made, ctypes.addressof(made)
            self._run = _PRODUCT((self.function, native.library()))
        self._alive = [*self.buffers(), *self.parameters()]  # what the struct points into

    def native_product(self) -> tuple[int, int]:
        """(run, data), the addresses of the C function and of what it reads, for kernels that call this one."""
        run = ctypes.cast(self._run, ctypes.c_void_p).value
        assert run is not None
        return run, self._address

    def __call__(self, x: Tensor) -> Tensor:  # nobody hooks a served model, and a module's call costs microseconds
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype in FLOATS and x.device.type == "cpu" and x.shape[-1] == self.in_features, (
            f"a native layer of {self.in_features} inputs was given {list(x.shape)} of {x.dtype} on {x.device}"
        )
        wide = x.float().contiguous()
        out = wide.new_empty(*x.shape[:-1], self.out_features)
        rows = wide.numel() // self.in_features
        native.check(self._run(self._address, wide.data_ptr(), out.data_ptr(), rows, self._threads))
        return out if x.dtype == torch.float32 else out.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for tensor in self.buffers():
            as_is, after = tensor.new_empty(0), fn(tensor.new_empty(0))
            if (as_is.dtype, as_is.device) != (after.dtype, after.device):
                raise ValueError(
                    f"a native layer stays on the CPU and in {as_is.dtype}, as its weights are laid out; "
                    f"load the model with the device and dtype you want"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._describe()
        return self

    def _load_from_state_dict(self, *rest: Any, **options: Any) -> None:
        super()._load_from_state_dict(*rest, **options)
        self._describe()  # with assign=True the tensors are others now

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_run", "_alive", "_address")} | {
            "_data": None
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._describe()  # a copy points at its own tensors


_PRODUCT = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
)


class _PackedData(ctypes.Structure):
    """`struct Packed` of gemm.cpp, and `struct Packed16` of gemm16.cpp, which reads one number more."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("weight", "bias")),
        *((n, ctypes.c_int64) for n in ("ins", "outs", "half")),
    ]


class PackedLinear(NativeLinear):
    """Float weights in panels of neighbouring outputs: `packed`, float32 [panels, in, panel], or 16 bits as gemm16.cpp has
    them, bfloat16 [panels, in / 2, 16, 2] or float16 [panels, in, 16], filled up with zeros."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in] of float32, bfloat16 or float16; bias: [out]."""
        outs, ins = weight.shape
        super().__init__(ins, outs)
        self.function = "turnout_gemm" if weight.dtype == torch.float32 else "turnout_gemm16"  # type: ignore[misc]
        self.register_buffer("packed", pack(weight))
        self.register_buffer("bias", None if bias is None else bias.float().contiguous())
        self._describe()

    def _struct(self) -> ctypes.Structure:
        offset = None if self.bias is None else self.bias.data_ptr()
        half = self.packed.dtype == torch.float16
        return _PackedData(self.packed.data_ptr(), offset, self.in_features, self.out_features, half)

    @property
    def weight(self) -> Tensor:
        """[out, in], laid out anew at every look."""
        rows = self.packed.transpose(1, 2).reshape(self.packed.shape[0] * self._panel, -1)
        return rows[: self.out_features, : self.in_features]

    def select(self, ids: Tensor) -> Tensor:
        """The weights of some outputs: int64 [...] -> [..., in]."""
        return self.packed[ids // self._panel, :, ids % self._panel].flatten(ids.dim())[..., : self.in_features]

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        return self.weight.float()

    @property
    def _panel(self) -> int:
        return self.packed.shape[2]


class PackedEmbedding(nn.Module):
    """The embedding that shares its memory with a packed output layer; `scale` multiplies what is looked up (Gemma)."""

    def __init__(self, head: PackedLinear, scale: float = 1.0) -> None:
        super().__init__()
        self._scale = scale
        self._head = [head]  # in a list: it is no child of this module

    @property
    def packed(self) -> Tensor:
        """The head's."""
        return self._head[0].packed

    @property
    def weight(self) -> Tensor:
        """[vocab, dim], laid out anew at every look."""
        return self._head[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> [..., dim]."""
        found = self._head[0].select(ids)
        return found if self._scale == 1.0 else found.mul_(self._scale)


def pack(weight: Tensor) -> Tensor:
    """[out, in] as turnout_gemm or turnout_gemm16 read it."""
    outs, ins = weight.shape
    if weight.dtype == torch.float32:
        library = native.library()
        panel = int(library.turnout_panel())
        weight, packed = weight.contiguous(), torch.empty(-(-outs // panel), ins, panel)
        library.turnout_pack(weight.data_ptr(), packed.data_ptr(), outs, ins)
        return packed
    filled = F.pad(weight, (0, -ins % STEP16, 0, -outs % BLOCK16)).view(-(-outs // BLOCK16) * 2, PANEL16, -1)
    if weight.dtype == torch.bfloat16:
        filled = filled.view(*filled.shape[:2], -1, 2)  # pairs of inputs stay together
    return pages.settled(filled.transpose(1, 2))
