"""`latentd-openai` as a process of its own, and OpenAI's client before it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from processes import environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openai


@contextlib.contextmanager
def door_before(endpoint: str, *flags: str, **more: Any) -> Iterator[str]:
    """A door to the daemon of an endpoint, until the block is left; its base URL. Keyword arguments
    are for Popen."""
    command = [sys.executable, "-m", "latentd_openai", "--endpoint", endpoint, "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, *flags], env=environment(), stdout=pipe, text=True, **more
    ) as door:
        assert door.stdout is not None
        line = door.stdout.readline()
        try:
            assert "serving at " in line, line
            yield line.split("serving at ")[1].strip()
        finally:
            door.terminate()
            assert door.wait(60) == 0


def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    """The real one, which repeats nothing."""
    import openai

    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)
