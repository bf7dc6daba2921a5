"""The tensors of a folder of safetensors files. It knows no model: names, shapes, types and bytes only.

The header is read here and not by `safetensors.safe_open`, since that maps the file: one cut short while it is read (an
interrupted download, a full disk) would end the process with a bus error instead of a message, and mapped pages would count
as this process's memory beside the copies. The library does not tell where in the file a tensor lies.
"""

from __future__ import annotations

import json
import math
import operator
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnout.core import ModelError
from turnout.core.model import StoredTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}


class Stored(NamedTuple):
    """One tensor of a file."""

    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Shards:
    """The tensors of a folder, by name. Headers are read and checked at once, tensors when asked for."""

    def __init__(self, folder: Path) -> None:
        self._stored: dict[str, Stored] = {}
        if (folder / SINGLE).is_file():
            self._stored = _header(folder / SINGLE)
        elif (folder / INDEX).is_file():
            self._read_shards(folder)
        elif any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
            raise ModelError(
                f"{folder} holds its weights as pickles (.bin), which can run code and are not read; convert them: "
                f"load the folder with transformers' from_pretrained and write it with save_pretrained"
            )
        else:
            raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}: there are no weights to serve")
        self.tensors = {name: StoredTensor(stored.shape, stored.dtype) for name, stored in self._stored.items()}

    def _read_shards(self, folder: Path) -> None:
        try:
            index: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            files = sorted({str(file) for file in index.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX} is not a safetensors index: {error!r}") from None
        for name in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ModelError(f"{folder / INDEX} names a file outside its folder, which is not read: {name}")
            listed = [tensor for tensor, file in index.items() if str(file) == name]
            if not (folder / name).is_file():
                raise ModelError(
                    f"{folder / name} is missing; {INDEX} says it holds {len(listed)} tensors: {some(listed)}"
                )
            found = _header(folder / name)
            if absent := [tensor for tensor in listed if tensor not in found]:
                raise ModelError(f"{folder / name} lacks tensors that {INDEX} says it holds: {some(absent)}")
            self._stored |= {tensor: stored for tensor, stored in found.items() if index.get(tensor, name) == name}

    def dtype(self) -> torch.dtype:
        """The floating-point type most of the bytes are in."""
        sizes: dict[torch.dtype, int] = defaultdict(int)
        for stored in self._stored.values():
            if stored.dtype.is_floating_point:
                sizes[stored.dtype] += stored.num_bytes
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)

    def read(self, name: str) -> Tensor:
        """A copy on the CPU in memory of its own: no mapping, so the file may change or vanish afterwards."""
        stored = self._stored[name]
        raw = np.fromfile(stored.file, np.uint8, count=stored.num_bytes, offset=stored.offset)
        if len(raw) != stored.num_bytes:
            raise ModelError(f"{stored.file} was cut short while {name} was read")
        return torch.from_numpy(raw).view(stored.dtype).reshape(stored.shape)


def _header(file: Path) -> dict[str, Stored]:
    """What a safetensors file holds. The file is 8 bytes of header length, a JSON header, then the tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ModelError(f"{file} is a git-lfs pointer, not the weights: fetch them with git lfs pull")
        if len(start) < 8 or 8 + length > size:
            raise ModelError(f"{file} has {size} bytes, too few for its header: it was cut short, or is no safetensors")
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            found = {name: _stored(file, 8 + length, entry) for name, entry in entries.items()}
        except ModelError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} has a header that can't be read: {error!r}") from None
    end = max((stored.offset + stored.num_bytes for stored in found.values()), default=8 + length)
    if end != size:
        raise ModelError(f"{file} has {size} bytes, its header says {end}: it was cut short or is being written")
    end = 8 + length
    for name, stored in sorted(found.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        needed = math.prod(stored.shape) * stored.dtype.itemsize
        if stored.offset != end or stored.num_bytes != needed:
            raise ModelError(
                f"{file} has a header that can't be right: {name}, {needed} bytes by its shape and type, is given "
                f"{stored.num_bytes} at {stored.offset}, and the tensor before it ends at {end}"
            )
        end += needed
    return found


def _stored(file: Path, start: int, entry: Any) -> Stored:
    """A tensor by its entry in the header; `start`: where the tensors begin. Raises what a wrong entry brings about."""
    first, last = map(operator.index, entry["data_offsets"])
    shape = tuple(map(operator.index, entry["shape"]))
    dtype = TYPES.get(entry["dtype"])
    if dtype is None:
        raise ModelError(f"{file} holds tensors of type {entry['dtype']}; only these can be read: {', '.join(TYPES)}")
    return Stored(file, start + first, last - first, dtype, shape)


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more."""
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
