import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from latentd.config import SETTINGS, Config
from latentd.sources import read
from latentd_client.protocol import DEFAULT_ENDPOINT, control_endpoint

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNITS = ("latentd.service", "latentd@.service")
SOCKETS = ("latentd.socket", "latentd@.socket")
DOORS = ("latentd-openai.service", "latentd-metrics.service")
MOST_EXPOSED = dict.fromkeys(UNITS, 2.5) | dict.fromkeys(DOORS, 1.5)
"""Of 10, as `systemd-analyze security` counts."""
TARGETS = Path("/usr/lib/systemd/system")


def lines(unit: str) -> list[str]:
    text = (SYSTEMD / unit).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def setting(unit: str, key: str) -> str:
    (value,) = (line.split("=", 1)[1] for line in lines(unit) if line.startswith(key + "="))
    return value


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory with the units, stand-ins for the programs and the standard targets."""
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for unit in (*UNITS, *SOCKETS, *DOORS, "latentd-directory@.service"):
        shutil.copy(SYSTEMD / unit, units)
        for program in re.findall(r"^Exec\w+=[-+@]*(\S+)", (SYSTEMD / unit).read_text(), re.M):
            stand_in = tmp_path / program.lstrip("/")
            stand_in.parent.mkdir(parents=True, exist_ok=True)
            stand_in.write_text("#!/bin/sh\n")
            stand_in.chmod(0o755)
    standard = tmp_path / "usr/lib/systemd/system"
    standard.mkdir(parents=True)
    for target in TARGETS.glob("*.target"):
        if target.is_file():
            shutil.copy(target, standard)
    return tmp_path


def analyze(root: Path, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None or not TARGETS.is_dir():
        pytest.skip("systemd-analyze or the standard units are not installed")
    return subprocess.run(
        ["systemd-analyze", verb, f"--root={root}", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def verify(root: Path, unit: str) -> subprocess.CompletedProcess[str]:
    return analyze(root, "verify", "--man=no", unit)


@pytest.mark.parametrize(
    "unit",
    [
        "latentd.service", "latentd@0.service", "latentd.socket", "latentd@0.socket",
        "latentd-directory@latentd.service", *DOORS,
    ],
)  # fmt: skip
def test_systemd_accepts_the_unit_without_a_word(root: Path, unit: str) -> None:
    done = verify(root, unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_this_check_would_see_an_unknown_key(root: Path) -> None:
    path = root / "etc/systemd/system/latentd.service"
    path.write_text(path.read_text() + "\n[Service]\nNicee=3\n")
    done = verify(root, "latentd.service")
    assert "Nicee" in done.stdout + done.stderr


@pytest.mark.parametrize("unit", MOST_EXPOSED)
def test_the_exposure_that_systemd_finds_is_low(root: Path, unit: str) -> None:
    done = analyze(root, "security", "--offline=true", "--no-pager", unit.replace("@", "@0"))
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) < MOST_EXPOSED[unit]


@pytest.mark.parametrize(
    ("plain", "template", "differing"),
    [
        ("latentd.service", "latentd@.service", {"Description", "Environment", "ExecStartPre"}),
        ("latentd.socket", "latentd@.socket", {"Description"}),
    ],
    ids=["service", "socket"],
)
def test_a_template_differs_from_the_plain_unit_in_names_only(
    plain: str, template: str, differing: set[str]
) -> None:
    instance = {
        line.replace("-%i", "").replace("@%i", "").replace("%i", "latentd")
        for line in lines(template)
    }
    assert {line.split("=")[0] for line in set(lines(plain)) ^ instance} == differing


@pytest.mark.parametrize("unit", UNITS)
def test_a_bad_configuration_is_not_restarted_and_a_device_error_is(unit: str) -> None:
    assert setting(unit, "Restart") == "on-failure"
    assert setting(unit, "RestartPreventExitStatus") == "74 78"


@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_waits_for_ready_and_gives_a_drain_its_time(unit: str) -> None:
    assert setting(unit, "Type") == "notify"
    assert float(setting(unit, "TimeoutStopSec")) > Config().drain_s


@pytest.mark.parametrize("unit", UNITS)
def test_a_reload_is_begun_before_the_daemon_is_told_to_end_it(unit: str) -> None:
    commands = [line for line in lines(unit) if line.startswith("ExecReload=")]
    assert commands == [
        "ExecReload=/usr/bin/systemd-notify RELOADING=1", "ExecReload=/bin/kill -HUP $MAINPID",
    ]  # fmt: skip
    assert setting(unit, "NotifyAccess") == "exec"


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "key", ["PrivateDevices", "PrivateUsers", "MemoryDenyWriteExecute", "ProcSubset"]
)
def test_the_unit_sets_nothing_that_breaks_cuda_or_torch(unit: str, key: str) -> None:
    assert not any(line.startswith(key + "=") for line in lines(unit))


@pytest.mark.parametrize("unit", UNITS)
def test_the_daemon_may_open_the_devices_of_nvidia_and_no_others(unit: str) -> None:
    assert setting(unit, "DevicePolicy") == "closed"
    assert setting(unit, "DeviceAllow") == "char-nvidia* rwm"
    # All but nvidia-modprobe, which makes them, runs without the right to make device nodes.
    assert setting(unit, "CapabilityBoundingSet") == ""


@pytest.mark.parametrize("unit", DOORS)
def test_a_program_beside_the_daemon_has_no_devices_and_an_account_of_its_own(unit: str) -> None:
    assert setting(unit, "DevicePolicy") == "closed"
    assert setting(unit, "PrivateDevices") == setting(unit, "DynamicUser") == "yes"
    assert not any(line.startswith(("DeviceAllow=", "User=")) for line in lines(unit))
    assert setting(unit, "Group") == setting("latentd.service", "Group")


def test_the_programs_beside_the_daemon_have_the_same_sandbox() -> None:
    one, other = ({*lines(unit)[lines(unit).index("DevicePolicy=closed") :]} for unit in DOORS)
    assert one == other


def test_systemd_listens_where_the_defaults_put_the_sockets() -> None:
    paths = [line.split("=")[1] for line in lines("latentd.socket") if "ListenStream=" in line]
    assert {f"ipc://{path}" for path in paths} == {
        DEFAULT_ENDPOINT,
        control_endpoint(DEFAULT_ENDPOINT),
    }
    assert setting("latentd.service", "ReadWritePaths") == "/run/latentd"


def test_the_sockets_are_for_the_group_in_a_directory_for_the_group() -> None:
    assert [setting("latentd.socket", f"Socket{key}") for key in ("User", "Group", "Mode")] == [
        "latentd", "latentd", "0660",
    ]  # fmt: skip
    assert setting("latentd-directory@.service", "RuntimeDirectoryMode") == "0750"


def test_the_account_of_the_units_is_created() -> None:
    assert re.search(r"^u\s+latentd\s", (SYSTEMD / "sysusers").read_text(), re.M)
    assert setting("latentd.service", "User") == setting("latentd.service", "Group") == "latentd"


def test_the_example_configuration_only_says_more_than_the_defaults_where_a_service_needs_it() -> (
    None
):
    config, origins = read({}, {}, str(SYSTEMD / "latentd.toml"))
    given = {name: getattr(config, name) for name, origin in origins.items() if origin.name}
    assert given == {"model": Path("/var/lib/latentd/model"), "kv_pages": "auto"}
    assert config.drain_s == Config().drain_s


def test_every_line_of_the_example_configuration_is_valid_when_it_is_made_active() -> None:
    example = (SYSTEMD / "latentd.toml").read_text()
    active = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", example, flags=re.M))
    assert list(active) == list(SETTINGS)
    for name, value in active.items():
        SETTINGS[name].check(value, "example")
