import io
import json

import pytest

from latentd.bench import floors
from latentd.bench.report import Column, Report

COLUMNS = (
    Column("rows", "rows", width=5),
    Column("time_us", "us", 1),
    Column("torch_us", "torch us", 1, 10),
)


class Bandwidth:
    copy, read = 4e12, 5e12


def fill(report: Report) -> str:
    report.facts(device="a GPU", copy_tb_per_s=4.2)
    report.note("rows share pages")
    report.table("first", "about it", COLUMNS)
    report.add(rows=1, time_us=7.25, torch_us=None, more=3)
    report.add(rows=128, time_us=1234.0, torch_us=2.0)
    report.table("second", "about that", (COLUMNS[0], Column("words", "what", width=0)))
    report.add(rows=2, words="a, b")
    report.close()
    out = report._out
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_a_table_is_aligned_under_its_titles() -> None:
    assert fill(Report(io.StringIO(), as_json=False)).splitlines() == [
        "device a GPU, copy TB/s 4.2",
        "rows share pages",
        "",
        "about it",
        " rows       us  torch us",
        "    1      7.2         -",
        "  128   1234.0       2.0",
        "",
        "about that",
        " rows  what",
        "    2  a, b",
    ]


def test_json_is_one_map_with_everything() -> None:
    assert json.loads(fill(Report(io.StringIO(), as_json=True))) == {
        "device": "a GPU",
        "copy_tb_per_s": 4.2,
        "notes": ["rows share pages"],
        "tables": {
            "first": [
                {"rows": 1, "time_us": 7.25, "torch_us": None, "more": 3},
                {"rows": 128, "time_us": 1234.0, "torch_us": 2.0},
            ],
            "second": [{"rows": 2, "words": "a, b"}],
        },
    }


def test_figures_compare_with_both_bandwidths_and_the_rival() -> None:
    row = floors.figures(8_000_000, 4.0, Bandwidth, 6.0)  # type: ignore[arg-type]
    assert row == {
        "time_us": 4.0,
        "mb": 8.0,
        "floor_us": 2.0,
        "of_copy": pytest.approx(50),
        "of_read": pytest.approx(40),
        "torch_us": 6.0,
        "speedup": 1.5,
    }


def test_without_a_rival_there_is_no_speed_up() -> None:
    row = floors.figures(8, 4.0, Bandwidth, None)  # type: ignore[arg-type]
    assert row["torch_us"] is None
    assert row["speedup"] is None
