"""`latentd install-units`, below a directory of the test's own."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path

import pytest

from latentd.commands import install_units
from latentd.commands.install_units import NotInstalled, find_faults, install
from processes import latentd

SYSTEMD = Path(__file__).parents[2] / "systemd"
PROGRAM = Path("/bin/sh")
"""A program that everybody can run."""


def files(root: Path) -> dict[str, Path]:
    """What was installed, by place."""
    return {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}


def test_every_file_of_the_folder_gets_its_place_and_everybody_may_read_it(tmp_path: Path) -> None:
    lines = list(install(tmp_path, PROGRAM))
    assert set(files(tmp_path)) == {
        "etc/systemd/system/latentd.service", "etc/systemd/system/latentd@.service",
        "etc/systemd/system/latentd.socket", "etc/systemd/system/latentd@.socket",
        "etc/systemd/system/latentd-directory@.service", "etc/sysusers.d/latentd.conf",
        "etc/latentd/latentd.toml",
    }  # fmt: skip
    assert len(lines) == len(list(SYSTEMD.iterdir())) - len(install_units.OPTIONAL)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path).values()} == {0o644}
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o755}


def test_the_units_start_the_program_that_was_named(tmp_path: Path) -> None:
    list(install(tmp_path, PROGRAM))
    for name in ("latentd.service", "latentd@.service"):
        text = (tmp_path / "etc/systemd/system" / name).read_text()
        assert re.findall(r"^ExecStart=(\S+) serve ", text, re.M) == [str(PROGRAM)]
        assert install_units.WRITTEN_FOR not in text


def test_the_units_of_other_programs_come_when_they_are_asked_for(tmp_path: Path) -> None:
    list(install(tmp_path, PROGRAM, ["metrics"]))
    units = tmp_path / install_units.UNITS
    assert f"ExecStart={PROGRAM} metrics " in (units / "latentd-metrics.service").read_text()
    assert not (units / "latentd-openai.service").exists()
    (units / "latentd-metrics.service").write_text("of an earlier version\n")
    assert f"replaced   {units}/latentd-metrics.service" in list(install(tmp_path, PROGRAM))


def test_the_unit_of_the_openai_door_starts_the_program_beside_latentd(tmp_path: Path) -> None:
    programs = tmp_path / "opt/bin"
    programs.mkdir(parents=True)
    tmp_path.chmod(0o755)
    (programs / "latentd").touch()
    with pytest.raises(NotInstalled, match="there is no /opt/bin/latentd-openai"):
        list(install(tmp_path, Path("/opt/bin/latentd"), ["openai"]))
    (programs / "latentd-openai").touch()
    list(install(tmp_path, Path("/opt/bin/latentd"), ["openai"]))
    unit = (tmp_path / install_units.UNITS / "latentd-openai.service").read_text()
    assert "ExecStart=/opt/bin/latentd-openai $OPTIONS" in unit


def test_settings_that_are_there_are_kept_and_changed_units_replaced(tmp_path: Path) -> None:
    list(install(tmp_path, PROGRAM))
    settings, unit = tmp_path / "etc/latentd/latentd.toml", tmp_path / install_units.UNITS
    settings.write_text("max_slots = 3\n")
    (unit / "latentd.service").write_text("of an earlier version\n")
    lines = list(install(tmp_path, PROGRAM))
    assert f"kept       {settings}" in lines
    assert settings.read_text() == "max_slots = 3\n"
    assert f"replaced   {unit}/latentd.service" in lines
    assert f"unchanged  {unit}/latentd.socket" in lines
    assert "ExecStart=" in (unit / "latentd.service").read_text()


def test_a_place_that_cannot_be_written_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file")
    done = latentd("install-units", "--root", str(tmp_path), "--program", str(PROGRAM))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"cannot write {tmp_path}/etc/systemd/system/latentd.service" in done.stderr
    assert "--root DIR" in done.stderr


def test_the_command_says_what_it_did_and_what_comes_next(tmp_path: Path) -> None:
    flags = ("--root", str(tmp_path), "--program", str(PROGRAM), "--with", "metrics")
    done = latentd("install-units", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"installed  {tmp_path}/etc/systemd/system/latentd.service\n" in done.stdout
    assert "systemctl enable --now latentd " in done.stdout
    assert "systemctl enable --now latentd-metrics\n" in done.stdout


def test_a_program_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="there is no /nowhere/latentd; name a program"):
        list(install(tmp_path, Path("/nowhere/latentd")))
    assert files(tmp_path) == {}


def test_a_program_of_an_image_is_looked_for_in_the_image(tmp_path: Path) -> None:
    program = tmp_path / "opt/latentd/bin/latentd"
    program.parent.mkdir(parents=True)
    program.touch()
    tmp_path.chmod(0o755)  # as a root is
    list(install(tmp_path, Path("/opt/latentd/bin/latentd")))
    unit = (tmp_path / install_units.UNITS / "latentd.service").read_text()
    assert "ExecStart=/opt/latentd/bin/latentd serve " in unit
    program.parent.chmod(0o700)
    faults = "".join(find_faults(Path("/opt/latentd/bin/latentd"), is_ours=False, root=tmp_path))
    assert "the user latentd cannot enter /opt/latentd/bin, where" in faults


@pytest.mark.parametrize("text", ["latentd", "/a b/latentd", "/a%b/latentd", "/a$b/latentd"])
def test_a_path_that_systemd_would_read_otherwise_is_refused(text: str) -> None:
    assert "no absolute path that systemd takes" in "".join(find_faults(Path(text), is_ours=False))


def test_a_program_that_the_units_hide_from_the_daemon_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_units, "HIDDEN", (str(tmp_path),))
    (tmp_path / "latentd").touch()
    faults = "".join(find_faults(tmp_path / "latentd", is_ours=False))
    assert f"the units hide {tmp_path}" in faults
    assert "python3 -m venv /opt/latentd" in faults


def test_a_program_in_a_folder_that_others_cannot_enter_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "latentd").touch()
    faults = list(find_faults(closed / "latentd", is_ours=False))
    assert any(f"the user latentd cannot enter {closed}, where" in fault for fault in faults)


def test_of_the_program_beside_this_python_the_interpreter_is_looked_at_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install_units, "HIDDEN", ("/hidden",))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    faults = list(find_faults(PROGRAM, is_ours=True))
    assert f"there is no {tmp_path}/python; name a program that is there with --program" in faults
