"""Where the daemon's log goes: to stderr, or with its fields to the journal of systemd.

A line must never hold up the engine: what is not taken at once is lost, and counted.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Final

from latentd.stderr_handler import StderrHandler

if TYPE_CHECKING:
    from collections.abc import Iterator

JOURNAL: Final = "/run/systemd/journal/socket"
MAX_BYTES: Final = 1 << 16
"""Of a message; longer ones (a trace of many calls) lose their end."""


def start_logging(level: str, journal: str = JOURNAL) -> None:
    """Log from now on: where stderr goes to the journal, with fields; else with the time."""
    logging.basicConfig(level=level.upper(), handlers=[_handler(journal)])


def _handler(journal: str) -> logging.Handler:
    plain = StderrHandler(sys.stderr.fileno())
    if not is_journal():
        plain.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        return plain
    try:
        return JournalHandler(journal)
    except OSError:  # out of sight, in a sandbox: its stderr is there all the same
        plain.setFormatter(_LevelFormatter("%(message)s"))
        return plain


def is_journal() -> bool:
    """Whether systemd has connected our stderr to the journal; a child may have another one."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def priority(record: logging.LogRecord) -> int:
    """The level as syslog counts it."""
    for level, number in ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6)):
        if record.levelno >= level:
            return number
    return 7


class _LevelFormatter(logging.Formatter):
    """Puts the syslog level before the text, as sd-daemon(3) describes."""

    def format(self, record: logging.LogRecord) -> str:
        """Format with a prefix such as <6>."""
        return f"<{priority(record)}>{super().format(record)}"


class JournalHandler(logging.Handler):
    """Sends records to the journal, as systemd.io/JOURNAL_NATIVE_PROTOCOL has it. LATENTD_TEMPLATE
    is the text without its values: the same for all records of a kind."""

    def __init__(self, path: str) -> None:
        """Raises OSError when no journal listens there."""
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))  # else basicConfig sets another one
        self._lost = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, or count it as lost."""
        try:
            self._socket.send(b"".join(map(_field, *zip(*self._fields(record), strict=True))))
        except OSError:
            self._lost += 1
        except Exception:
            self.handleError(record)
        else:
            self._lost = 0

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
        super().close()

    def _fields(self, record: logging.LogRecord) -> Iterator[tuple[str, str]]:
        yield "MESSAGE", self.format(record)
        yield "PRIORITY", str(priority(record))
        yield "SYSLOG_IDENTIFIER", "latentd"
        yield "CODE_FILE", record.pathname
        yield "CODE_LINE", str(record.lineno)
        yield "CODE_FUNC", record.funcName or ""
        yield "LATENTD_LOGGER", record.name
        yield "LATENTD_THREAD", record.threadName or ""
        yield "LATENTD_TEMPLATE", str(record.msg)
        if record.exc_info and record.exc_info[0] is not None:
            yield "LATENTD_EXCEPTION", record.exc_info[0].__name__
        if self._lost:
            yield "LATENTD_LOST", str(self._lost)


def _field(name: str, text: str) -> bytes:
    """A field; one of several lines has its length before it."""
    value = text.encode(errors="replace")[:MAX_BYTES]
    if b"\n" not in value:
        return b"%s=%s\n" % (name.encode(), value)
    return b"%s\n%s%s\n" % (name.encode(), len(value).to_bytes(8, "little"), value)
