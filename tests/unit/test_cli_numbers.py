"""Options that are numbers, of every command: what cannot be is refused while it is read."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from latentd.__main__ import build_parser
from latentd.commands.parsing import Parser
from latentd.config import SETTINGS
from latentd.settings import ConfigError
from latentd_client import protocol
from latentd_openai.__main__ import build_parser as build_door_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPOSSIBLE = ("9" * 40, "9" * 5000, "-1", "nan", "inf", "1e400", "0x10", "none")
MUST_BE = re.compile(
    r"whole numbers? of \d+ to \d+|a number of \d+ to [\de+]+|above 0 and up to \d+"
    r"|port of 0 to 65535|MxK with sizes up to \d+|widths NOPE/V that have kernels: \d+/\d+"
)


def numbers(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The options that are read by a function of ours, endpoints left out, and their parsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from numbers(inner)
        elif action.type not in (None, Path) and not action.option_strings[0].endswith("endpoint"):
            yield parser, action.option_strings[0]


OPTIONS = [*numbers(build_parser()), *numbers(build_door_parser())]


@pytest.mark.parametrize(
    ("parser", "flag"), OPTIONS, ids=[f"{parser.prog} {flag}" for parser, flag in OPTIONS]
)
def test_what_is_no_number_of_the_range_is_told_with_the_range(
    parser: argparse.ArgumentParser, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in IMPOSSIBLE:
        with pytest.raises(SystemExit):
            parser.parse_args([f"{flag}={text}"])
        told = capsys.readouterr().err.splitlines()[-1]
        assert f"argument {flag}: '{text[:60]}" in told
        assert MUST_BE.search(told), told
        assert len(told) < 300


def test_every_command_that_has_numbers_is_looked_at() -> None:
    programs = {parser.prog for parser, _ in OPTIONS}
    assert {"latentd trace", "latentd top", "latentd bench step", "latentd-openai"} <= programs
    assert len(OPTIONS) > 40


@pytest.mark.parametrize("port", ["9" * 5000, "²", "65536", "-1", "", "0x10", "1_0"])
def test_an_endpoint_whose_port_cannot_be_is_refused_by_name(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["status", f"--endpoint=tcp://127.0.0.1:{port}"])
    told = capsys.readouterr().err
    assert "endpoint = 'tcp://127.0.0.1:" in told
    assert "the port 0 to 65535" in told


@pytest.mark.parametrize(
    ("data", "control"),
    [
        ("tcp://h:5000", "tcp://h:5001"), ("tcp://h:0", "tcp://h:*"), ("tcp://h:*", "tcp://h:*"),
        ("tcp://h:65535", "tcp://h:*"), ("tcp://h:²", "tcp://h:²"), ("tcp://h", "tcp://h"),
    ],
)  # fmt: skip
def test_a_control_socket_has_a_port_that_there_is(data: str, control: str) -> None:
    assert protocol.control_endpoint(data) == control


def test_the_longest_wait_is_one_that_the_clock_can_wait() -> None:
    parser: Parser = build_parser()
    assert parser.parse_args(["top", "--interval-s", "1e9"]).interval_s == 1e9
    assert parser.parse_args(["drain", "--drain-s", "0"]).drain_s == 0


@pytest.mark.parametrize("name", [n for n, row in SETTINGS.items() if row.high])
def test_a_setting_that_is_no_number_of_its_range_is_told_with_the_range(name: str) -> None:
    row = SETTINGS[name]
    for text in IMPOSSIBLE:
        with pytest.raises(ConfigError, match=rf"^{name} = .*: expected ") as caught:
            row.check(row.parse(text), f"flag {row.flag}")
        assert f"{row.high:g}" in str(caught.value) or str(row.high) in str(caught.value)
        assert len(str(caught.value)) < 600
