"""`latentd` with faults that a test switches on: what a device, a disk or a bug would do.

    python tests/faulty.py FOLDER serve ...

A switch is a file in FOLDER, whose text is that of the fault; it is looked for at every launch, or
where its fault belongs. Nothing of this is in the daemon: who starts `latentd` has no such switch.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from latentd.__main__ import main
from latentd.commands import parsing
from latentd.commands import serve as serve_command

OUT_OF_BOUNDS: Final = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry write_out_of_bounds(.param .u64 buffer)
{
    .reg .b64 %address;
    .reg .b32 %value;
    ld.param.u64 %address, [buffer];
    add.u64 %address, %address, 0x10000000000;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
\0"""
"""A kernel that writes a tebibyte behind the buffer it is given."""


class Switches:
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> str:
        """What a switch says; nothing when it is off."""
        file = self._folder / name
        return file.read_text() if file.exists() else ""

    def turn_off(self, name: str) -> None:
        """The fault has come."""
        (self._folder / name).unlink()

    def install(self, command: str) -> None:
        """Make this process look at the switches. It is called when READY is far and torch is not
        imported."""
        parsing.require_daemon(command)
        from latentd import serve, server
        from latentd.snapshot_writer import Writer

        start_engine = serve.start_engine  # type: ignore[attr-defined]
        write_state = Writer.write_state

        def slow_start(options: Any, report: Any) -> Any:
            for number in range(int(self.read("slow-start") or 0)):
                report(f"slow start: {number}")
                time.sleep(1)
            engine = start_engine(options, report)
            self._spoil(engine.backend)
            return engine

        def faulty_write(writer: Any, tensors: Any) -> None:
            if self.read("disk-full"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_state(writer, tensors)

        server.LAST_WORDS_S = 2.0  # clients of a busy machine ask late
        serve.start_engine = slow_start  # type: ignore[attr-defined]
        Writer.write_state = faulty_write  # type: ignore[assignment, method-assign]

    def _spoil(self, backend: Any) -> None:
        """Let a backend fail when it is asked to."""
        from latentd.operations import DeviceFault

        launch, wait = backend.launch, backend.wait
        errors = {
            "device-fault": DeviceFault, "exception": ZeroDivisionError,
            "out-of-memory": MemoryError,
        }  # fmt: skip

        def faulty_launch(plan: Any, bucket: int) -> None:
            if self.read("out-of-bounds"):
                self.turn_off("out-of-bounds")  # no call of CUDA works behind it
                write_out_of_bounds(backend)
            launch(plan, bucket)

        def faulty_wait() -> Any:
            if self.read("hang"):
                time.sleep(600)
            for name, error in errors.items():
                if text := self.read(name):
                    raise error(text)
            return wait()

        backend.launch, backend.wait = faulty_launch, faulty_wait


def write_out_of_bounds(backend: Any) -> None:
    """Launch the kernel in front of what comes next on the stream."""
    from latentd_kernels import driver
    from latentd_kernels.function import Function, load_module

    kernel = Function(load_module(OUT_OF_BOUNDS), "write_out_of_bounds", driver.use_device())
    kernel.launch((1, 1, 1), 1, (backend.runner.buffers.slab,), backend.stream, 0, pdl=False)


if __name__ == "__main__":
    serve_command.require_daemon = Switches(Path(sys.argv[1])).install  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[2:]))
