"""A folder of safetensors files read tensor by tensor, and one written file by file so that it can be gone on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
STATE = "turnout-quantize.json"  # in an unfinished folder: what is being made
OTHERS = ("*.json", "*.jinja", "*.txt", "*.model")  # tokenizer, chat template, generation settings

Make = Callable[[str, Tensor], Mapping[str, Tensor]]  # (stored name, tensor) -> what is written, by name


class SourceFolder:
    """The tensors of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            places: dict[str, str] = json.loads(index.read_text())["weight_map"]
            if outside := [file for file in places.values() if Path(file).is_absolute() or ".." in Path(file).parts]:
                raise ValueError(f"{index} names a file outside its folder, which is not read: {outside[0]}")
        elif (folder / SINGLE).is_file():
            from safetensors import safe_open

            with safe_open(folder / SINGLE, "pt") as opened:
                places = dict.fromkeys(opened.keys(), SINGLE)
        else:
            raise ValueError(f"{folder} has no safetensors files")
        self.places = dict(sorted(places.items()))

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.folder / self.places[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        from safetensors import safe_open

        with safe_open(self.folder / self.places[name], "pt") as opened:
            found: list[int] = opened.get_slice(name).get_shape()
        return found


def shards(source: SourceFolder, limit: int) -> list[list[str]]:
    """Which source tensors make each file: as many as come to `limit` bytes as they are stored. Always the same."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for file in sorted(set(source.places.values())):
        with safe_open(source.folder / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                part = opened.get_slice(name)
                count = 1
                for size in part.get_shape():
                    count *= size
                sizes[name] = count * (8 if "64" in part.get_dtype() else 4 if "32" in part.get_dtype() else 2)
    planned: list[list[str]] = [[]]
    room = limit
    for name in source.places:
        if planned[-1] and sizes[name] > room:
            planned.append([])
            room = limit
        planned[-1].append(name)
        room -= sizes[name]
    return planned


def begin(out: Path, asked: Mapping[str, Any]) -> None:
    """Make the folder, or see that the unfinished one there was asked for alike. Raises ValueError saying what differs."""
    state = out / STATE
    if state.is_file():
        before = json.loads(state.read_text())
        changed = [key for key in {**before, **asked} if before.get(key) != asked.get(key)]
        if changed:
            was = ", ".join(f"{key}={before.get(key)}" for key in changed)
            raise ValueError(
                f"out={out} holds an unfinished model made with {was}; go on with that, or name another out"
            )
        return
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"out={out} holds something already; name a new folder")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"out={out}: there is no folder {out.absolute().parent}")
    out.mkdir(exist_ok=True)
    _write(state, json.dumps(asked, indent=1, sort_keys=True))


def fill(out: Path, source: SourceFolder, planned: list[list[str]], make: Make) -> Iterator[tuple[int, int, bool]]:
    """Write the files that are not there yet. Yields (files done, files in all, whether this one was there already)."""
    from safetensors.torch import save_file

    for number, names in enumerate(planned, 1):
        file = out / _name(number, len(planned))
        there = file.is_file()
        if not there:
            tensors: dict[str, Tensor] = {}
            for name in names:
                tensors |= make(name, source.read(name))
            draft = file.with_suffix(".part")
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft, {"format": "pt"})
            draft.replace(file)  # whole or not at all
        yield number, len(planned), there


def finish(out: Path, source: SourceFolder, planned: list[list[str]], settings: Mapping[str, Any]) -> None:
    """The index, the settings and all that is no weight. Only then is the folder a model."""
    from safetensors import safe_open

    weight_map: dict[str, str] = {}
    total = 0
    for number in range(1, len(planned) + 1):
        file = _name(number, len(planned))
        total += (out / file).stat().st_size
        with safe_open(out / file, "pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), file)
    if len(planned) > 1:
        _write(out / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
    for pattern in OTHERS:
        for other in source.folder.glob(pattern):
            if other.name not in (CONFIG, INDEX):
                shutil.copyfile(other, out / other.name)
    config = json.loads((source.folder / CONFIG).read_text()) | {"quantization_config": dict(settings)}
    _write(out / CONFIG, json.dumps(config, indent=1) + "\n")
    (out / STATE).unlink()


def _name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _write(file: Path, text: str) -> None:
    draft = file.with_suffix(file.suffix + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)
