"""The compiled library as it is kept on disk: whose it may be, and whether it is whole. It knows no kernel.

A library is code that this process runs, so it is loaded only from places that nobody else can write to. It ends with the
SHA-256 of all before it (a loader ignores what follows an ELF file's sections): a file that was cut short or changed is
found before it is mapped, where it would end the process with a bus error.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

DIGEST = 32  # bytes


def seal(file: Path) -> None:
    """Append the digest, and let nobody else write there."""
    with file.open("r+b") as opened:
        digest = hashlib.sha256(opened.read()).digest()
        opened.write(digest)
    file.chmod(0o700)


def is_whole(file: Path) -> bool:
    content = file.read_bytes()
    return len(content) > DIGEST and hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def private_folder(folder: Path) -> None:
    """Make the folder, for this user alone; one that exists is left as it is, for `distrust` to judge."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def distrust(folder: Path, file: Path | None = None) -> str | None:
    """Why nothing must be loaded from there; None: only this user, or root, could have put it there.

    Folder and file may be writable by their owner alone. A folder above may not be writable by all, unless it is sticky
    as /tmp is: who may write there could put another folder in place of ours.
    """
    for place in (folder, *([] if file is None else [file])):
        if why := _foreign(place, stat.S_IWGRP | stat.S_IWOTH):
            return why
    for place in folder.resolve().parents:
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"{place} can be written to by everybody (chmod o-w {place})"
    return None


def _foreign(place: Path, writers: int) -> str | None:
    found = place.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"{place} belongs to user {found.st_uid}, not to you (user {os.geteuid()})"
    if found.st_mode & writers:
        return f"{place} can be written to by others (chmod go-w {place})"
    return None
