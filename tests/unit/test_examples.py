"""The examples, run as a user runs them, against a daemon on the demo model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from latentd import demo
from latentd.commands.child import Child
from processes import environment

pytest.importorskip("torch")
EXAMPLES = sorted((Path(__file__).parents[2] / "client/examples").glob("*.py"))


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--model", str(demo.model_dir()), "--device", "cpu", "--max-slots", "4")
    with Child(tmp_path_factory.mktemp("daemon"), (*flags, "--max-ctx", "512")) as child:
        child.wait_ready(120, lambda status: None)
        yield child.endpoint


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path: Path, endpoint: str) -> None:
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment(LATENTD_ENDPOINT=endpoint), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_the_demo_prints_text_and_latencies() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "latentd", "demo", "--device", "cpu", "--max-steps", "60"],
        env=environment(), capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        demo.DEFAULT_PROMPT,
        "on cpu",
        "first token after",
        "tokens/s",
        "single steps: p50",
    ):
        assert part in done.stdout
    assert "exit code 0" in done.stdout
