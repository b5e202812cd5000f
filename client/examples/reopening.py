"""Outlive the daemon: kill it amid the text and start it again, and the text is the same."""

from latentd_client import Client, Sampling

PROMPT = list(b"And it came to pass ")

with Client(reopen=True, timeout_s=120.0) as client:  # how long a call waits for the next daemon
    with client.open(PROMPT, sampling=Sampling(temperature=0.7, seed=3)) as slot:
        text = bytes(step.token for step in slot.stream(max_steps=200))
    print(text.decode(errors="replace"))
