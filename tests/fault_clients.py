"""Clients of a daemon that fails: each a process that says what it saw.

    python tests/fault_clients.py KIND ENDPOINT

It says `ready` when it has a slot, begins when it is told to (a line on stdin), and ends with a
line of JSON: the tokens that it was given, and code and text of the error that ended it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from latentd_client import AsyncClient, Client, Control, LatentdError, RequestRejected

if TYPE_CHECKING:
    from latentd_client import Slot

PROMPT: Final = tuple(range(1, 100))
MOST_STEPS: Final = 3000
PACE_S: Final = 0.002
"""Between two steps, so that a quick device does not come to the end before its fault."""
TIMEOUT_S: Final = 120.0
AFTERWARDS: Final = 10
"""Steps of the survivor in the next life of its daemon."""


def begin() -> None:
    """Be ready, and wait until the others are."""
    print("ready", flush=True)
    sys.stdin.readline()


def begun(endpoint: str, tokens: list[int], reopen: bool = False) -> tuple[Client, Slot]:
    """A client and its slot."""
    client = Client(endpoint, timeout_s=TIMEOUT_S, reopen=reopen)
    slot = client.open(PROMPT)
    assert slot.token is not None
    tokens.append(slot.token)
    begin()
    return client, slot


def stepping(endpoint: str, tokens: list[int]) -> None:
    """Step until something ends it."""
    _, slot = begun(endpoint, tokens)
    for _ in range(MOST_STEPS):
        tokens.append(slot.step().token)
        time.sleep(PACE_S)


def asynchronous(endpoint: str, tokens: list[int]) -> None:
    """The same with an AsyncClient."""

    async def step() -> None:
        async with AsyncClient(endpoint, timeout_s=TIMEOUT_S) as client:
            slot = await client.open(PROMPT)
            assert slot.token is not None
            tokens.append(slot.token)
            begin()
            for _ in range(MOST_STEPS):
                tokens.append((await slot.step()).token)
                await asyncio.sleep(PACE_S)

    asyncio.run(step())


def streaming(endpoint: str, tokens: list[int]) -> None:
    """Read a stream until something ends it."""
    _, slot = begun(endpoint, tokens)
    for step in slot.stream(MOST_STEPS, credit=4):
        tokens.append(step.token)
        time.sleep(PACE_S)


def idle(endpoint: str, tokens: list[int]) -> None:
    """Ask for nothing but the daemon's health, until that is no longer good."""
    client, slot = begun(endpoint, tokens)
    with Control(client.info.control) as control:
        while (state := control.health()["state"]) == "ready":
            time.sleep(PACE_S)
    print(state, flush=True)
    slot.step()


def surviving(endpoint: str, tokens: list[int]) -> None:
    """Step until the daemon lives again, and a little longer. A step that may be what has ended the
    daemon is not repeated by itself, but by us."""
    client, slot = begun(endpoint, tokens, reopen=True)
    boot_id, left = client.info.boot_id, AFTERWARDS
    while left:
        try:
            tokens.append(slot.step().token)
        except RequestRejected as refusal:
            if refusal.code != "internal":
                raise
        left -= client.info.boot_id != boot_id
        time.sleep(PACE_S)


KINDS: Final = {
    "steps": stepping, "asyncio": asynchronous, "stream": streaming, "idle": idle,
    "survivor": surviving,
}  # fmt: skip


def main() -> None:
    """Be a client."""
    kind, endpoint = sys.argv[1:]
    seen: dict[str, Any] = {"code": None, "text": "", "tokens": []}
    try:
        KINDS[kind](endpoint, seen["tokens"])
    except LatentdError as error:
        seen |= {"code": error.code, "text": str(error)}
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
