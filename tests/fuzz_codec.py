"""Mutated messages at the codec, without a daemon; the first part of `make fuzz`.

    python tests/fuzz_codec.py [--examples 100000]

hypothesis draws the seeds of ten messages at a time, and bytes for the reader of frames.
"""

from __future__ import annotations

import argparse
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentd_client import field_checks, fields, packed, protocol, zmtp
from latentd_client.errors import ProtocolError, RequestRejected
from mutations import mutated, requests

if TYPE_CHECKING:
    from collections.abc import Sequence


SEAT: Final = {"slot": 1, "epoch": 2, "pos": 3}
EACH: Final = 10
"""Messages of an example."""
LIMITS: Final = (1 << 16, 4, 1 << 17)
"""Of the reader: bytes of a frame, frames that are kept, bytes of a message."""


def main() -> None:
    """As many examples as asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=100_000)
    args = parser.parse_args()
    fuzz(args.examples)
    print(f"codec: {args.examples * EACH:,} mutated messages, none broke a promise")


def fuzz(examples: int) -> None:
    """Check EACH messages in every example. Raises what an example meets."""
    usual = settings(max_examples=examples, deadline=None, database=None,
                     suppress_health_check=list(HealthCheck))  # fmt: skip

    @usual
    @given(st.integers(0, (1 << 64) - 1), st.binary(max_size=60))
    def check(seed: int, said: bytes) -> None:
        draw = random.Random(seed)
        for right in draw.choices(requests("s" * 48, SEAT, 7), k=EACH):
            frames = mutated(right, draw)
            check_frames(frames, draw)
            check_header(frames)
        check_stream(said)

    check()


def check_frames(frames: Sequence[bytes], draw: random.Random) -> None:
    """A message arrives as it was sent, in whatever pieces."""
    reader = zmtp.FrameReader(*LIMITS)
    data, at, got = zmtp.message(frames), 0, None
    while got is None and at < len(data):
        size = draw.randrange(1, len(data) + 1)
        reader.feed(memoryview(data)[at : at + size])
        at += size
        got = reader.next()
    assert got == list(frames[: LIMITS[1]])
    assert reader.count == len(frames)
    assert reader.is_empty


def check_header(frames: Sequence[bytes]) -> None:
    """A header is refused by one of two errors, or read, and then written and read as the same."""
    with suppress(ProtocolError):
        packed.read_steps(frames[0])
    try:
        header = protocol.decode_header(frames[0])
        raw = protocol.decode_raw(header, frames[1:])
        op = header.get("op")
        table = fields.OPS.get(op) if isinstance(op, str) else None
        if table is not None:
            field_checks.check(table, header, str(op))
    except (ProtocolError, RequestRejected):
        return
    assert [array.tobytes() for array in raw] == list(frames[1:])
    assert repr(protocol.decode_header(bytes(protocol.encode(header)[0]))) == repr(header)


def check_stream(said: bytes) -> None:
    """Any bytes are messages, or the start of one, or break the stream; none are kept for ever."""
    reader = zmtp.FrameReader(*LIMITS)
    reader.feed(memoryview(said))
    with suppress(zmtp.BrokenStream):
        while reader.next() is not None:
            pass
    assert reader.held_bytes <= 2 * len(said)  # read frames stay in the buffer for a while


if __name__ == "__main__":
    main()
