"""Runs the small cases of race_cases under compute-sanitizer's racecheck and judges its reports.

`python tests/racecheck.py` deals the cases to processes that run side by side, and fails when a
kernel of the cubins was not launched, when racecheck reports what race_reports.toml does not
explain, and when a report that is explained there has vanished. The cubins are those of `python -m
latentd_kernels.build --line-info`: reports name source lines, and all lanes of a warp arrive at
mbarriers where one lane's arrival is enough.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from latentd_kernels import driver, manifest
from latentd_kernels.launcher import HOPPER
from latentd_kernels.library import Library

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CUBINS: Final = Path("build/racecheck")
EXPLAINED: Final = Path(__file__).with_name("race_reports.toml")
SANITIZER: Final = (
    "compute-sanitizer", "--tool", "racecheck", "--show-backtrace", "no", "--strip-paths", "no",
    "--print-limit", "0", "--racecheck-num-workers", "2",
    "--kernel-name-exclude", "regex=^_Z",  # torch's: ours are not mangled
)  # fmt: skip
KERNEL: Final = "@kernel "
FAILED: Final = "@failed "
_REPORT: Final = re.compile(r"=+ (Error|Warning): Race reported between (.*)")
_OTHER: Final = re.compile(r"=+ +and (.*)")
_ACCESS: Final = re.compile(r"(?:Write|Read) access at (.*?)\+0x[0-9a-f]+(?: in (.*):\d+)?(?: |$)")


@dataclass(frozen=True)
class Race:
    """Two accesses that racecheck reports, in no order, by the functions that make them: that
    outlives other code around them, and a report may name a line of a function or another."""

    level: str
    kernel: str
    functions: frozenset[str]

    def __str__(self) -> str:
        return f"{self.level} in {self.kernel} between {' and '.join(sorted(self.functions))}"


def races(output: str) -> Counter[Race]:
    """The reports in the output of a process, and how often each was made."""
    found: Counter[Race] = Counter()
    kernel = level = first = "?"
    for line in output.splitlines():
        if line.startswith(KERNEL):
            kernel = line.removeprefix(KERNEL)
        elif begins := _REPORT.match(line):
            level, first = begins[1], function(begins[2])
        elif other := _OTHER.match(line):
            found[Race(level, kernel, frozenset((first, function(other[1]))))] += 1
    return found


def function(access: str) -> str:
    """`file: function` of an access, without parameters and template arguments."""
    found = _ACCESS.match(access)
    assert found is not None, access
    name, path = found.groups()
    while "<" in name:
        name = re.sub(r"<[^<>]*>", "", name)
    name = name.partition("(")[0].strip(":")
    return f"{posixpath.normpath(path).rpartition('/csrc/')[2]}: {name}" if path else name


def judge(found: Iterable[Race], explained: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the reports found: those that no entry of the list explains, and entries
    that explain none."""
    entries = {
        Race(entry["level"], entry["kernel"], frozenset(entry["functions"])) for entry in explained
    }
    unknown = sorted(str(race) for race in set(found) - entries)
    gone = sorted(str(race) for race in entries - set(found))
    return [
        *(f"not explained in {EXPLAINED.name}: {race}" for race in unknown),
        *(f"explained in {EXPLAINED.name} and not reported: {race}" for race in gone),
    ]


class Announcing:
    """A library that says which kernel runs, and lets no other run beside it."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def launch(self, name: str, *args: Any, **rest: Any) -> None:
        print(f"{KERNEL}{name}", flush=True)
        self._library.launch(name, *args, **rest)
        driver.synchronize(rest["stream"])


def run_cases(names: Sequence[str], cubins: Path) -> int:
    """What a process under racecheck does; returns its exit code."""
    import torch

    from race_cases import CASES, Card

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.set_stream(stream)
    card = Card(Announcing(Library(cubins)), torch.device("cuda"), stream.cuda_stream)
    for name in names:
        start = time.monotonic()
        CASES[name](card)
        print(f"{time.monotonic() - start:.1f} s: {name}", flush=True)
    return 0


def run_processes(names: Sequence[str], cubins: Path, processes: int, limit_s: float) -> list[str]:
    """Deal the cases to processes under racecheck; their outputs. One that fails or is not done in
    time says so in its last line."""
    cases = [names[share::processes] for share in range(processes)]
    command = [*SANITIZER, sys.executable, __file__, "--cubins", str(cubins), "--run"]
    running = [
        subprocess.Popen(
            [*command, *share], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for share in cases
        if share
    ]
    with ThreadPoolExecutor(len(running)) as pool:
        return list(pool.map(partial(_output, until=time.monotonic() + limit_s), running))


def _output(process: subprocess.Popen[str], until: float) -> str:
    try:
        output, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return f"{output}\n{FAILED}not done in time"
    return output if process.returncode == 0 else f"{output}\n{FAILED}exit {process.returncode}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/racecheck.py", description=__doc__)
    parser.add_argument("--cubins", type=Path, default=CUBINS, help=f"default {CUBINS}")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--limit", type=float, default=170, help="seconds for all (default 170)")
    parser.add_argument("--run", nargs="*", help="run these cases here, under racecheck already")
    options = parser.parse_args(arguments)
    if options.run is not None:
        return run_cases(options.run, options.cubins)
    from race_cases import CASES

    start = time.monotonic()
    outputs = run_processes(list(CASES), options.cubins, options.processes, options.limit)
    found = sum(map(races, outputs), Counter[Race]())
    launched = {
        line.removeprefix(KERNEL)
        for output in outputs
        for line in output.splitlines()
        if line.startswith(KERNEL)
    }
    kernels = manifest.load(options.cubins, HOPPER).kernels.keys()
    complaints = [
        *(f"a process failed:\n{output}" for output in outputs if FAILED in output),
        *(f"not launched: {name}" for name in sorted(kernels - launched)),
        *judge(found, tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))["race"]),
    ]
    print(*complaints, sep="\n")
    print(
        f"racecheck: {len(launched)} of {len(kernels)} kernels, {found.total()} reports of "
        f"{len(found)} kinds, {len(complaints)} complaints, {time.monotonic() - start:.0f} s"
    )
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
