"""make gpu-racecheck without a GPU: every kernel has a case, and how reports are judged."""

from __future__ import annotations

import fnmatch
import tomllib

import pytest
import torch

from latentd_kernels import driver, inventory, manifest
from latentd_kernels.compiler import RACECHECK_FLAGS
from latentd_kernels.launcher import HOPPER
from race_cases import CASES, Card
from racecheck import EXPLAINED, Race, judge, races
from recording import Recorder

OUTPUT = """\
========= COMPUTE-SANITIZER
@kernel sample_row
========= Warning: Race reported between Write access at barrier_init(unsigned int, int)+0xf0 in \
/somewhere/csrc/hopper/async.cuh:3
=========     and Read access at <unnamed>::Row<(int)0>::take(int, float (&)[2]) const+0x120 in \
/somewhere/csrc/hopper/../common.cuh:1 [128 hazards]
=========     and Read access at sample_row+0x130 [16 hazards]
=========
0.1 s: sample, 9 ids
"""


@pytest.fixture(scope="module")
def launched() -> set[str]:
    """Kernels that the cases launch, noted on a machine without a GPU."""
    card = Card(Recorder(HOPPER), torch.device("cpu"), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "tensor_map", lambda *args, **rest: driver.TensorMap())
        for run in CASES.values():
            run(card)
    return card.launched


def test_every_kernel_of_the_inventory_has_a_case(launched: set[str]) -> None:
    blocks = [b for b in inventory.collect() if manifest.compiled_for(b.source, HOPPER)]
    documented = {name for block in blocks for name in block.names}
    assert {name for name in documented if not fnmatch.filter(launched, name)} == set()


def test_every_entry_point_of_the_cubins_has_a_case(launched: set[str]) -> None:
    try:
        compiled = manifest.load(manifest.CUBIN_DIR, HOPPER).kernels.keys()
    except manifest.ManifestError as error:
        pytest.skip(str(error))
    assert compiled - launched == set()


def test_the_sources_know_the_flag_that_the_cubins_for_racecheck_are_compiled_with() -> None:
    async_header = (manifest.SOURCES / "hopper" / "async.cuh").read_text(encoding="utf-8")
    assert RACECHECK_FLAGS == ("-lineinfo", "-DLATENTD_ALL_LANES_ARRIVE")
    assert "#ifdef LATENTD_ALL_LANES_ARRIVE\nconstexpr int kWarpArrivals = 32;" in async_header


def test_a_report_is_known_by_kernel_level_and_two_functions() -> None:
    init = "hopper/async.cuh: barrier_init"
    assert races(OUTPUT) == {
        Race("Warning", "sample_row", frozenset((init, "common.cuh: Row::take"))): 1,
        Race("Warning", "sample_row", frozenset((init, "sample_row"))): 1,
    }


def test_only_what_is_explained_and_reported_passes() -> None:
    known = Race("Error", "attend", frozenset(("a.cu: put", "a.cu: take")))
    other = Race("Error", "attend", frozenset(("a.cu: put",)))
    entry = {"kernel": "attend", "level": "Error", "functions": ["a.cu: take", "a.cu: put"]}
    assert judge([known, known], [entry]) == []
    assert judge([known, other], [entry]) == [
        "not explained in race_reports.toml: Error in attend between a.cu: put"
    ]
    assert judge([], [entry]) == [
        "explained in race_reports.toml and not reported: "
        "Error in attend between a.cu: put and a.cu: take"
    ]


def test_every_explained_report_says_why_it_is_no_race() -> None:
    for entry in tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))["race"]:
        assert entry.keys() == {"kernel", "level", "functions", "reason"}
        assert len(entry["reason"]) > 40
