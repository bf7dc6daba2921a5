"""The contracts of loaders and formats find what is planted, and pass what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch

from turnout.plugins.formats.gguf import GGUF
from turnout.plugins.loader import Transformers
from turnout.testing import FormatContract, LoaderContract, check_component
from turnout.testing.policies import rules


class Lax(Transformers):
    """Takes what is not there for a name."""

    def find(self, model: str, formats: Any, report: Any) -> str:
        return model


class Misnaming(Transformers):
    def inspect(self, path: str, dtype: str, device: str) -> Any:
        return replace(super().inspect(path, dtype, device), vocab_size=7)


class OtherType(Transformers):
    def inspect(self, path: str, dtype: str, device: str) -> Any:
        return super().inspect(path, "float32", device)


class Own(Transformers):
    """Makes linear layers by itself."""

    def load(self, info: Any, quantizer: Any, formats: Any, progress: Any) -> Any:
        class Mine:
            checkpoint_formats = quantizer.checkpoint_formats

            def linear(self, name: str, tensors: Any) -> Any:
                quantizer.linear(name, tensors)
                made = torch.nn.Linear(*reversed(tensors["weight"].shape), bias="bias" in tensors)
                made.weight.data = tensors["weight"]
                if "bias" in tensors:
                    made.bias.data = tensors["bias"]
                return made

        return super().load(info, Mine(), formats, progress)  # type: ignore[arg-type]


class Silent(Transformers):
    def load(self, info: Any, quantizer: Any, formats: Any, progress: Any) -> Any:
        return super().load(info, quantizer, formats, lambda done, total: None)


def changing(change: Callable[..., Any]) -> type:
    """A loader whose model answers otherwise."""

    class Changed(Transformers):
        def load(self, info: Any, quantizer: Any, formats: Any, progress: Any) -> Any:
            model = super().load(info, quantizer, formats, progress)
            return lambda *asked: change(model, *asked)

    return dataclass(Changed)


PLANTED = {
    "nothing is refused": (dataclass(Lax), "what is not there is refused"),
    "formats are not asked": (dataclass(Lax), "goes through the format"),
    "another vocabulary": (dataclass(Misnaming), "what it says before loading"),
    "dtype not heeded": (dataclass(OtherType), "what it says before loading"),
    "layers of its own": (dataclass(Own), "every linear layer"),
    "no progress": (dataclass(Silent), "progress is counted"),
    "all rows come": (changing(lambda m, t, p, r, a: m(t, p, torch.arange(len(t)), a)), "only the rows asked for"),
    "positions of its own": (
        changing(lambda m, t, p, r, a: m(t, torch.arange(len(t)), r, a)),
        "only the rows asked for",
    ),
    "rows in ascending order": (changing(lambda m, t, p, r, a: m(t, p, r.sort().values, a)), "only the rows asked for"),
    "logits off": (changing(lambda m, t, p, r, a: 1.02 * m(t, p, r, a)), "its logits are"),
}


def faults(component: type) -> dict[str, str]:
    return {found.rule: found.fault for found in check_component("loader", component) if found.fault}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNOUT_CACHE", str(tmp_path / "cache"))


def test_the_loader_that_ships_keeps_the_contract() -> None:
    assert not faults(Transformers)


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_planted_is_found_by_the_rule_it_breaks(fault: str) -> None:
    component, rule = PLANTED[fault]
    (check,) = (check for name, check in rules(LoaderContract, component) if rule in name)
    with pytest.raises(AssertionError, match=r"\w \w"):
        check()


class Hasty(GGUF):
    """Takes anything for a model."""

    def convert(self, file: Path, folder: Path, report: Any) -> None: ...


class Dated(GGUF):
    """Writes the time of day."""

    def convert(self, file: Path, folder: Path, report: Any) -> None:
        super().convert(file, folder, report)
        (folder / "made").write_text(str(id(folder)) + folder.name)


@pytest.mark.parametrize(
    ("make", "broken"), [(GGUF, None), (Hasty, "is refused with a reason"), (Dated, "the same folder each time")]
)
def test_a_format_is_held_to_its_rules(make: type, broken: str | None, tmp_path: Path) -> None:
    arch, model_type, settings = tiny_gguf.MODELS["llama"]
    example = tiny_gguf.write(tmp_path / "tiny.gguf", arch, tiny_gguf.tiny(model_type, settings))
    failed = []
    for rule, check in rules(type("Contract", (FormatContract,), dict(vars(FormatContract), example=example)), make):
        try:
            check()
        except AssertionError:
            failed.append(rule)
    assert not failed if broken is None else any(broken in rule for rule in failed), failed
