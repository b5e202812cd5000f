"""`latentd top` on a terminal: it draws, follows its size, ends at Ctrl-C, and waits for a daemon
that has gone."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest

from lives import Lives
from processes import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("rich")

WAIT_S = 60.0
ON_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
from latentd.__main__ import main
sys.exit(main())
"""
"""Makes its stdin the terminal that Ctrl-C comes from, and heeds that also where a shell has put
the tests into its background, which makes them ignore it."""
HOME, CODES = "\x1b[H", re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TO_OTHER_SCREEN, BACK = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, columns: int, *args: str) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns)
        environ = environment(TERM="xterm")
        environ.pop("COLUMNS", None)
        environ.pop("LINES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *args],
            env=environ, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def resize(self, columns: int) -> None:
        """Give it another width."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        """Type."""
        os.write(self._master, keys)

    def frame(self) -> str:
        """The last screen that was drawn as a whole, without colours."""
        frames = self.text.split(HOME)
        return CODES.sub("", frames[-2]) if len(frames) > 2 else ""

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Read on until it is so."""
        end = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < end, self.text[-2000:]
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._master, 1 << 16).decode(errors="replace")
                except OSError:  # nobody has it open any more
                    return

    def end(self) -> int:
        """Read the rest; the exit code."""
        self.wait_until(lambda: self.process.poll() is not None)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """End it if it has not ended."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def lives(endpoint: str) -> Iterator[Lives]:
    with Lives(endpoint) as lives:
        yield lives


@pytest.fixture
def terminal(endpoint: str, lives: Lives) -> Iterator[Terminal]:
    flags = ("--interval-s", "0.1", "--timeout-s", "10", "--endpoint", endpoint)
    terminal = Terminal(110, "top", *flags)
    yield terminal
    terminal.close()


def widest(frame: str) -> int:
    return max(len(line.rstrip("\r")) for line in frame.split("\n"))


def test_it_draws_on_a_screen_of_its_own_and_gives_the_terminal_back_at_ctrl_c(
    terminal: Terminal,
) -> None:
    terminal.wait_until(lambda: "0 of 8" in terminal.frame())
    assert TO_OTHER_SCREEN in terminal.text
    assert BACK not in terminal.text
    terminal.type(b"\x03")
    assert terminal.end() == 0
    assert BACK in terminal.text
    assert "Traceback" not in terminal.text


def test_it_follows_the_size_of_its_terminal(terminal: Terminal) -> None:
    for columns in (110, 60, 150):
        terminal.resize(columns)
        terminal.wait_until(lambda columns=columns: widest(terminal.frame()) == columns)  # type: ignore[misc]
        assert "slots" in terminal.frame()


def test_it_says_that_the_daemon_has_gone_and_goes_on_when_it_is_back(
    terminal: Terminal, lives: Lives
) -> None:
    terminal.wait_until(lambda: "0 of 8" in terminal.frame())
    lives.end()
    terminal.wait_until(lambda: "no answer for" in terminal.frame())
    assert "0 of 8" in terminal.frame()  # what was known last
    lives.begin()
    terminal.wait_until(lambda: "no answer for" not in terminal.frame())
    assert terminal.process.poll() is None
