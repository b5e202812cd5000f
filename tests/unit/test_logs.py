"""The log: with fields in the journal, with the time on any other stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, TextIO

import pytest

from latentd import logs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    """What a journal would read from."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "journal"))
        found.settimeout(30)
        yield found


@pytest.fixture
def log(journal: socket.socket) -> Iterator[logging.Logger]:
    """A logger that writes there."""
    handler = logs.JournalHandler(str(journal.getsockname()))
    logger = logging.Logger("latentd.something")
    logger.addHandler(handler)
    yield logger
    handler.close()


def fields(journal: socket.socket) -> dict[str, str]:
    """The fields of the next message."""
    found, rest = {}, journal.recv(1 << 20)
    while rest:
        line, _, rest = rest.partition(b"\n")
        name, is_plain, value = line.partition(b"=")
        if not is_plain:
            size = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[8 + size + 1 :]
        found[name.decode()] = value.decode()
    return found


def test_a_line_has_its_text_level_place_and_kind(
    journal: socket.socket, log: logging.Logger
) -> None:
    log.warning("%s has changed", "endpoint")
    found = fields(journal)
    assert (found["MESSAGE"], found["PRIORITY"]) == ("endpoint has changed", "4")
    assert found["LATENTD_TEMPLATE"] == "%s has changed"
    assert found["LATENTD_LOGGER"] == "latentd.something"
    assert found["CODE_FUNC"] == "test_a_line_has_its_text_level_place_and_kind"
    assert "LATENTD_LOST" not in found


def test_an_exception_is_told_with_all_its_lines(
    journal: socket.socket, log: logging.Logger
) -> None:
    try:
        raise KeyError("a=b\nc")
    except KeyError:
        log.exception("failed")
    found = fields(journal)
    assert found["LATENTD_EXCEPTION"] == "KeyError"
    assert found["PRIORITY"] == "3"
    assert found["MESSAGE"].startswith("failed\nTraceback")
    assert found["CODE_LINE"].isdigit()  # the field behind it is read as well


def test_a_value_cannot_forge_a_field(journal: socket.socket, log: logging.Logger) -> None:
    log.info("from a client: %s", "x\nPRIORITY=0\nLATENTD_LOGGER=other")
    found = fields(journal)
    assert (found["PRIORITY"], found["LATENTD_LOGGER"]) == ("6", "latentd.something")


def test_a_journal_that_does_not_read_holds_nobody_up_and_hears_how_much_it_missed(
    journal: socket.socket, log: logging.Logger
) -> None:
    for number in range(3000):
        log.info("line %d", number)
    journal.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            assert "LATENTD_LOST" not in fields(journal)
            count += 1
    assert 0 < count < 3000
    for lost in (str(3000 - count), None):
        log.info("again")
        assert fields(journal).get("LATENTD_LOST") == lost


@contextlib.contextmanager
def started(monkeypatch: pytest.MonkeyPatch, stream: TextIO, journal: str) -> Iterator[None]:
    """Logging as in a process whose stderr, connected by systemd to its journal, is `stream`."""
    root = logging.getLogger()
    level = root.level
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", stream)
    found = os.fstat(stream.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
    logs.start_logging("info", journal)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in root.handlers:
            handler.close()


def test_the_text_in_the_journal_has_no_level_and_no_name_before_it(
    journal: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        open(os.devnull, "w") as stream,
        started(monkeypatch, stream, str(journal.getsockname())),
    ):
        logging.getLogger("latentd.other").info("serving at %s", "here")
    found = fields(journal)
    assert (found["MESSAGE"], found["LATENTD_LOGGER"]) == ("serving at here", "latentd.other")


def test_only_a_stderr_that_is_the_journal_is_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino + 1}")
        assert not logs.is_journal()
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        assert logs.is_journal()
        monkeypatch.delenv("JOURNAL_STREAM")
        assert not logs.is_journal()


def test_without_its_socket_the_journal_gets_lines_with_their_level(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "stderr"
    with target.open("w") as stream, started(monkeypatch, stream, str(tmp_path / "none")):
        logging.getLogger("latentd.other").error("no")
    assert target.read_text() == "<3>no\n"
