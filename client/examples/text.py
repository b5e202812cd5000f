"""Text in and out: whole, or piece by piece as it is decoded, until a string that may lie anywhere.

Takes the path of the model's tokenizer.json, or of its folder, as an argument (`pip install
'.[text]'`); a byte-level model such as the bundled demo needs none.
"""

import sys

from latentd_client import Client, Sampling
from latentd_client.text import generate, load_codec, stream_text

WARM = Sampling(temperature=0.6, seed=4)

with Client() as client:
    codec = load_codec(client.info, *sys.argv[1:])
    verse = generate(client, "And it came to pass", 200, codec, sampling=WARM, stop=[". ", ".\n"])
    print(f"{verse.text!r} ({len(verse.tokens)} tokens, ended by {verse.end})")

    with client.open(codec.encode("The king said, "), sampling=WARM) as slot:
        for piece in stream_text(slot, 120, codec, stop=["\n"]):
            print(piece, end="", flush=True)  # whole characters only
        print()
