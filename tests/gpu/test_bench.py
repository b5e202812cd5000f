"""The kernel benchmarks run on this GPU and print what they measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from latentd.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def default_stream() -> Any:
    """The benchmarks make a stream of their own torch's current one."""
    before = torch.cuda.current_stream()
    yield
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


def bench(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["bench", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert 0 < found["copy_tb_per_s"] < 20
    assert 0 < found["read_tb_per_s"] < 20
    return found["tables"]  # type: ignore[no-any-return]


def assert_measured(row: dict[str, Any]) -> None:
    times = [value for key, value in row.items() if key.endswith("_us") and value is not None]
    assert times
    assert all(value > 0 for value in times)
    assert row["mb"] > 0
    assert row["of_copy"] > 0


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_attention_is_measured(capsys: pytest.CaptureFixture[str], numerics: str) -> None:
    flags = ("--heads", "16,20", "--rows", "1,2", "--contexts", "64,200", "--layers", "2")
    rows = bench(
        capsys, "attention", *flags, "--max-ctx", "512", "--parts", "--cuts", "--numerics", numerics
    )
    assert len(rows["attention"]) == 8
    for row in rows["attention"]:
        assert_measured(row)
        assert row["torch_us"] is not None
        assert {"absorb_us", "attend_us", "expand_us"} < set(row)


def test_a_chunk_is_measured_against_expanded_attention(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--chunk", "--heads", "16", "--rows", "130", "--contexts", "130,300", "--layers", "2")
    rows = bench(capsys, "attention", *flags, "--max-ctx", "512")["attention"]
    assert len(rows) == 2
    for row in rows:
        assert_measured(row)
        assert row["torch_us"] is not None


def test_linear_layers_are_measured_in_every_form(
    capsys: pytest.CaptureFixture[str], tiny_dir: Path
) -> None:
    flags = ("--config", str(tiny_dir), "--shape", "128x64", "--rows", "1,9")
    rows = bench(capsys, "linear", *flags)["linear"]
    assert {row["form"] for row in rows} == {"bf16", "f32", "add", "gated"}
    assert {row["rows"] for row in rows} == {1, 9}
    for row in rows:
        assert_measured(row)


def test_experts_are_measured(capsys: pytest.CaptureFixture[str], tiny_dir: Path) -> None:
    rows = bench(capsys, "moe", "--config", str(tiny_dir), "--rows", "1,8", "--layers", "2")["moe"]
    assert rows[0]["experts"] == 3  # two chosen and the shared one
    for row in rows:
        assert_measured(row)
        assert row["block_us"] > 0


def test_steps_are_measured_at_every_context(
    capsys: pytest.CaptureFixture[str], tiny_dir: Path
) -> None:
    flags = ("--rows", "1,4", "--contexts", "1,64,200", "--max-ctx", "256", "--steps", "3")
    tables = bench(capsys, "step", "--config", str(tiny_dir), *flags)
    assert [(row["rows"], row["context"]) for row in tables["step"]] == [
        (rows, context) for rows in (1, 4) for context in (1, 64, 200)
    ]
    for row in tables["step"]:
        assert_measured(row)
        assert row["host_us"] >= row["time_us"]
        assert 3 <= row["experts"] <= 5
    assert tables["eager"][0]["captured_long_us"] > 0
    assert tables["eager"][0]["queued_us"] > 0
    assert [row["rows"] for row in tables["invariance"]] == [1, 1, 1, 4, 4, 4]


def test_more_than_fits_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "moe", "--config", "v3", "--layers", "500"]) == 78
    assert "500 layers do not fit" in capsys.readouterr().err
