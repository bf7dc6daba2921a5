"""`turnout quantize`: check everything, then write the folder; what was written before an interruption stays."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from turnout.compose import plugins
from turnout.compose.plugins import PluginError
from turnout.core import ModelError
from turnout.lab.quantize import calibrated, folder, linears
from turnout.lab.quantize.config import CALIBRATED, QuantizeConfig
from turnout.lab.quantize.rounding import Rounding
from turnout.server.cli.arguments import ordered
from turnout.server.cli.composing import config_dirs, installed, searchpath, show
from turnout.server.cli.overrides import MANY, Usage, checked, try_composing, vet
from turnout.server.cli.progress import Progress, complain


def run(args: list[str]) -> int:
    """Exit code 0: the folder is a model; 1: it failed; 130: interrupted, and the same command goes on. Raises Usage when
    the command, its options or the model are wrong."""
    found = installed()
    if any(arg in MANY for arg in args):
        raise Usage("turnout quantize does one thing at a time; write one command for each")
    args, folders = config_dirs(ordered(args, "quantize", found))
    flags = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    overrides = [*searchpath(found, folders), *checked(args[:flags], found)]
    if args[flags:]:
        show("quantize", overrides, args[flags:])
        return 0
    from omegaconf import OmegaConf

    loading = Progress()
    try:
        composed = try_composing("quantize", overrides, found)
        vet(composed, found)
        config = OmegaConf.to_object(composed)
        assert isinstance(config, QuantizeConfig)
        return _quantize(config, loading)
    except (ModelError, PluginError, ValueError) as error:
        raise Usage(str(error)) from error
    except (RuntimeError, OSError) as error:
        complain(error)
        return 1
    except KeyboardInterrupt:
        loading.close()
        complain("interrupted; the same command goes on from here")
        return 130
    finally:
        loading.close()


def _quantize(config: QuantizeConfig, loading: Progress) -> int:
    out = Path(config.out).expanduser()
    if config.method in CALIBRATED:
        calibrated.check()
        calibrated.texts(config)
    path = Path(config.loader.find(config.model, plugins.load().formats(), lambda stage: loading(stage, 0.0)))
    source = folder.SourceFolder(path)
    taken, kept = linears.found(path, source.places.keys(), config.skip)
    folder.begin(out, _asked(config, path))
    before = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if config.method in CALIBRATED:
        _fit(config, path, out, kept)
    else:
        _round(config, source, out, taken, kept, loading)
    loading.close()
    after = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(
        f"{out} holds {config.model} by method={config.method}: {after / 2**20:.0f} MiB of {before / 2**20:.0f} MiB, "
        f"{len(taken)} layers quantized, {len(kept)} left in floats\n"
        f"  turnout serve model={out}\n"
        f"  turnout ab model={config.model} b='[model={out}]'    what it does to the answers"
    )
    return 0


def _asked(config: QuantizeConfig, path: Path) -> dict[str, Any]:
    """What must be the same for an unfinished folder to be gone on with."""
    return {key: value for key, value in vars(config).items() if key not in ("loader", "out")} | {"model": str(path)}


def _round(
    config: QuantizeConfig, source: folder.SourceFolder, out: Path, taken: list[str], kept: list[str], loading: Progress
) -> None:
    rounding = Rounding(config.method)
    if config.method == "rtn":
        rounding = Rounding("rtn", config.bits or 4, config.group_size or 64, config.symmetric is not False)
    names = {f"{name}.weight": name for name in taken}

    def make(stored: str, tensor: Tensor) -> Mapping[str, Tensor]:
        name = names.get(stored)
        if name is None:
            return {stored: tensor}
        try:
            parts = rounding.quantized(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; choose another group_size, or skip that layer") from None
        return {f"{name}.{leaf}": part for leaf, part in parts.items()}

    _check_groups(rounding, source, names)
    planned = folder.shards(source, config.shard_size)
    for done, count, there in folder.fill(out, source, planned, make):
        loading(f"{'there already' if there else 'written'}: file {done} of {count}", done / count)
    folder.finish(out, source, planned, rounding.settings(kept))


def _check_groups(rounding: Rounding, source: folder.SourceFolder, names: Mapping[str, str]) -> None:
    """Raise ValueError now for a layer whose width the groups do not divide: hours may lie before it."""
    if rounding.group == -1:
        return
    for stored, name in names.items():
        width = source.shape(stored)[1]
        if width % rounding.group:
            raise ValueError(
                f"{name}: groups of {rounding.group} do not divide its {width} inputs; choose another group_size, or "
                f"skip that layer"
            )


def _fit(config: QuantizeConfig, path: Path, out: Path, kept: list[str]) -> None:
    """Beside the folder first: what a library leaves when it is interrupted is no model, and can't be gone on with."""
    draft = out / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    calibrated.quantize(config, path, draft, kept)
    for file in draft.iterdir():
        file.replace(out / file.name)
    draft.rmdir()
    (out / folder.STATE).unlink()
