"""Score texts: the log-probability of every token of a prompt, given those before it."""

import numpy as np

from latentd_client import Client

with Client() as client:
    for text in ("In the beginning", "In the zxqginning"):
        with client.open(list(text.encode()), prompt_logprobs=1) as slot:
            scores = slot.prompt_logprobs
            assert scores is not None
            greedy = scores.top_tokens[1:, 0] == list(text.encode())[1:]
            total = np.nansum(scores.logprobs)
            print(f"{text!r}: {total:.1f} in all, {greedy.sum()} of {len(greedy)} as greedy")
