"""Several sequences in one asyncio program; the daemon batches what waits at the same time."""

import asyncio

from latentd_client import AsyncClient


async def decode(client: AsyncClient, prompt: bytes) -> str:
    """The prompt and 32 more bytes."""
    text = bytearray(prompt)
    async with await client.open(list(prompt)) as slot:
        for _ in range(32):
            text.append(slot.token or 0)
            await slot.step()
    return text.decode(errors="replace")


async def main() -> None:
    """Decode two prompts side by side."""
    async with AsyncClient() as client:
        for text in await asyncio.gather(decode(client, b"And God "), decode(client, b"The king ")):
            print(text)


asyncio.run(main())
