"""A log that nobody reads."""

from __future__ import annotations

import fcntl
import logging
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from latentd.stderr_handler import StderrHandler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = 8192
"""Of the pipe: two pages, of which the last one is not written to before it is empty."""


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.INFO, "x.py", 1, text, None, None)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SIZE)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_lines_that_nobody_reads_are_lost_and_counted_before_the_next_one(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    handler = StderrHandler(writer)
    for number in range(100):
        handler.emit(record(f"{number} " + "x" * 95))
    first = os.read(reader, 1 << 16).decode().splitlines()
    assert [int(line.split()[0]) for line in first] == list(range(len(first)))
    handler.emit(record("read again"))
    handler.emit(record("and again"))
    told = f"{100 - len(first)} lines were lost here: nobody read them"
    assert os.read(reader, 1 << 16).decode().splitlines() == [told, "read again", "and again"]


def test_a_line_longer_than_the_pipe_does_not_block(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    StderrHandler(writer).emit(record("x" * (3 * SIZE)))
    assert os.read(reader, 1 << 16) == b"x" * SIZE


def test_a_line_of_a_signal_does_not_take_the_room_that_another_line_was_promised(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    handler = StderrHandler(writer)
    poll, signals = handler._writable, iter(["interrupts", "interrupts again"])

    def interrupted(timeout_ms: int) -> object:
        found = poll.poll(timeout_ms)
        for text in signals:
            handler.emit(record(text))
        return found

    handler._writable = SimpleNamespace(poll=interrupted)  # type: ignore[assignment]
    handler.emit(record("first"))
    handler.emit(record("last"))
    told = os.read(reader, 1 << 16).decode().splitlines()
    assert told == ["first", "interrupts", "interrupts again", "last"]


def test_a_reader_that_is_gone_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    StderrHandler(writer).emit(record("hello"))
    os.close(writer)
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        handler = StderrHandler(full.fileno())
        handler.emit(record("hello"))
    assert capsys.readouterr().err == ""
    assert handler._lost == 1


def test_a_file_takes_all_lines(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        handler = StderrHandler(file.fileno())
        for text in ("one", "two \udc80", "x" * 10_000):
            handler.emit(record(text))
    assert (tmp_path / "log").read_text().splitlines() == ["one", "two \\udc80", "x" * 10_000]
