"""Speculative decoding: guess from the text so far, verify in one step, get the same tokens."""

from latentd_client import Client

PROMPT = list(b"the cat sat on the mat, the cat sat on the ")

with Client() as client:
    with client.open(PROMPT) as slot:
        plain = [step.token for step in slot.stream(60)]
    with client.open(PROMPT) as slot:
        drafted = [step.token for step in slot.stream(60, draft="ngram")]
    assert drafted == plain
    print(bytes(drafted).decode(errors="replace"))
    with client.open(PROMPT) as slot:  # or guess yourself
        found = slot.verify(drafted[:3])
        print(f"{found.accepted} of 3 guesses were right; then comes token {found.token}")
