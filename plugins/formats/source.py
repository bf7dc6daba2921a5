"""What the tensors of a checkpoint come from, and which model file a converted folder was made of. It knows no format."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

NOTE = "turnout_source.json"  # in a converted folder: what it was made of


class Stored(NamedTuple):
    """One tensor of a file."""

    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source(Protocol):
    """Where the tensors of a checkpoint come from."""

    tensors: dict[str, Stored]

    def read(self, name: str) -> Tensor:
        """A copy on the CPU."""
        ...


def remember(file: Path, folder: Path) -> None:
    """Write down what the folder was made of, for `made_of`."""
    note, stat = folder / NOTE, file.stat()
    if note.exists():
        return
    with contextlib.suppress(OSError):  # a cache nobody may write to: the model is served all the same
        draft = note.with_name(f".{NOTE}-{os.getpid()}")
        draft.write_text(json.dumps({"file": str(file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}))
        draft.replace(note)


def made_of(folder: str) -> Path | None:
    """The model file a folder was converted from; None: it was not. Raises ValueError when that file is not the same."""
    try:
        note = json.loads((Path(folder) / NOTE).read_text())
    except (OSError, ValueError):
        return None
    file = Path(note["file"])
    stat = file.stat() if file.is_file() else None
    if stat is None or (stat.st_size, stat.st_mtime_ns) != (note["size"], note["mtime_ns"]):
        raise ValueError(
            f"{folder} was made from {file}, which {'is gone' if stat is None else 'has changed since'}; name the file "
            f"itself as model=FILE"
        )
    return file
