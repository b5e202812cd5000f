"""Step several sequences in one request: the daemon decodes them in one batch."""

from latentd_client import Client

PROMPTS = (b"In the beginning ", b"And God said ", b"To be, or not ")

with Client() as client:
    slots = [client.open(list(prompt)) for prompt in PROMPTS]
    texts = [bytearray(prompt) for prompt in PROMPTS]
    for _ in range(32):
        for text, slot in zip(texts, slots, strict=True):
            text.append(slot.token or 0)
        client.step([(slot, None) for slot in slots])  # None: append each slot's own last token
    for text in texts:
        print(text.decode(errors="replace"))
