"""One daemon prefills, another one decodes: the pages of a slot go over, the bits stay the same.

Takes the endpoint of the daemon that prefills as an argument; without one, both are the same.
"""

import sys

from latentd_client import Client, Sampling

PROMPT = list(b"In the beginning God created the heaven and the earth. " * 4)

with Client(*sys.argv[1:]) as prefills, Client() as decodes:
    slot = prefills.open(PROMPT, sampling=Sampling(temperature=0.8, seed=7))
    pages = slot.export()  # fetched piece by piece while the other daemon takes them
    with decodes.adopt(pages) as moved:
        text = [step.token for step in moved.stream(60)]
    print(f"{pages.context_len} tokens in {pages.num_pages} pages went over, and so it goes on:")
    print(bytes(text).decode(errors="replace"))
    assert text == [step.token for step in slot.stream(60)]
