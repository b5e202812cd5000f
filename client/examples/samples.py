"""Draw several samples of one prompt: the prompt is computed once, and each sample is a fork."""

from latentd_client import Client, Sampling

PROMPT = list(b"And the king said ")

with Client() as client:
    source = client.open(PROMPT[:-1])  # each sample appends the last token, and draws what follows
    for seed in (1, 2, 3):
        with source.fork(sampling=Sampling(temperature=0.8, seed=seed)) as sample:
            text = bytes([sample.step(PROMPT[-1]).token])
            text += bytes(step.token for step in sample.stream(max_steps=31))
        print(f"seed {seed}: {text.decode(errors='replace')!r}")
