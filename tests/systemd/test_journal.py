"""What the daemon's log is in the journal of a real systemd: lines with fields, which can be asked
for by kind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from service_manager import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from service_manager import Manager

UNIT = "latentd.service"
KIND = "%s has changed; a restart is needed for it"


def records(manager: Manager, *matches: str) -> list[dict[str, Any]]:
    """Records of the daemon's unit, the oldest first."""
    command = ("journalctl", f"--unit={UNIT}", *matches, "--output=json", "--no-pager")
    return [json.loads(line) for line in manager.run(*command).splitlines()]


def test_a_line_has_its_fields_and_is_found_by_its_kind(running: Manager, settings: Path) -> None:
    running.note("A line of the log in the journal, with its fields.")
    settings.write_text(settings.read_text().replace("max_slots = 2", "max_slots = 3"))
    running.run("systemctl", "reload", UNIT)
    match = f"LATENTD_TEMPLATE={KIND}"
    wait_until(lambda: bool(records(running, match)))
    record = records(running, match)[-1]
    expected = {
        "MESSAGE": KIND % "max_slots", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "latentd",
        "LATENTD_LOGGER": "latentd", "LATENTD_THREAD": "MainThread", "CODE_FUNC": "reread",
        "_SYSTEMD_UNIT": UNIT, "_PID": running.show(UNIT, "MainPID")["MainPID"],
    }  # fmt: skip
    assert {name: record.get(name) for name in expected} == expected
    assert record["CODE_FILE"].endswith("/latentd/commands/serve.py")
    assert record["CODE_LINE"].isdigit()
