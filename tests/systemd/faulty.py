"""`latentd` with faults that a test switches on by files: what a device or a disk would do."""

import sys
import time
from pathlib import Path
from typing import Any

from latentd.__main__ import main
from latentd.commands import parsing
from latentd.commands import serve as serve_command
from latentd.operations import DeviceFault

SWITCHES = Path("/etc/lab")


def fail_as_asked(command: str) -> None:
    """Make the engine of this process look at the switches."""
    parsing.require_daemon(command)
    from latentd import serve
    from latentd.backend_steps import CpuBackend

    start_engine = serve.start_engine  # type: ignore[attr-defined]
    wait = CpuBackend.wait

    def slow_start(options: Any, report: Any) -> Any:
        for number in range(int(read("slow-start") or 0)):
            report(f"slow start: {number}")
            time.sleep(1)
        return start_engine(options, report)

    def faulty_wait(self: CpuBackend) -> Any:
        if read("hang"):
            time.sleep(600)
        if text := read("device-fault"):
            raise DeviceFault(text)
        return wait(self)

    serve.start_engine = slow_start  # type: ignore[attr-defined]
    CpuBackend.wait = faulty_wait  # type: ignore[method-assign]


def read(switch: str) -> str:
    """What a switch says; nothing when it is off."""
    file = SWITCHES / switch
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    # It is called when READY is far and torch not imported.
    serve_command.require_daemon = fail_as_asked  # type: ignore[attr-defined]
    sys.exit(main())
