"""What the driver refuses outside a launch ends the daemon as a device fault too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from latentd.backend_cuda import CudaBackend  # noqa: E402 - torch may be missing
from latentd.changes import Moves  # noqa: E402
from latentd.operations import DeviceFault  # noqa: E402
from latentd_kernels import driver  # noqa: E402


def refuse(*args: object) -> None:
    raise driver.DriverError("cuMemcpyDtoDAsync", 700, "an illegal memory access was encountered")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend whose buffers are the host's, over a driver that refuses all copies."""
    for name in ("copy", "upload", "download"):
        monkeypatch.setattr(driver, name, refuse)
    inputs = SimpleNamespace(block_table=torch.zeros((2, 4), dtype=torch.int32))
    buffers = SimpleNamespace(slab=torch.zeros((4, 2, 64, 576)), inputs=inputs)
    backend = CudaBackend.__new__(CudaBackend)
    backend.runner, backend.stream = SimpleNamespace(buffers=buffers), 0  # type: ignore[assignment]
    return backend


def test_a_move_that_the_driver_refuses_is_a_device_fault(backend: Any) -> None:
    with pytest.raises(DeviceFault, match="failed with 700"):
        backend.move(Moves(copies=[(0, 1)], rows=[]))
