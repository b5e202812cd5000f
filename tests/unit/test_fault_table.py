"""The table of docs/faults.md and the tests of faults name each other, and clocks are monotonic."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from latentd_client.errors import CODES

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "faults.md").read_text()
FAULTS = ("unit/test_fault_process.py", "unit/test_fault_alive.py", "gpu/test_device_faults.py")
"""Whose tests must all be in the table; others may be."""


class Row(NamedTuple):
    fault: str
    seen: str
    exit_code: str
    lost: str
    tests: str


def table(head: str) -> list[list[str]]:
    """The cells of the table whose first column has that head."""
    _, _, rest = PAGE.partition(f"| {head} |")
    lines = rest.splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]


@functools.cache
def sources(*files: str) -> dict[str, str]:
    """The source of each test of these files, or of all, with what its decorators say."""
    found = {}
    for file in files or [str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")]:
        text = (TESTS / file).read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = ast.unparse(node)
    return found


ROWS = [Row(*cells) for cells in table("fault")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault)
def test_a_row_names_tests_that_look_for_its_exit_code_and_its_codes(row: Row) -> None:
    known = sources()
    names = re.findall(r"`(test_\w+)`", row.tests)
    assert names
    assert set(names) <= set(known)
    text = "".join(known[name] for name in names)
    for number in re.findall(r"\d+", row.exit_code):
        assert re.search(rf"\b{number}\b|with_{number}\b", text), f"exit code {number}"
    for code in re.findall(r"`([a-z_]+)`", row.seen):
        assert code in {*CODES, "connection_lost"}
        assert code in text


def test_all_tests_of_faults_are_in_the_table() -> None:
    named = {name for row in ROWS for name in re.findall(r"`(test_\w+)`", row.tests)}
    assert set(sources(*FAULTS)) <= named


def test_the_switches_are_those_of_the_launcher() -> None:
    told = {
        name for cells in table("file in the folder") for name in re.findall("`(.*?)`", cells[0])
    }
    text = (TESTS / "faulty.py").read_text()
    assert told == set(re.findall(r'"([a-z-]+)"(?:\)|: [A-Z])', text))


def test_nothing_that_is_installed_has_a_switch_for_faults() -> None:
    for top in ("daemon", "client", "kernels", "systemd"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".service", ".toml"):
                assert not re.search(r"faulty|inject|LATENTD_FAULT", path.read_text()), path


def test_only_snapshots_ask_for_the_time_of_day() -> None:
    """When it was saved is for people; everything else is measured by clocks that do not jump."""
    pattern = re.compile(r"\btime\.(time|time_ns|localtime|gmtime)\(|\bdatetime\b|CLOCK_REALTIME")
    found = [
        path.name
        for top in ("daemon/latentd", "client/latentd_client", "kernels/latentd_kernels")
        for path in (ROOT / top).rglob("*.py")
        if pattern.search(path.read_text())
    ]
    assert found == ["snapshot.py"]
