"""Who can reach the sockets under a real systemd, when they are there, and what the daemon itself
can reach; latentd.socket, and an instance of latentd@.service."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from latentd_client import Client
from service_manager import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from service_manager import Manager

UNIT = "latentd.service"
STATUS = ("/opt/lab/bin/latentd", "status")
AS_STRANGER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def listing(manager: Manager, folder: str) -> dict[str, str]:
    """Owner, group and mode of a directory of sockets, and of each socket in it."""
    output = manager.run("find", folder, "-printf", "%f %y %u:%g %m\n")
    lines = (line.split(" ", 1) for line in output.splitlines())
    return {name: rest for name, rest in lines if not name.endswith(".lock")}


def wait_until_gone(manager: Manager, folder: str) -> None:
    """Wait for the unit of the directory, which stops behind those that need it."""
    wait_until(lambda: not (manager.root / folder).exists())
    manager.run("ls", f"/{folder}", expect=2)


def owned(folder: str) -> dict[str, str]:
    """What `listing` should find."""
    sockets = dict.fromkeys(("latentd.sock", "latentd.ctl"), "s latentd:latentd 660")
    return {folder: "d latentd:latentd 750", **sockets}


def test_members_of_the_group_are_served_and_strangers_are_not(running: Manager) -> None:
    running.note("A member of the group latentd, and a stranger.")
    group = running.run("getent", "group", "latentd").split(":")[2]
    member = ("setpriv", "--reuid=65534", "--regid=65534", f"--groups={group}")
    assert running.run(*member, *STATUS).startswith("ready")
    output = running.run(*AS_STRANGER, *STATUS, expect=1)
    assert "Permission denied" in output or "no daemon" in output


def test_the_daemon_runs_as_its_user_without_privileges(running: Manager) -> None:
    running.note("What the daemon is.")
    pid = running.show(UNIT, "MainPID")["MainPID"]
    wanted = "^(Uid|CapEff|CapBnd|NoNewPrivs|Seccomp):"
    status = running.run("grep", "-E", wanted, f"/proc/{pid}/status")
    fields = dict(line.split(":\t") for line in status.splitlines())
    user = str((running.root / "run/latentd").stat().st_uid)
    assert fields["Uid"].split() == [user] * 4
    assert fields["CapEff"] == fields["CapBnd"] == "0" * 16
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize(
    ("attempt", "answer"),
    [
        (": < /dev/null", None),
        (": < /dev/foreign", "cannot open /dev/foreign: Operation not permitted"),
        ("echo > /var/lib/foreign", "Read-only file system"),
        ("chroot / true", "Operation not permitted"),
        ("ls /home/*", "Permission denied"),
    ],
    ids=["its devices", "another device", "the disk", "a privileged call", "homes"],
)
def test_the_sandbox_of_the_unit_lets_through_what_the_daemon_needs_only(
    running: Manager, attempt: str, answer: str | None
) -> None:
    unit = (running.root / "etc/systemd/system" / UNIT).read_text()
    lines = [line for line in unit.splitlines() if not re.match("Exec|Type|Restart|Watch", line)]
    probe = running.root / "run/systemd/system/probe.service"
    at = lines.index("[Service]") + 1
    lines[at:at] = ["Type=oneshot", f"ExecStart=/bin/sh -c '{attempt}'"]
    probe.write_text("\n".join(lines))
    if not (running.root / "dev/foreign").exists():
        running.run("mknod", "-m", "666", "/dev/foreign", "c", "10", "229")
    running.note(f"Within the sandbox of {UNIT}: {attempt}")
    running.run("systemctl", "daemon-reload")
    running.run("systemctl", "start", "probe", expect=int(answer is not None))
    if answer is not None:
        wait_until(lambda: answer in running.log("probe.service"))


def test_the_directory_and_the_sockets_have_owner_and_mode_and_go_away(running: Manager) -> None:
    running.note("The directory and the sockets, which go when the daemon stops.")
    assert listing(running, "/run/latentd") == owned("latentd")
    running.run("systemctl", "stop", UNIT)
    wait_until_gone(running, "run/latentd")


def test_a_client_starts_the_daemon_through_its_socket_and_waits_for_a_restart(
    stopped: Manager,
) -> None:
    stopped.note("Socket activation: the first client starts the daemon.")
    stopped.run("systemctl", "start", "latentd.socket")
    assert listing(stopped, "/run/latentd") == owned("latentd")
    assert stopped.show(UNIT, "ActiveState") == {"ActiveState": "inactive"}
    where = f"ipc://{stopped.root}/run/latentd/latentd.sock"
    with Client(where, connect_timeout_s=60) as client:
        assert client.open([1, 2, 3]).context_len == 3
    assert listing(stopped, "/run/latentd") == owned("latentd")
    stopped.note("It crashes; who connects before it is back, waits in the socket.")
    before = stopped.show(UNIT, "MainPID")["MainPID"]
    stopped.run("systemctl", "kill", "--signal=SIGKILL", UNIT)
    with Client(where, connect_timeout_s=60) as client:
        assert client.open([1, 2, 3]).context_len == 3
    assert stopped.show(UNIT, "MainPID", "ActiveState")["MainPID"] != before
    stopped.note("Stopping the daemon leaves its socket, stopping the socket removes it.")
    stopped.run("systemctl", "stop", UNIT)
    assert listing(stopped, "/run/latentd") == owned("latentd")
    stopped.run("systemctl", "stop", "latentd.socket")
    wait_until_gone(stopped, "run/latentd")


def test_an_instance_has_its_own_settings_device_and_sockets(stopped: Manager) -> None:
    stopped.note("An instance of the templates.")
    text = (stopped.root / "etc/latentd/latentd.toml").read_text().replace("tiny", "second")
    (stopped.root / "etc/latentd/1.toml").write_text(text.replace("/saved/", "/saved-1/"))
    stopped.run("systemctl", "start", "latentd@1.socket")
    with Client(f"ipc://{stopped.root}/run/latentd-1/latentd.sock", connect_timeout_s=60) as client:
        assert client.info.model == "second"
    assert listing(stopped, "/run/latentd-1") == owned("latentd-1")
    pid = stopped.show("latentd@1", "MainPID")["MainPID"]
    devices = f"tr '\\000' '\\n' < /proc/{pid}/environ | grep ^CUDA_[DV]"
    environ = stopped.run("sh", "-c", devices).split()
    assert sorted(environ) == ["CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=1"]
    stopped.run("systemctl", "stop", "latentd@1.socket")
    wait_until_gone(stopped, "run/latentd-1")


def test_a_key_of_the_daemons_user_opens_tcp_to_listed_keys(
    stopped: Manager, settings: Path
) -> None:
    stopped.note("CURVE, as docs/security.md has it.")
    latentd, folder = STATUS[0], "/etc/latentd"
    server = stopped.run(latentd, "keygen", f"{folder}/curve.key").strip()
    stopped.run("chown", "latentd", f"{folder}/curve.key")
    client = stopped.run(latentd, "keygen", f"{folder}/alice.key").strip()
    (stopped.root / "etc/latentd/curve.clients").write_text(f"{client} alice\n")
    settings.write_text(f"""{settings.read_text()}endpoint = "tcp://127.0.0.1:5555"
curve_key = "{folder}/curve.key"
curve_clients = "{folder}/curve.clients"
""")
    stopped.run("systemctl", "start", UNIT)
    keys = (f"--client-key={folder}/alice.key", f"--server-key={server}")
    there = "--endpoint=tcp://127.0.0.1:5555"
    assert stopped.run(*STATUS, there, *keys).startswith("ready")
    stopped.run(*STATUS, there, expect=1)
    stopped.run("systemctl", "stop", UNIT)
