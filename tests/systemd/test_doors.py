"""latentd-openai.service and latentd-metrics.service under a real systemd: they serve, have no more
rights than they need, and go on when the daemon is restarted or comes later."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest

from service_manager import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from service_manager import Manager

UNITS: Final = ("latentd-openai.service", "latentd-metrics.service")
OPENAI, METRICS = UNITS
KEYED: Final = """LoadCredential=key:/etc/latentd/openai.key
Environment="OPTIONS=--host 0.0.0.0 --api-key-file %d/key"
IPAddressAllow=any
"""
"""As docs/operations.md has it."""
URLS: Final = ("http://127.0.0.1:8000/v1/completions", "http://127.0.0.1:9464/metrics")
PROMPT: Final = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
ASK: Final = """import sys, urllib.request as web
url, body, key, word = sys.argv[1:]
headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
reply = web.urlopen(web.Request(url, body.encode() or None, headers)).read().decode()
print(*(line for line in reply.splitlines() if word in line), sep="\\n")
"""


def ask(manager: Manager, *asked: str, expect: int = 0) -> str:
    """What a unit replies. `asked` are the URL, a body (which makes it a POST) or nothing, a key,
    and a word of the lines that are wanted."""
    return manager.run("/opt/lab/bin/python", "-c", ASK, *asked, expect=expect)


def assert_serves(manager: Manager, unit: str, key: str = "none") -> None:
    """Use what a unit serves, with the daemon behind it."""
    if unit == OPENAI:
        reply = json.loads(ask(manager, URLS[0], json.dumps(PROMPT), key, ""))
        assert reply["usage"]["completion_tokens"] == PROMPT["max_tokens"]
    else:
        assert "latentd_up 1.0" in ask(manager, URLS[1], "", key, "latentd_up").splitlines()


def start(manager: Manager, unit: str) -> str:
    """Start it, and wait until it serves; its process."""
    manager.run("systemctl", "restart", unit)
    wait_until(lambda: says_serving(manager, unit))
    return manager.show(unit, "MainPID")["MainPID"]


def says_serving(manager: Manager, unit: str) -> bool:
    """Whether its process has said that it serves."""
    return "serving " in manager.log(unit, f"_PID={manager.peek(unit, 'MainPID')}")


@pytest.mark.parametrize("unit", UNITS)
def test_it_serves_and_goes_on_when_the_daemon_is_restarted(running: Manager, unit: str) -> None:
    running.note(f"{unit} beside the daemon, which is restarted.")
    process = start(running, unit)
    assert_serves(running, unit)
    running.run("systemctl", "restart", "latentd")
    assert_serves(running, unit)
    assert running.show(unit, "MainPID", "NRestarts") == {"MainPID": process, "NRestarts": "0"}
    running.run("systemctl", "stop", unit)
    assert running.show(unit, "Result") == {"Result": "success"}


@pytest.mark.parametrize("unit", UNITS)
def test_it_has_an_account_of_its_own_in_the_group_and_no_rights(
    running: Manager, unit: str
) -> None:
    running.note(f"What {unit} is.")
    process = start(running, unit)
    wanted = "^(Uid|Gid|CapEff|CapBnd|NoNewPrivs|Seccomp):"
    status = running.run("grep", "-E", wanted, f"/proc/{process}/status")
    fields = dict(line.split(":\t") for line in status.splitlines())
    folder = (running.root / "run/latentd").stat()
    assert set(fields["Gid"].split()) == {str(folder.st_gid)}
    assert not set(fields["Uid"].split()) & {"0", str(folder.st_uid)}
    assert fields["CapEff"] == fields["CapBnd"] == "0" * 16
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    running.run("systemctl", "stop", unit)


def test_a_list_of_groups_lets_them_in(stopped: Manager, settings: Path) -> None:
    stopped.note("allow_groups, with the programs beside the daemon.")
    settings.write_text(f'{settings.read_text()}allow_groups = "latentd"\n')
    stopped.run("systemctl", "start", "latentd")
    for unit in UNITS:
        start(stopped, unit)
        assert_serves(stopped, unit)
        stopped.run("systemctl", "stop", unit)


@pytest.fixture
def dropin(manager: Manager) -> Iterator[Callable[[str, str], None]]:
    """Gives a unit a drop-in with these lines of [Service], for a test."""

    def file(unit: str) -> Path:
        return manager.root / f"run/systemd/system/{unit}.d/options.conf"

    def write(unit: str, lines: str) -> None:
        file(unit).parent.mkdir(exist_ok=True)
        file(unit).write_text(f"[Service]\n{lines}")
        manager.run("systemctl", "daemon-reload")

    yield write
    for unit in UNITS:
        manager.run("systemctl", "stop", unit)
        file(unit).unlink(missing_ok=True)
    manager.run("systemctl", "daemon-reload")


def test_the_openai_door_waits_for_a_daemon(stopped: Manager) -> None:
    stopped.note(f"{OPENAI} before the daemon.")
    stopped.run("systemctl", "start", OPENAI)
    wait_until(lambda: stopped.peek(OPENAI, "NRestarts") != "0")
    stopped.run("systemctl", "start", "latentd")
    wait_until(lambda: says_serving(stopped, OPENAI))
    assert_serves(stopped, OPENAI)
    stopped.run("systemctl", "stop", OPENAI)


@pytest.mark.parametrize("unit", UNITS)
def test_a_flag_that_is_wrong_ends_it_for_good(
    running: Manager, dropin: Callable[[str, str], None], unit: str
) -> None:
    running.note(f"{unit} with a flag that is wrong.")
    dropin(unit, 'Environment="OPTIONS=--nothing"\n')
    running.run("systemctl", "start", unit)
    wait_until(lambda: running.peek(unit, "ActiveState") == "failed")
    shown = running.show(unit, "ExecMainStatus", "NRestarts")
    assert shown == {"ExecMainStatus": "2", "NRestarts": "0"}


def test_the_openai_door_gets_its_key_as_a_credential(
    running: Manager, dropin: Callable[[str, str], None]
) -> None:
    running.note(f"{OPENAI} with a key in a file that only root can read, as the page has it.")
    key = running.root / "etc/latentd/openai.key"
    key.write_text("a key\n")
    key.chmod(0o600)
    dropin(OPENAI, KEYED)
    start(running, OPENAI)
    assert "401: Unauthorized" in ask(running, URLS[0], json.dumps(PROMPT), "none", "", expect=1)
    assert_serves(running, OPENAI, "a key")
