"""Which model file a converted folder was made of, and its packed tensors beside the folder's. It knows no format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from turnout.core import ModelError, ModelInfo
from turnout.core.model import Format, TensorSource
from turnout.core.optional import PackedFormat, PackedQuantizer

NOTE = "turnout_source.json"  # in a converted folder: what it was made of


class Mixed:
    """A folder's tensors in floats, the weights of some layers in place of which a model file's packed ones stand."""

    def __init__(self, packed: TensorSource, floats: TensorSource) -> None:
        self._packed, self._floats = packed, floats
        replaced = {f"{name.rpartition('.')[0]}.weight" for name in packed.tensors}
        kept = {name: stored for name, stored in floats.tensors.items() if name not in replaced}
        self.tensors = kept | dict(packed.tensors)

    def read(self, name: str) -> Tensor:
        return (self._packed if name in self._packed.tensors else self._floats).read(name)


def remember(file: Path, folder: Path) -> None:
    """Write down what the folder was made of, for `made_of`, and what is in it, for `damage`."""
    stat, sizes = file.stat(), {found.name: found.stat().st_size for found in sorted(folder.iterdir())}
    made = {"file": str(file), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "files": sizes}
    (folder / NOTE).write_text(json.dumps(made))


def damage(folder: Path) -> str | None:
    """What of a converted folder is no longer as it was made, as a power cut or a cleaner leaves it; None: nothing."""
    try:
        sizes = json.loads((folder / NOTE).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return f"{NOTE} does not say what belongs into it"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
    return None


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


def packed_source(
    info: ModelInfo,
    quantizer: PackedQuantizer,
    formats: Mapping[str, Format],
    floats: TensorSource,
    modules: frozenset[str],
) -> TensorSource:
    """What such a quantizer reads: the packed matrices of the model file, the folder's floats elsewhere. Raises ModelError."""
    wanted, title = quantizer.packed_format, type(quantizer).__qualname__
    try:
        file = made_of(info.path)
    except ValueError as error:
        raise ModelError(str(error)) from None
    if file is None or file.suffix.lower() != f".{wanted}":
        raise ModelError(
            f"{title} keeps the tensors of a .{wanted} file packed, and {info.path} is made of "
            f"{'safetensors' if file is None else file.name}; name the file as model=FILE.{wanted}, or choose another quantizer"
        )
    reader = formats.get(wanted)
    if not isinstance(reader, PackedFormat):
        raise ModelError(
            f"{title} needs the packed tensors of {file}, and no installed plugin gives those of .{wanted}"
        )
    try:
        return Mixed(reader.packed(file, len(info.layers), modules), floats)
    except ValueError as error:
        raise ModelError(f"{file} can't be served packed: {error}; quant=none serves it in floats") from None
