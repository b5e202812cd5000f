"""Look at the logits of a step, and choose the token to append yourself."""

import numpy as np

from latentd_client import Client

with Client() as client, client.open(list(b"In the beginnin"), logits=True) as slot:
    assert slot.logits is not None  # float32 [vocab_size], at the end of the prompt
    for token in np.argsort(slot.logits)[-5:][::-1]:
        print(f"{bytes([token])!r:8} {slot.logits[token]:8.3f}")
    step = slot.step(token=ord("g"), logits=True)  # append this one, whatever was sampled
    print(f"after 'g': token {step.token}, log-probability {step.logprob:.3f}")
