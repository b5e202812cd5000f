"""The end of a process whose device has failed: at once, without clean-up, with exit code 70."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from latentd.operations import DeviceFault
from latentd_kernels.driver import DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_DEVICE: Final = 70
"""EX_SOFTWARE of sysexits.h; systemd restarts it."""

log = logging.getLogger("latentd")


@contextmanager
def leaving_on_device_fault() -> Iterator[None]:
    """Turn a device's failure inside into the end of the process. Destructors would call CUDA
    again, and after a fault no call may be made, so none of them runs."""
    try:
        yield
    except (DeviceFault, DriverError) as error:
        log.critical("device fault, leaving with exit code %d: %s", EXIT_DEVICE, error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_DEVICE)
