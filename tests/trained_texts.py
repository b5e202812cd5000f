"""The texts that the bundled model is tested on, and what the reference chose on them.

`python tests/trained_texts.py` writes the reference's choices anew (with transformers, after the
bundled weights changed); a test compares the file with transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latentd.demo import encode, model_dir

TEXTS = {
    "king-james": (
        "In the beginning God created the heaven and the earth. And the earth was without form, "
        "and void; and darkness was upon the face of the deep. And the Spirit of God moved upon"
    ),
    "shakespeare": (
        "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer the "
        "slings and arrows of outrageous fortune, Or to take arms against a sea of troubles, And"
    ),
}
NUM_TOKENS = 140
CHOICES = Path(__file__).parent / "golden" / "trained_choices.json"


def tokens_of(text: str) -> list[int]:
    """The tokens that tests use of a text."""
    return encode(TEXTS[text])[:NUM_TOKENS]


def saved_choices(text: str) -> dict[str, Any]:
    """The reference's choices on a text, from the file."""
    saved: dict[str, dict[str, Any]] = json.loads(CHOICES.read_text(encoding="utf-8"))
    return saved[text]


def main() -> None:
    """Write the file."""
    import reference_models

    made = {text: reference_models.choices(model_dir(), tokens_of(text)) for text in TEXTS}
    CHOICES.write_text(json.dumps(made, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
