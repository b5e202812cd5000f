"""What the table of settings gives: the page, the example, the help and `latentd config`."""

import json
import logging
import re
from pathlib import Path

import pytest

import settings_files
from latentd.__main__ import build_parser, main
from latentd.commands.parsing import read_config
from latentd.commands.serve import reread
from latentd.config import RELOADABLE, SETTINGS, Config
from latentd.demo import model_dir
from latentd.endpoint import EndpointError
from latentd.preflight import check_endpoints
from latentd.settings import ConfigError
from latentd.settings_text import toml
from latentd.sources import read
from serving import serving

ROOT = Path(__file__).parents[2]


def test_the_page_and_the_example_are_what_the_table_in_the_code_gives() -> None:
    for path, text in settings_files.files().items():
        assert path.read_text() == text, f"{path.name} is stale: run `make settings`"


def test_no_cell_of_the_page_breaks_its_table() -> None:
    lines = settings_files.PAGE.read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| `[a-z]", line)]
    assert [line.split("`")[1] for line in rows] == list(SETTINGS)
    assert {line.count("|") for line in rows} == {6}


def test_the_lines_of_the_example_fit_those_of_the_repository() -> None:
    assert max(map(len, settings_files.EXAMPLE.read_text().splitlines())) <= 120


def test_the_pages_that_list_what_a_reload_changes_list_what_it_changes() -> None:
    operations = (ROOT / "docs/operations.md").read_text()
    table = operations.split("| setting | from then on |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.M)) == sorted(RELOADABLE)
    readme = (ROOT / "README.md").read_text()
    sentence = re.search(r"`systemctl reload` reads (.*?) again", readme, re.S)
    assert sentence is not None
    assert sorted(re.findall(r"`(\w+)`", sentence[1])) == sorted(RELOADABLE)


@pytest.mark.parametrize("command", ["serve", "config"])
def test_the_help_has_every_setting_with_its_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for row in SETTINGS.values():
        assert f" {row.flag}" in text
        assert " ".join(row.help.split()) in text
        assert row.kind == "bool" or not row.has_default or f"(default {row.default})" in text


def test_what_latentd_config_prints_is_a_file_with_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATENTD_DRAIN_S", "1.5")
    name = 'a "name" with \\ and ü'
    flags = ["--model", "/m #1", "--name", name, "--eager", "--no-prefix-cache"]
    assert main(["config", *flags, "--kv-pages", "auto"]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "again.toml"
    file.write_text(printed)
    monkeypatch.delenv("LATENTD_DRAIN_S")
    config, origins = read({}, {}, str(file))
    assert config == Config(
        model=Path("/m #1"), name=name, eager=True, prefix_cache=False, kv_pages="auto", drain_s=1.5
    )
    given = [row.name for row in SETTINGS.values() if getattr(config, row.name) not in (None, "")]
    assert [name for name, origin in origins.items() if origin.kind == "file"] == given


def test_latentd_config_says_where_every_value_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "latentd.toml"
    file.write_text("max_ctx = 100\nmax_slots = 2\n")
    monkeypatch.setenv("LATENTD_CONFIG", str(file))
    monkeypatch.setenv("LATENTD_SPIN_US", "8")
    assert main(["config", "--max-slots", "4"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        f"max_ctx = 100 # {file}", "max_slots = 4 # flag --max-slots",
        "spin_us = 8 # environment LATENTD_SPIN_US", "eager = false # default",
        "# model is not given",
    ):  # fmt: skip
        assert line in lines
    assert len([line for line in lines if "#" in line]) == len(SETTINGS) + 6  # a head per subject


def test_latentd_config_tells_programs_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATENTD_SPIN_US", "8")
    assert main(["config", "--json", "--model", "/m"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == list(SETTINGS)
    assert told["model"] == {"value": "/m", "origin": "flag", "source": "--model"}
    assert told["spin_us"] == {"value": 8, "origin": "environment", "source": "LATENTD_SPIN_US"}
    assert told["eager"] == {"value": False, "origin": "default", "source": None}
    assert told["name"] == {"value": None, "origin": "default", "source": None}


def test_latentd_config_refuses_what_serve_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--max-ctx", "0"]) == 78
    printed = capsys.readouterr()
    assert (printed.out, "max_ctx = 0 (from flag --max-ctx)" in printed.err) == ("", True)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--endpoint", "tcp://0.0.0.0:5000"], "without CURVE tcp is served on loopback only"),
        (["--control-endpoint", "tcp://*:5000"], "without CURVE tcp is served on loopback only"),
        (["--endpoint", "ipc:///" + "x" * 107], "the path has 108 bytes, .* at most 107"),
        (["--endpoint", "ipc:///x", "--control-endpoint", "ipc:///x"], "they must differ"),
        (["--endpoint", "tcp://[::1]:5", "--control-endpoint", "tcp://[::1]:5"], "must differ"),
    ],
)
def test_latentd_config_refuses_endpoints_with_the_words_of_serve(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_config(build_parser().parse_args(["serve", *flags]))
    with pytest.raises(EndpointError, match=told) as caught:
        check_endpoints(config.server_options())
    assert main(["config", *flags]) == 78
    assert capsys.readouterr() == ("", f"latentd config: {caught.value}\n")


@pytest.mark.parametrize("has_model", [True, False])
def test_what_serve_would_stop_at_on_this_machine_is_told_beside_the_settings(
    has_model: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--save", f"{tmp_path}/no/snapshot", "--curve-key", f"{tmp_path}/key",
        "--curve-clients", f"{tmp_path}/clients", "--endpoint", f"ipc://{tmp_path}/slip/l/d.sock",
    ]  # fmt: skip
    flags += ["--model", str(tmp_path)] if has_model else []
    assert main(["config", *flags]) == 0
    printed = capsys.readouterr()
    assert f'save = "{tmp_path}/no/snapshot"' in printed.out
    told = printed.err.splitlines()
    parts = ["curve_key: key file", "slip does not exist", "is no directory that"]
    parts = [*parts, f"{tmp_path}/config.json: No such file"] if has_model else ["no model", *parts]
    for line, part in zip(told, parts, strict=True):
        assert line.startswith("latentd config: serve would stop here: ")
        assert part in line
    assert list(tmp_path.iterdir()) == []


def test_latentd_config_does_not_mind_the_daemon_that_it_may_be_asked_about(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(endpoint):
        assert main(["config", "--model", str(model_dir()), "--endpoint", endpoint]) == 0
    assert capsys.readouterr().err == ""


def test_a_reload_fails_where_a_restart_would(tmp_path: Path) -> None:
    file = tmp_path / "latentd.toml"
    good = 'model = "/m"\nendpoint = "ipc:///tmp/d.sock"\n'
    file.write_text(good)
    args = build_parser().parse_args(["serve", "--config-file", str(file)])
    config = read_config(args)
    before = logging.getLogger().level
    for bad, error in (
        ('log_level = "error"\nendpoint = "ipc:///tmp/d.sock"\n', ConfigError),
        ('model = "/m"\nlog_level = "error"\nendpoint = "tcp://0.0.0.0:5"\n', EndpointError),
    ):
        file.write_text(bad)
        with pytest.raises(error):
            reread(args, config)
    assert logging.getLogger().level == before


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (7, "7"), (1.5, "1.5"), ('"\\', r'"\"\\"'), (Path("/a b"), '"/a b"')],
)
def test_a_value_is_written_as_toml_does(value: object, text: str) -> None:
    assert toml(value) == text
