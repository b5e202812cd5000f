"""Let the daemon run ahead: tokens arrive as they are sampled, without a request for each."""

from latentd_client import Client

with Client() as client, client.open(list(b"And he said ")) as slot:
    for step in slot.stream(max_steps=60, stop=client.info.eos_token_ids):
        print(step.token, end=" ", flush=True)
    print(f"\ncontext_len {slot.context_len}")
