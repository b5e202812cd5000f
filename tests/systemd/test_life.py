"""latentd.service from start to stop under a real systemd: READY, reload, drain, and what follows a
crash, a hang, a device error and a bad setting."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from latentd_client import Client, ConnectionLost, Control, LatentdError, RequestRejected
from service_manager import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from latentd_client import Slot, Step
    from service_manager import Manager

UNIT = "latentd.service"


def endpoint(manager: Manager) -> str:
    """The data socket inside, as seen from here."""
    return f"ipc://{manager.root}/run/latentd/latentd.sock"


def control(manager: Manager) -> Control:
    """The control socket inside."""
    return Control(f"ipc://{manager.root}/run/latentd/latentd.ctl")


def switch(manager: Manager, name: str, text: str) -> Path:
    """Turn a fault on (faulty.py); the settings fixture turns it off."""
    file = manager.root / "etc/lab" / name
    file.write_text(text)
    return file


def test_start_returns_when_the_daemon_is_ready_however_long_it_loads(stopped: Manager) -> None:
    stopped.note("A start that takes longer than TimeoutStartSec, here 5 s: it asks for more.")
    switch(stopped, "slow-start", "6")
    seen = []
    with stopped.start("systemctl", "start", UNIT) as starting:
        while starting.poll() is None:
            seen.append((stopped.peek(UNIT, "ActiveState"), stopped.peek(UNIT, "StatusText")))
    assert starting.returncode == 0
    stopped.note(f"Seen meanwhile: {'; '.join(dict.fromkeys(map(' '.join, seen)))}")
    assert [text for state, text in seen if (state, text[:10]) == ("activating", "slow start")]
    assert {text for state, text in seen if state == "active"} <= {"serving tiny"}
    shown = stopped.show(UNIT, "ActiveState", "SubState", "StatusText", "NRestarts")
    assert shown == {
        "ActiveState": "active", "SubState": "running", "StatusText": "serving tiny",
        "NRestarts": "0",
    }  # fmt: skip
    with Client(endpoint(stopped)) as client:
        assert client.info.model == "tiny"


def test_reload_takes_over_what_may_change_and_names_what_may_not(
    running: Manager, settings: Path
) -> None:
    running.note("Reload: log_level, drain_s and save change at once; max_slots needs a restart.")
    text = settings.read_text()
    settings.write_text(text.replace("max_slots = 2", 'max_slots = 3\nlog_level = "debug"'))
    running.run("systemctl", "reload", UNIT)
    wait_until(lambda: "reloaded: " in running.log(UNIT))
    assert "max_slots has changed; a restart is needed for it" in running.log(UNIT)
    told = "serving tiny; a restart is needed for max_slots"
    assert running.peek(UNIT, "StatusText") == told
    assert running.peek(UNIT, "ActiveState") == "active"
    with control(running) as daemon:
        assert daemon.stats()["server"]["restart_needed"] == 1


def test_a_reload_that_fails_is_told_in_the_status_and_changes_nothing(
    running: Manager, settings: Path
) -> None:
    running.note("Reload of settings that are wrong.")
    settings.write_text("log_level = 'loud'\n")
    running.run("systemctl", "reload", UNIT)
    assert "reload failed: log_level = 'loud'" in running.peek(UNIT, "StatusText")
    running.show(UNIT, "ActiveState", "StatusText")
    with control(running) as daemon:
        assert daemon.health()["state"] == "ready"
        assert daemon.stats()["server"]["reload_failed"] == 1


def test_a_reload_returns_when_the_settings_are_read(running: Manager, settings: Path) -> None:
    running.note("Reload of settings that are slow to come: a pipe, which is written to later.")
    text = settings.read_text()
    settings.unlink()
    os.mkfifo(settings)
    with running.start("systemctl", "reload", UNIT) as reloading:
        wait_until(lambda: running.peek(UNIT, "ActiveState") == "reloading")
        time.sleep(0.5)
        assert reloading.poll() is None
        running.show(UNIT, "ActiveState", "SubState")
        settings.write_text(text + "log_level = 'loud'\n")
    assert reloading.returncode == 0
    assert "reload failed: log_level" in running.peek(UNIT, "StatusText")
    assert running.peek(UNIT, "ActiveState") == "active"
    settings.unlink()


def test_stop_drains_then_saves_and_the_next_start_goes_on(running: Manager) -> None:
    running.note(
        "Stop: work that runs gets drain_s, here more than TimeoutStopSec; then all is saved."
    )
    with Client(endpoint(running)) as client, control(running) as daemon:
        slot, idle = client.open([1, 2, 3]), client.open([4])
        stream = slot.stream(max_steps=400, credit=2)
        next(stream)
        with running.start("systemctl", "stop", UNIT) as stopping:
            wait_until(lambda: daemon.health()["state"] == "draining")
            with pytest.raises(RequestRejected, match="the daemon is about to stop"):
                idle.step()
            running.show(UNIT, "ActiveState", "SubState", "StatusText")
        assert stopping.returncode == 0
        shown = running.show(UNIT, "ActiveState", "Result", "ExecMainStatus")
        assert shown == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}
        running.run("ls", "-l", "/var/lib/latentd/saved/snapshot")
        running.run("systemctl", "start", UNIT)
        assert step_after_restart(idle).context_len == 2


def test_a_killed_daemon_is_restarted(running: Manager) -> None:
    running.note("SIGKILL.")
    before = running.show(UNIT, "MainPID", "NRestarts")
    running.run("systemctl", "kill", "--signal=SIGKILL", UNIT)
    await_restart(running, before)


def test_a_hung_step_is_killed_by_the_watchdog_and_leaves_its_stack_in_the_journal(
    running: Manager,
) -> None:
    running.note("A step hangs on the engine thread, WatchdogSec is 5 s here.")
    before = running.show(UNIT, "MainPID", "NRestarts")
    hang = switch(running, "hang", "1")
    step = threading.Thread(target=open_in_vain, args=(endpoint(running),))
    step.start()
    with control(running) as daemon:
        wait_until(lambda: daemon.stats()["age_s"] > 1)
        assert daemon.health()["state"] == "ready"  # the other threads are well
    hang.unlink()
    await_restart(running, before)
    step.join()
    assert "in faulty_wait" in running.log(UNIT)
    assert f"{UNIT}: Watchdog timeout (limit 5s)!" in running.log(UNIT)


def test_a_device_error_ends_the_daemon_with_70_and_it_is_restarted(running: Manager) -> None:
    running.note("A device error: exit code 70.")
    before = running.show(UNIT, "MainPID", "NRestarts")
    fault = switch(running, "device-fault", "an illegal memory access was encountered")
    with pytest.raises(RequestRejected, match="illegal memory access") as refusal:
        Client(endpoint(running)).open([1, 2, 3])
    assert refusal.value.code == "device_fault"
    fault.unlink()
    await_restart(running, before)
    assert f"{UNIT}: Main process exited, code=exited, status=70" in running.log(UNIT)


def test_a_bad_setting_ends_the_daemon_with_78_and_it_is_not_restarted(
    stopped: Manager, settings: Path
) -> None:
    stopped.note("A bad setting: exit code 78.")
    settings.write_text("max_ctx = 0\n")
    stopped.run("systemctl", "start", UNIT, expect=1)
    shown = stopped.show(UNIT, "ActiveState", "Result", "ExecMainStatus", "NRestarts")
    assert shown == {
        "ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "78", "NRestarts": "0",
    }  # fmt: skip
    wait_until(lambda: "max_ctx = 0 (from /etc/latentd/latentd.toml)" in stopped.log(UNIT))
    stopped.run("systemctl", "reset-failed", UNIT)


def open_in_vain(where: str) -> None:
    """Open a slot of a daemon that ends meanwhile."""
    with pytest.raises(LatentdError):
        Client(where, timeout_s=30).open([1, 2, 3])


def step_after_restart(slot: Slot) -> Step:
    """A step of a slot whose connection has broken meanwhile."""
    try:
        return slot.step()
    except ConnectionLost:
        return slot.step()


def await_restart(manager: Manager, before: dict[str, str]) -> None:
    """Wait until the unit runs again, as another process and restarted once more."""
    restarts = str(int(before["NRestarts"]) + 1)
    wait_until(lambda: manager.peek(UNIT, "NRestarts") == restarts)
    wait_until(lambda: manager.peek(UNIT, "ActiveState") == "active")
    after = manager.show(UNIT, "MainPID", "NRestarts", "ActiveState", "StatusText")
    assert after["MainPID"] != before["MainPID"]
