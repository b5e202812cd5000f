"""Large blocks that were freed, seen by the pages that the system has to map for new ones."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

FAULTS = """
import resource
from latentd.freed_memory import keep_freed_memory

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [b"x" * (3 << 20) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

faults()
before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can keep it")
def test_pages_of_large_blocks_are_mapped_once() -> None:
    command = [sys.executable, "-c", FAULTS]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    before, after = map(int, found.stdout.split())
    pages = 20 * 8 * (3 << 20) // resource.getpagesize()
    assert after < pages // 100
    assert before > pages // 2  # so it is of use
