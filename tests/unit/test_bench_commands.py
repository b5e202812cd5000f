from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from latentd.__main__ import build_parser, main
from latentd.bench.attention_splits import put_cut
from latentd.bench.presets import PRESETS, read_config, write_config
from latentd.bench.shapes import ATTENTION_GRID, CHUNK_GRID
from latentd.bench.step_start import SPARE_BYTES, plan_pool
from latentd.commands.bench_arguments import attention_cases, step_contexts
from latentd.model.config import ModelConfig
from latentd.options import EngineOptions, StartError
from latentd_kernels.driver import device_count
from latentd_kernels.staging import RingLayout, allocate_inputs
from latentd_kernels.work_plan import CallPlan


def parse(*args: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *args])


def refuse(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    check = attention_cases if args[0] == "attention" else step_contexts
    with pytest.raises(SystemExit) as caught:
        check(parse(*args))
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_attention_measures_the_grid_unless_something_is_chosen() -> None:
    assert attention_cases(parse("attention")) == list(ATTENTION_GRID)


def test_chosen_values_are_combined_and_the_others_stay_usual() -> None:
    cases = attention_cases(parse("attention", "--heads", "20", "--rows", "1,3"))
    assert cases == [(20, rows, c) for rows in (1, 3) for c in (1024, 4096, 8192, 32768)]


def test_a_chunk_has_a_grid_of_its_own_and_fits_its_context() -> None:
    assert attention_cases(parse("attention", "--chunk")) == list(CHUNK_GRID)
    cases = attention_cases(parse("attention", "--chunk", "--heads", "16", "--rows", "100"))
    assert cases == [(16, 100, context) for context in (512, 4096, 32768)]


def test_step_measures_the_usual_contexts_that_fit() -> None:
    assert step_contexts(parse("step")) == (1024, 8192, 32768)
    assert step_contexts(parse("step", "--max-ctx", "8192")) == (1024, 8192)
    assert step_contexts(parse("step", "--max-ctx", "512")) == (512,)
    assert step_contexts(parse("step", "--contexts", "64,100")) == (64, 100)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("attention", "--rows", "1,129"), "--rows 129: at most 128"),
        (("attention", "--heads", "200"), "--heads 200: at most 128"),
        (("attention", "--contexts", "70000"), "--contexts 70000: at most 65536"),
        (("attention", "--chunk", "--rows", "513"), "--rows 513: at most 512"),
        (("attention", "--chunk", "--contexts", "64"), "--rows 512: at most 64"),
        (("attention", "--chunk", "--cuts"), "--cuts is for decode rows"),
        (("step", "--rows", "256"), "--rows 256: at most 128"),
        (("step", "--contexts", "64", "--max-ctx", "32"), "--contexts 64: at most 32"),
        (("step", "--rows", "1,x"), "'1,x' is not a list of whole numbers"),
        (("attention", "--rows", "0"), "'0' is not a list"),
        (("linear", "--shape", "5"), "'5' is not MxK"),
        (("linear", "--shape", "64x33"), "'64x33' is not MxK"),
        (("attention", "--widths", "128"), "'128' is not one of the widths NOPE/V"),
        (("attention", "--widths", "a/b"), "'a/b' is not one of the widths NOPE/V"),
        (("step", "--model", "a", "--config", "b"), "not allowed with"),
        (("moe", "--layers", "0"), "--layers"),
    ],
)
def test_a_bad_argument_is_one_line(
    args: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in refuse(capsys, *args)


def test_shapes_and_widths_are_read() -> None:
    assert parse("linear", "--shape", "64x96", "--shape", "8x32").shape == [(64, 96), (8, 32)]
    assert parse("attention", "--widths", "192/256").widths == (192, 256)


@pytest.mark.skipif(device_count() > 0, reason="a GPU is here")
@pytest.mark.parametrize("name", ["attention", "linear", "moe", "step"])
def test_without_a_gpu_a_kernel_benchmark_is_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name]) == 78
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"latentd bench {name}: this measures kernels, and no GPU can be used" in err


@pytest.mark.parametrize("name", ["linear", "moe", "step"])
def test_an_unknown_config_is_named_with_the_known_ones(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name, "--config", "nonesuch"]) == 78
    assert "'nonesuch' is no directory and none of v2-lite, v2, v3" in capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_config_that_is_served(name: str) -> None:
    assert read_config(name).num_layers >= 27


def test_a_preset_can_be_cut_to_fewer_layers(tmp_path: Path) -> None:
    write_config(tmp_path, "v3", 4)
    config = ModelConfig.from_dir(tmp_path)
    assert config.moe_layers == (False, False, False, True)
    assert config.num_heads == 128


def test_a_directory_stands_for_its_config(tiny_dir: Path, tmp_path: Path) -> None:
    assert read_config(str(tiny_dir)) == ModelConfig.from_dir(tiny_dir)
    write_config(tmp_path, str(tiny_dir), 1)
    assert ModelConfig.from_dir(tmp_path).num_layers == 1
    with pytest.raises(StartError, match="none of v2-lite"):
        write_config(tmp_path, str(tmp_path / "missing"), None)


def test_the_loop_and_the_grouped_rival_multiply_the_same_experts() -> None:
    from latentd.bench import moe_torch

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weights = draw(5, 64), draw(4, 64, 64) / 8, draw(4, 64, 32) / 6
    chosen = torch.tensor([[0, 3], [2, 3], [0, 3], [2, 3], [0, 3]], dtype=torch.int32)
    rows_of = moe_torch.rows_by_expert(chosen)
    assert {expert: rows.tolist() for expert, rows in rows_of.items()} == {
        0: [0, 2, 4],
        2: [1, 3],
        3: [0, 1, 2, 3, 4],
    }
    rows, ends = moe_torch.grouping(chosen, 4)
    assert rows.tolist() == [0, 2, 4, 1, 3, 0, 1, 2, 3, 4]
    assert ends.tolist() == [3, 3, 5, 10]
    parts = moe_torch.loop_layer(*weights, rows_of)
    grouped = moe_torch.grouped_layer(*weights, rows, ends)
    torch.testing.assert_close(torch.cat(list(parts.values())), grouped)


@pytest.mark.parametrize("per_split", [1, 3, 8])
def test_a_plan_of_another_cut_deals_out_every_split_once(per_split: int) -> None:
    context = 70 * 64 + 5
    plan = CallPlan([context] * 6, list(range(6)), 16, 6, 132, per_split)
    splits = -(-71 // per_split)
    assert [plan.row(row).num_splits for row in range(6)] == [splits] * 6
    assert {plan.row(row).pages_per_split for row in range(6)} == {per_split}
    shares = [plan.work(cta) for cta in range(132)]
    assert sum(share.num_splits for share in shares) == 6 * splits


@pytest.mark.parametrize(
    ("rows", "context", "free_gib", "pages"),
    [(1, 1024, 139, 1024), (8, 32768, 139, 4096), (128, 32768, 400, 65536)],
)
def test_the_pool_of_a_step_is_what_its_cases_need(
    rows: int, context: int, free_gib: int, pages: int
) -> None:
    options = EngineOptions(Path(), device="cuda", max_ctx=65536, max_slots=rows)
    options = options.for_device("cuda")
    needed = max(1024, rows * context // 64)
    plan = plan_pool(read_config("v2-lite"), options, needed, free_gib << 30)
    assert plan.kv_pages == pages


def test_the_pool_of_a_step_leaves_memory_to_the_comparisons() -> None:
    options = EngineOptions(Path(), device="cuda", max_ctx=65536, max_slots=128)
    plan = plan_pool(read_config("v2-lite"), options.for_device("cuda"), 65536, 139 << 30)
    assert 50_000 < plan.kv_pages < 65536
    assert plan.total_bytes + SPARE_BYTES < 139 << 30


def test_another_cut_is_put_in_place_where_it_fits() -> None:
    inputs = allocate_inputs(RingLayout(4, 1, 1), 4, 1024, torch.device("cpu"))
    layers: Any = SimpleNamespace(
        rows=4,
        heads=16,
        ops=SimpleNamespace(inputs=inputs, num_ctas=132),
        workspace=SimpleNamespace(partial_o=torch.empty(4 * 64, 1, device="meta")),
    )
    assert put_cut(layers, 65536, 8)
    assert inputs.row_plan[:4].tolist() == [
        [65536, slot, 8, 128, slot * 32, 4, 1023, 1] for slot in range(4)
    ]
    assert int(inputs.work[:132, 3].sum()) == 4 * 128
    assert not put_cut(layers, 65536, 3)  # more than 256 splits a row
    layers.workspace.partial_o = torch.empty(4 * 32 - 1, 1, device="meta")
    assert not put_cut(layers, 65536, 8)  # more chains than the workspace holds
