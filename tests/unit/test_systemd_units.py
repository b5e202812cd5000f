import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from latentd.config import Config
from latentd.sources import load

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNITS = ("latentd.service", "latentd@.service")
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
    for unit in UNITS:
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


def verify(root: Path, unit: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None or not TARGETS.is_dir():
        pytest.skip("systemd-analyze or the standard units are not installed")
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"--root={root}", unit],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("unit", ["latentd.service", "latentd@0.service"])
def test_systemd_accepts_the_unit_without_a_word(root: Path, unit: str) -> None:
    done = verify(root, unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_this_check_would_see_an_unknown_key(root: Path) -> None:
    path = root / "etc/systemd/system/latentd.service"
    path.write_text(path.read_text() + "\n[Service]\nNicee=3\n")
    done = verify(root, "latentd.service")
    assert "Nicee" in done.stdout + done.stderr


def test_the_template_differs_from_the_service_in_names_only() -> None:
    plain = set(lines("latentd.service"))
    instance = {
        line.replace("-%i", "").replace("%i", "latentd") for line in lines("latentd@.service")
    }
    differing = {line.split("=")[0] for line in plain ^ instance}
    assert differing == {"Description", "Environment"}


@pytest.mark.parametrize("unit", UNITS)
def test_a_bad_configuration_is_not_restarted_and_a_device_error_is(unit: str) -> None:
    assert setting(unit, "Restart") == "on-failure"
    assert setting(unit, "RestartPreventExitStatus") == "74 78"


@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_waits_for_ready_and_gives_a_drain_its_time(unit: str) -> None:
    assert setting(unit, "Type") == "notify"
    assert float(setting(unit, "TimeoutStopSec")) > Config().drain_s
    assert setting(unit, "RuntimeDirectoryMode") == "0750"


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "key", ["PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute", "ProcSubset"]
)
def test_the_unit_sets_nothing_that_breaks_cuda_or_torch(unit: str, key: str) -> None:
    assert not any(line.startswith(key + "=") for line in lines(unit))


def test_the_service_looks_where_the_defaults_put_the_socket() -> None:
    assert Config().endpoint == "ipc:///run/latentd/latentd.sock"
    assert setting("latentd.service", "RuntimeDirectory") == "latentd"


def test_the_account_of_the_units_is_created() -> None:
    assert re.search(r"^u\s+latentd\s", (SYSTEMD / "sysusers").read_text(), re.M)
    assert setting("latentd.service", "User") == setting("latentd.service", "Group") == "latentd"


def test_the_example_configuration_is_valid_also_with_every_line_active(tmp_path: Path) -> None:
    example = (SYSTEMD / "latentd.toml").read_text()
    assert load({}, {}, str(SYSTEMD / "latentd.toml")).drain_s == Config().drain_s
    active = tmp_path / "active.toml"
    active.write_text(re.sub(r"^# (\w+ = )", r"\1", example, flags=re.M))
    load({}, {}, str(active))
    assert len(tomllib.loads(active.read_text())) > len(tomllib.loads(example))
