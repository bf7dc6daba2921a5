"""Records the signatures of what the adapters call, from the packages' own archives, into signatures.json.

    pip download --no-deps flash-attn-4 flashinfer-python        (wheels)
    pip download --no-deps --no-binary :all: flash-attn          (an archive of sources; it holds version 3 as well)
    python tests/emulated/record.py *.whl *.tar.gz

Nothing is imported or built: the sources are parsed.
"""

from __future__ import annotations

import ast
import json
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
WANTED = {  # end of a file's path -> module, functions and methods in it
    "/flash_attn/flash_attn_interface.py": ("flash_attn.flash_attn_interface", ["flash_attn_varlen_func"]),
    "/hopper/flash_attn_interface.py": ("flash_attn_interface", ["flash_attn_with_kvcache"]),
    "/flash_attn/cute/interface.py": ("flash_attn.cute", ["flash_attn_varlen_func"]),
    "/flashinfer/prefill.py": (
        "flashinfer",
        [f"BatchPrefillWithPagedKVCacheWrapper.{name}" for name in ("__init__", "plan", "run")],
    ),
    "/flashinfer/decode.py": (
        "flashinfer",
        [f"BatchDecodeWithPagedKVCacheWrapper.{name}" for name in ("__init__", "plan", "_plan_impl", "run")],
    ),
}


def signatures(source: str, wanted: list[str]) -> dict[str, str]:
    """The parameters of each wanted function, without annotations; the last definition counts: overloads come first."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        inside = [(f"{node.name}.", child) for child in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for prefix, each in inside:
            if isinstance(each, ast.FunctionDef) and prefix + each.name in wanted:
                for arg in ast.walk(each.args):
                    if isinstance(arg, ast.arg):
                        arg.annotation = None
                found[prefix + each.name] = ast.unparse(each.args)
    return found


def read(archive: Path) -> dict[str, str]:
    """The wanted files of an archive: path in it, with a slash before -> text."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            names = [name for name in opened.namelist() if any(f"/{name}".endswith(end) for end in WANTED)]
            return {f"/{name}": opened.read(name).decode() for name in names}
    with tarfile.open(archive) as opened:
        files = {f"/{m.name}": opened.extractfile(m) for m in opened if any(f"/{m.name}".endswith(e) for e in WANTED)}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def main(archives: list[str]) -> None:
    """Fills or renews signatures.json; what no archive holds stays as it is."""
    target = HERE / "signatures.json"
    kept = json.loads(target.read_text()) if target.exists() else {}
    for archive in map(Path, archives):
        for name, text in read(archive).items():
            module, wanted = WANTED[next(end for end in WANTED if name.endswith(end))]
            if module == "flash_attn.cute" and archive.suffix != ".whl":
                continue  # the sources of version 2 carry an old one
            for function, taken in signatures(text, wanted).items():
                kept.setdefault(module, {})[function] = {"from": archive.name, "takes": taken}
    target.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
