"""The end of a process that has failed: at once, without clean-up, with an exit code of its own."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

from latentd.operations import DeviceFault
from latentd_kernels.driver import DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_DEVICE: Final = 70
"""EX_SOFTWARE of sysexits.h; systemd restarts it."""
EXIT_FAILED: Final = 1
"""Of a fault of our own while serving; systemd restarts it too."""

log = logging.getLogger("latentd")


@contextmanager
def leaving_on_device_fault() -> Iterator[None]:
    """Turn a device's failure inside into the end of the process. Destructors would call CUDA
    again, and after a fault no call may be made, so none of them runs."""
    try:
        yield
    except (DeviceFault, DriverError) as error:
        log.critical("device fault, leaving with exit code %d: %s", EXIT_DEVICE, error)
        _leave(EXIT_DEVICE)


@contextmanager
def leaving_on_failure() -> Iterator[None]:
    """Turn any other error inside into the end of the process: launches may be in flight."""
    try:
        yield
    except (DeviceFault, DriverError):
        raise
    except Exception:
        log.critical("failed, leaving with exit code %d", EXIT_FAILED, exc_info=True)
        _leave(EXIT_FAILED)


def _leave(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
