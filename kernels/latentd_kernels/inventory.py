"""Generates KERNELS.md, the list of kernels, from the comments above their entry points.

A block starts with `// kernel NAME[, NAME]: sentence` and goes on with the fields `// shapes:`,
`// rounds:` and `// launch:`, each free to continue on following comment lines. A `*` in a name
stands for the part that varies in a family of entry points.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from latentd_kernels import manifest

FIELDS: Final = ("shapes", "rounds", "launch")
PAGE: Final = manifest.SOURCES.parents[2] / "KERNELS.md"
_HEAD: Final = """\
# Kernels

What each kernel computes, its shapes, its landings and order of reductions, and its launch.
Generated from the comments in `kernels/latentd_kernels/csrc` by
`python -m latentd_kernels.inventory`; do not edit. The manifest beside the cubins has registers,
shared memory and spills.

Files under hopper/ are compiled for sm_90a only; the others are the portable kernels. These are
tested on an H200; their builds for sm_80, sm_86, sm_89, sm_100 and sm_120 and the PTX are compiled,
but have run on no such card.
"""
_ENTRY: Final = re.compile(r'extern\s+"C"\s+__global__\s[^;{]*?(\w+)\s*\([^()]*\)\s*\{')


class InventoryError(RuntimeError):
    """A doc block that is incomplete, or an entry point without one; the text names it."""


@dataclass(frozen=True)
class Block:
    """The documentation of the entry points `names` in a source."""

    source: str
    names: tuple[str, ...]
    computes: str
    shapes: str
    rounds: str
    launch: str


def parse(source: Path, name: str | None = None) -> list[Block]:
    """Doc blocks of a source (`name` on the page), in order. Raises InventoryError for one that
    lacks a field."""
    blocks = []
    lines = source.read_text(encoding="utf-8").splitlines()
    for at, line in enumerate(lines):
        start = re.match(r"// kernel ([\w*, ]+): *(.*)", line)
        if not start:
            continue
        fields = {"computes": [start[2]]}
        field = "computes"
        for following in lines[at + 1 :]:
            if not following.startswith("//"):
                break
            text = following.removeprefix("//").strip()
            named = re.match(rf"({'|'.join(FIELDS)}): *(.*)", text)
            if named:
                field, text = named[1], named[2]
            fields.setdefault(field, []).append(text)
        names = tuple(name.strip() for name in start[1].split(","))
        for field in FIELDS:
            if not any(fields.get(field, ())):
                raise InventoryError(f"{source.name}: the block of {start[1]} has no `{field}:`")
        joined = {name: " ".join(filter(None, part)) for name, part in fields.items()}
        blocks.append(Block(name or source.name, names, **joined))
    return blocks


def entry_points(source: Path) -> set[str]:
    """Names of the `extern "C"` entry points that stand in the text of a source.

    Those that a macro stamps out are not seen here; the manifests know them.
    """
    text = re.sub(r"//[^\n]*", "", source.read_text(encoding="utf-8"))
    text = re.sub(r"^\s*#\s*define(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.MULTILINE)
    text = re.sub(r"__launch_bounds__\s*\([^)]*\)", "", text)
    return set(_ENTRY.findall(text))


def collect(sources: Path = manifest.SOURCES, cubin_dir: Path = manifest.CUBIN_DIR) -> list[Block]:
    """All blocks. Raises InventoryError unless they name exactly the entry points of the sources
    and, where a current manifest is there, of the cubins."""
    files = {path.relative_to(sources).as_posix(): path for path in sorted(sources.rglob("*.cu"))}
    blocks = [block for name, path in files.items() for block in parse(path, name)]
    source_of = {name: block.source for block in blocks for name in block.names}
    documented = [name for block in blocks for name in block.names]
    if len(set(documented)) < len(documented):
        twice = sorted({name for name in documented if documented.count(name) > 1})
        raise InventoryError(f"documented twice: {', '.join(twice)}")
    in_text = {name for path in files.values() for name in entry_points(path)}
    undocumented, unknown = _missing(in_text, documented), set[str]()
    for path in cubin_dir.glob(f"*/{manifest.FILE_NAME}"):
        arch = path.parent.name
        try:
            compiled = manifest.load(cubin_dir, arch, sources).kernels.keys()
        except manifest.ManifestError:
            continue  # stale: it says nothing about these sources
        undocumented |= _missing(compiled, documented)
        expected = [name for name in documented if manifest.compiled_for(source_of[name], arch)]
        unknown |= {name for name in expected if not fnmatch.filter(compiled, name)}
    if undocumented:
        raise InventoryError(f"entry points without a block: {', '.join(sorted(undocumented))}")
    if unknown:
        raise InventoryError(f"blocks without an entry point: {', '.join(sorted(unknown))}")
    return blocks


def _missing(names: Iterable[str], documented: Sequence[str]) -> set[str]:
    return {name for name in names if not any(fnmatch.fnmatch(name, doc) for doc in documented)}


def render(blocks: Sequence[Block]) -> str:
    """The page."""
    parts = [_HEAD]
    for source in sorted({block.source for block in blocks}):
        parts.append(f"## {source}\n")
        for block in (block for block in blocks if block.source == source):
            title = ", ".join(f"`{name}`" for name in block.names)
            parts.append(f"### {title}\n\n{block.computes}\n")
            parts.append("".join(f"- {name}: {getattr(block, name)}\n" for name in FIELDS))
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (1: incomplete, or stale with --check)."""
    parser = argparse.ArgumentParser(prog="python -m latentd_kernels.inventory")
    parser.add_argument("--check", action="store_true", help="write nothing, fail when stale")
    options = parser.parse_args(arguments)
    try:
        page = render(collect())
    except InventoryError as error:
        print(error, file=sys.stderr)
        return 1
    if not options.check:
        manifest.write_atomically(PAGE, page.encode())
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
        print("KERNELS.md is stale: run `python -m latentd_kernels.inventory`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
