"""What GPU tests ask for by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def own_stream() -> Iterator[None]:
    """Kernels and torch share one stream that is not the legacy one."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
        torch.cuda.synchronize()
