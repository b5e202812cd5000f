"""Collects the figures that tests measure beside what they assert; shown after the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Note a named figure of this test."""
    lines = request.config.stash.setdefault(LINES, [])
    return lambda name, value: lines.append(f"{request.node.name}: {name} = {value}")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the figures."""
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)
