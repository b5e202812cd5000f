"""Text in place of tokens, for both clients: whole texts, or piece by piece as they are decoded.

A codec (`load_codec`) makes tokens of text and back; any object with the methods of `Codec` will
do, for example around a tokenizer of another library. Without a codec: bytes, for a byte-level
model such as the demo.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Unpack

from latentd_client._detokenizing import Codec
from latentd_client._reading import Generated, Reading, TextOptions, opening, prompt_tokens
from latentd_client._text_reader import TextReader
from latentd_client.codecs import BYTE_VOCABS, ByteCodec, JsonCodec, codec_for, load_codec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from latentd_client._given import Prompt
    from latentd_client.aio import AsyncClient
    from latentd_client.aio_slot import AsyncSlot
    from latentd_client.client import Client
    from latentd_client.slot import Slot

__all__ = [
    "BYTE_VOCABS",
    "ByteCodec",
    "Codec",
    "Generated",
    "JsonCodec",
    "TextOptions",
    "TextReader",
    "agenerate",
    "astream_text",
    "generate",
    "load_codec",
    "stream_text",
]


def stream_text(
    slot: Slot, max_steps: int, codec: Codec | None = None, *, is_new: bool = True,
    **options: Unpack[TextOptions],
) -> Generator[str, None, None]:  # fmt: skip
    """Decode up to `max_steps` tokens of a slot as text, in pieces of whole characters. The text of
    a new slot begins with the token that `open` has sampled; to go on behind what another stream
    has told say that it is not new. Leave the loop whenever you like: the slot stands where the
    last step came that was needed. Raises TextError, and like `Slot.stream`.
    """
    reading = Reading.of(slot, slot._session.calls.info, max_steps, codec, is_new, options)
    yield from _pieces(slot, reading)


async def astream_text(
    slot: AsyncSlot, max_steps: int, codec: Codec | None = None, *, is_new: bool = True,
    **options: Unpack[TextOptions],
) -> AsyncGenerator[str, None]:  # fmt: skip
    """See `stream_text`."""
    reading = Reading.of(slot, slot._session.calls.info, max_steps, codec, is_new, options)
    async with contextlib.aclosing(_apieces(slot, reading)) as pieces:
        async for piece in pieces:
            yield piece


def generate(
    client: Client, prompt: str | Prompt, max_steps: int, codec: Codec | None = None, *,
    salt: str = "", **options: Unpack[TextOptions],
) -> Generated:  # fmt: skip
    """The continuation of a prompt, text or tokens, by up to `max_steps` tokens; `salt` as in
    `Client.open`. Raises TextError, and like `Client.open` and `Slot.stream`."""
    codec = codec_for(client.info, codec)
    tokens = prompt_tokens(codec, prompt)
    with client.open(tokens, salt=salt, **opening(options)) as slot:
        reading = Reading.of(slot, client.info, max_steps, codec, True, options)
        return reading.result("".join(_pieces(slot, reading)))


async def agenerate(
    client: AsyncClient, prompt: str | Prompt, max_steps: int, codec: Codec | None = None, *,
    salt: str = "", **options: Unpack[TextOptions],
) -> Generated:  # fmt: skip
    """See `generate`."""
    codec = codec_for(client.info, codec)
    tokens = prompt_tokens(codec, prompt)
    async with await client.open(tokens, salt=salt, **opening(options)) as slot:
        reading = Reading.of(slot, client.info, max_steps, codec, True, options)
        async with contextlib.aclosing(_apieces(slot, reading)) as pieces:
            return reading.result("".join([piece async for piece in pieces]))


def _pieces(slot: Slot, reading: Reading) -> Generator[str, None, None]:
    yield from reading.first(slot.token)
    if reading.room > 0:
        with contextlib.closing(slot.stream(reading.room, reading.stops, **reading.rest)) as steps:
            for step in steps:
                yield from reading.push(step.token)
                if reading.is_over:
                    break
    yield from reading.last()


async def _apieces(slot: AsyncSlot, reading: Reading) -> AsyncGenerator[str, None]:
    for piece in reading.first(slot.token):
        yield piece
    if reading.room > 0:
        stream = slot.stream(reading.room, reading.stops, **reading.rest)
        async with contextlib.aclosing(stream) as steps:
            async for step in steps:
                for piece in reading.push(step.token):
                    yield piece
                if reading.is_over:
                    break
    for piece in reading.last():
        yield piece
