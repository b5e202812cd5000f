"""Log lines to stderr, without ever waiting for who reads them.

A pipe that nobody reads takes 64 KiB; the next line would hold up the engine for good.
"""

from __future__ import annotations

import logging
import os
import select
from typing import Final

PIECE_BYTES: Final = 4096
"""What a pipe takes at once when it is said to be writable (PIPE_BUF, pipe(7))."""


class StderrHandler(logging.Handler):
    """Writes records to a descriptor. A line that is not taken at once is lost; how many were is
    told before the next one."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._writable = select.poll()
        self._writable.register(descriptor, select.POLLOUT)
        self._lost = 0
        self._lines: list[str] = []
        self._is_writing = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it as lost. A signal may interrupt that on the same thread, and
        its handler log a line: it comes behind, since it would take the room that was found."""
        try:
            self._lines.append(self.format(record) + "\n")
            if not self._is_writing:
                self._write_lines()
        except Exception:
            self.handleError(record)

    def _write_lines(self) -> None:
        self._is_writing = True
        try:
            while self._lines:
                text = self._lines.pop(0)
                if self._lost:
                    text = f"{self._lost} lines were lost here: nobody read them\n{text}"
                is_written = self._write(text.encode(errors="backslashreplace"))
                self._lost = 0 if is_written else self._lost + 1
        finally:
            self._is_writing = False

    def _write(self, data: bytes) -> bool:
        for start in range(0, len(data), PIECE_BYTES):
            if not self._writable.poll(0):
                return False
            try:
                os.write(self._descriptor, data[start : start + PIECE_BYTES])
            except OSError:  # its reader is gone, or the disk is full
                return False
        return True
