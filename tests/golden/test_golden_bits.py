"""The arithmetic version is raised when the bits of a kernel change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import golden_bits
from latentd_kernels import ARITHMETIC_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_the_recorded_bits_are_of_this_arithmetic_version() -> None:
    found = golden_bits.recorded()["arithmetic_version"]
    assert found == ARITHMETIC_VERSION, "run python tests/golden_bits.py on every processor"


@pytest.mark.parametrize("device", DEVICES)
def test_bits_change_only_with_the_arithmetic_version(
    device: str, figure: Callable[[str, object], None]
) -> None:
    processor = golden_bits.processor(torch.device(device))
    expected = golden_bits.recorded()["processors"].get(processor)
    found = golden_bits.digests(torch.device(device))
    if expected is None:  # another processor sums in another order
        figure("digests to record", json.dumps({processor: found}))
        pytest.skip(f"no bits are recorded for {processor}: run python tests/golden_bits.py")
    unlike = [name for name, bits in found.items() if expected.get(name) != bits]
    assert not unlike, "raise ARITHMETIC_VERSION and run python tests/golden_bits.py"
    assert found.keys() == expected.keys()


def test_sums_of_the_inputs_depend_on_the_order_of_adding() -> None:
    rows, weights = torch.empty(64, 256), torch.empty(64, 256)  # the narrowest of the cases
    golden_bits.fill(rows, 2.0**-5, 1)
    golden_bits.fill(weights, 2.0**-9, 2)
    products = (rows * weights).numpy()
    ahead = np.add.accumulate(products, axis=1)[:, -1]
    back = np.add.accumulate(products[:, ::-1], axis=1)[:, -1]
    assert (ahead != back).mean() > 0.25
