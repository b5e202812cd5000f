"""Leave attention and its cache to the daemon, one layer at a time, and run the rest yourself.

The rest is random numbers here; an engine has its own projections, norms and experts. Torch tensors
of bfloat16 go in and out as well; without torch the numbers travel as their bits.
"""

import numpy as np

from latentd_client import Client

RNG = np.random.default_rng(1)


def draw(*shape: int) -> np.ndarray:
    """The bits of random bfloat16 numbers."""
    return (RNG.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


with Client() as client:
    info = client.info
    slots = [client.open([]) for _ in range(2)]  # their prompts are this engine's business
    for _ in range(3):  # a step appends a token to each
        rows = [(slot, slot.context_len) for slot in slots]
        for layer in range(info.layers):
            q = draw(len(rows), info.heads, info.nope_dim + 64)  # rotated in its last 64
            latent = draw(len(rows), 576)  # normed, and rotated in its last 64
            o = client.attend(layer, rows, q, latent)  # [rows, heads, v_dim]
        print(f"lengths {[slot.context_len for slot in slots]}, o {o.shape} of the last layer")
    again = client.attend(info.layers - 1, rows, q, latent)  # a repetition is harmless
    print("the same once more:", np.array_equal(o, again))
