"""Continue a text with a byte-level model such as the bundled demo, one step at a time."""

from latentd_client import Client, Sampling

with Client() as client:  # LATENTD_ENDPOINT, or ipc:///run/latentd/latentd.sock
    slot = client.open(list(b"In the beginning "), sampling=Sampling(temperature=0.7, seed=1))
    tokens = [slot.token]  # sampled at the end of the prompt, not appended yet
    for _ in range(100):
        tokens.append(slot.step().token)  # appends slot.token, samples the next
    print(bytes(token for token in tokens if token is not None).decode(errors="replace"))
