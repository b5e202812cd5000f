"""What the documents name is there: links, files, tests and targets of make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("client", "daemon", "docs", "kernels", "systemd", "tests")
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(p for name in FOLDERS for p in (ROOT / name).rglob("*.md")))
    if "node_modules" not in page.parts
)
FILE = re.compile(rf"\b((?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:py|cuh?|md|toml|json))\b")
MAKE = re.compile(r"(?:`|^ {4}|; )make ([a-z][a-z-]*)", re.MULTILINE)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
TESTS = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in (path.stem, *re.findall(r"def (test_\w+)", path.read_text()))
}


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        assert found.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(found), f"{target} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_files_and_tests_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    for name in FILE.findall(text):
        assert (ROOT / name).is_file(), f"{name} is not there"
    for name in re.findall(r"\b(test_\w+)\b", text):
        assert name in TESTS or name.endswith("_"), f"no test is called {name}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_targets_of_make_that_a_page_names_are_there(page: Path) -> None:
    for name in MAKE.findall(page.read_text()):
        assert name in TARGETS, f"make {name} is no target"
