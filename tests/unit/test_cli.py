import os
import subprocess
import sys
from pathlib import Path

import pytest

from latentd.__main__ import main
from processes import environment

NO_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors", "cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from latentd.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(
    *args: str, start: tuple[str, ...] = ("-m", "latentd"), **variables: str
) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *start, *args],
        env=environment(**variables),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def assert_one_line(stderr: str, *parts: str) -> None:
    assert stderr.count("\n") == 1, stderr
    for part in parts:
        assert part in stderr


def test_version_is_printed() -> None:
    code, stdout, _ = run("--version")
    assert code == 0
    assert stdout.startswith("latentd ")


def test_the_help_of_serve_groups_the_settings_by_subject() -> None:
    code, stdout, _ = run("serve", "--help")
    assert code == 0
    for title in ("model:", "engine:", "memory:", "server:", "life cycle:"):
        assert f"\n{title}\n" in stdout


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("serve", "--bogus"), 78),
        (("check", "--max-ctx"), 78),
        (("generate",), 2),
        (("generate", "text", "--tokens", "1"), 2),
        (("generate", "--tokens", "1,x"), 2),
        (("generate", "text", "--max-steps", "0"), 2),
        (("bench",), 2),
        (("bench", "steps", "--seconds", "nan"), 2),
        (("status", "--bogus"), 2),
        (("drain", "--drain-s", "x"), 2),
        (("nonsense",), 2),
        ((), 2),
    ],
)
def test_a_bad_command_line_is_one_line_and_an_exit_code(args: tuple[str, ...], code: int) -> None:
    actual, stdout, stderr = run(*args)
    assert (actual, stdout) == (code, "")
    assert_one_line(stderr, "latentd", "--help")


@pytest.mark.parametrize(
    ("flag", "kind"),
    [("--max-steps", "a whole number of 1 to"), ("--timeout-s", "a number of seconds above 0")],
)
@pytest.mark.parametrize("text", ["abc", "0", ""])
def test_a_flag_that_is_no_number_is_told_what_it_must_be(flag: str, kind: str, text: str) -> None:
    code, _, stderr = run("generate", "text", f"{flag}={text}")
    assert code == 2
    assert_one_line(stderr, f"argument {flag}: {text!r} is not {kind}")


@pytest.mark.parametrize(
    ("flag", "text", "kind"),
    [
        ("--temperature", "nan", "number of 0 to 1e+30"),
        ("--top-k", "1.5", "whole number of 0 to 2147483647"),
        ("--top-p", "2", "number of 0 to 1"),
        ("--min-p", "abc", "number of 0 to 1"),
        ("--seed", "-1", "whole number of 0 to 18446744073709551615"),
    ],
)
@pytest.mark.parametrize("command", [("generate", "text"), ("demo",)])
def test_a_sampling_flag_out_of_range_is_told_its_range_without_a_daemon(
    command: tuple[str, ...], flag: str, text: str, kind: str
) -> None:
    _, stdout, stderr = run(*command, f"{flag}={text}")
    assert stdout == ""
    assert_one_line(stderr, f"argument {flag}: {text!r} is not a {kind}")


def test_demo_refuses_an_empty_prompt_before_it_starts_a_daemon() -> None:
    code, stdout, stderr = run("demo", "--prompt", "")
    assert (code, stdout) == (78, "")
    assert_one_line(stderr, "the prompt is empty")


def test_a_bad_setting_ends_serve_with_78() -> None:
    code, _, stderr = run("serve", "--model", "/x", "--max-ctx", "0")
    assert code == 78
    assert_one_line(stderr, "max_ctx = 0", "flag --max-ctx", "1 to 1048576")


def test_a_bad_setting_in_the_environment_is_named() -> None:
    code, _, stderr = run("serve", "--model", "/x", LATENTD_NUMERICS="f16")
    assert code == 78
    assert_one_line(stderr, "numerics = 'f16'", "LATENTD_NUMERICS", "f32 or landed")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["serve", "--model", "/x"], 78), (["demo"], 78), (["check"], 78), (["selftest"], 78),
        (["config"], 78), (["status"], 2), (["drain"], 2), (["generate", "text"], 2),
        (["bench", "steps"], 2), (["install-units", "--root", "/x"], 2),
        (["top"], 2), (["metrics"], 2), (["trace", "--output", "/x"], 2), (["keygen", "/x"], 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_every_command_refuses_an_unknown_variable_before_it_does_anything(
    args: list[str],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LATENTD_ENDPOIT", "ipc:///x")
    assert main(args) == expected
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert_one_line(stderr, "unknown variable LATENTD_ENDPOIT", "did you mean LATENTD_ENDPOINT?")


@pytest.mark.parametrize(
    ("args", "variables", "name"),
    [
        (["status"], {"LATENTD_ENDPOINT": "d.sock"}, "endpoint"),
        (["status", "--endpoint", "d.sock"], {}, "endpoint"),
        (["status"], {"LATENTD_CONTROL_ENDPOINT": "d.sock"}, "control_endpoint"),
    ],
)
def test_a_command_that_asks_a_daemon_refuses_a_bad_endpoint_by_name(
    args: list[str],
    variables: dict[str, str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(SystemExit) as leaving:
        main(args)
    stderr = capsys.readouterr().err
    assert leaving.value.code == 2
    assert_one_line(stderr, f"{name} = 'd.sock'", f"LATENTD_{name.upper()}", "ipc:///absolute/path")


@pytest.mark.parametrize("flag", ["--max-contxt", "--max-contxt=5"])
def test_an_unknown_flag_is_named_with_the_nearest_known_one(flag: str) -> None:
    code, _, stderr = run("serve", flag)
    assert code == 78
    assert_one_line(stderr, f"unrecognized arguments: {flag}", "did you mean --max-ctx?")


def test_serve_without_a_model_says_how_to_name_one() -> None:
    code, _, stderr = run("serve")
    assert code == 78
    assert_one_line(stderr, "--model")


@pytest.mark.parametrize("command", ["status", "generate", "bench", "drain"])
def test_a_client_command_without_a_daemon_fails_in_one_line(command: str, tmp_path: Path) -> None:
    more = {"generate": ["--tokens", "1"], "bench": ["steps"]}.get(command, [])
    endpoint = f"ipc://{tmp_path}/none.sock"
    code, _, stderr = run(command, *more, "--endpoint", endpoint)
    assert code == 1
    assert_one_line(stderr, str(tmp_path))


@pytest.mark.parametrize(
    "args",
    [
        ("serve", "--model", "/x"),
        ("check", "--model", "/x"),
        ("selftest", "--model", "/x"),
        ("demo",),
    ],
)
def test_without_torch_a_daemon_command_says_how_to_install_it(args: tuple[str, ...]) -> None:
    code, _, stderr = run(*args, start=("-c", NO_TORCH))
    assert code == 78
    assert_one_line(stderr, args[0], "torch", "pip install '.[daemon]' from a checkout")


@pytest.mark.parametrize(
    "args", [("status",), ("drain",), ("generate", "--tokens", "1"), ("bench", "steps")]
)
def test_without_torch_a_client_command_still_looks_for_a_daemon(
    args: tuple[str, ...], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/none.sock"
    code, _, stderr = run(*args, "--endpoint", endpoint, start=("-c", NO_TORCH))
    assert code == 1
    assert_one_line(stderr, str(tmp_path))


def test_check_refuses_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    code, _, stderr = run("check", "--model", str(tmp_path))
    assert code == 78
    assert_one_line(stderr, "config.json")


@pytest.mark.parametrize("command", ["check", "selftest"])
def test_a_weights_file_in_place_of_a_directory_is_refused(command: str) -> None:
    from latentd.demo import model_dir

    code, _, stderr = run(command, "--model", str(model_dir() / "model.safetensors"))
    assert code == 78
    assert_one_line(stderr, "model.safetensors", "director")


@pytest.mark.parametrize("args", ["--version", "check --model {model}"])
def test_a_closed_stdout_is_no_error(args: str) -> None:
    from latentd.demo import model_dir

    command = f"{sys.executable} -m latentd {args.format(model=model_dir())} <&- >&-"
    code, _, stderr = shell(command)
    assert (code, stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1() -> None:
    from latentd.demo import model_dir

    command = f"{sys.executable} -m latentd check --model {model_dir()} --device cpu >/dev/full"
    code, _, stderr = shell(command)
    assert code == 1
    assert_one_line(stderr, "latentd check", "No space left")


def shell(command: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command,
        env=environment(), shell=True, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr
