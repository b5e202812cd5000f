"""Constrained decoding: allow only some tokens in each step, here those of a number."""

import numpy as np

from latentd_client import Client

with Client() as client, client.open(list(b"The year was 1")) as slot:
    digits = np.zeros(client.info.vocab_size, np.bool_)
    digits[list(b"0123456789")] = True
    number = bytes(step.token for step in slot.stream(3, mask=digits))  # for all its tokens
    print(f"The year was 1{number.decode()}")
    likely = slot.step(ord(","), bias={ord(" "): 2.0}, logprobs=3)  # for this step only
    for token, logprob in likely.top:
        print(f"{bytes([token])!r:8} {logprob:8.3f}")
