"""The prefix cache: full pages by their content, for prompts that begin like earlier sequences.

A page's digest is chained over the model's fingerprint, the salt and all token ids up to the end of
the page, so that equal digests mean equal bits. A page that can be found is kept: it stays in the
pool after its last owner has gone, until other pages are needed (see `PagePool`).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from latentd.slots import Slot, SlotTable

DIGEST_BYTES = 32


class PrefixCache:
    """Pages of one pool by digest."""

    def __init__(self, slots: SlotTable, fingerprint: str) -> None:
        self.slots = slots
        self.pool = slots.pool
        self.pool.on_evict = self._evict
        slots.note_full = self.note_full
        self._fingerprint = fingerprint.encode()
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def begin(self, slot: Slot, salt: str) -> None:
        """Set an empty slot's place among the beginnings: its own salt finds its own pages only."""
        start = blake2b(self._fingerprint, digest_size=DIGEST_BYTES, person=b"latentd prefix")
        start.update(b"\0" + salt.encode())
        slot.chain = [start.digest()]

    def reuse(self, slot: Slot, prompt: NDArray[np.int32]) -> int:
        """Append pages that hold the next tokens of a prompt, all but one of them at most; returns
        the number of tokens. The slot ends with a full page, and nothing runs on it."""
        if not slot.chain or slot.length != len(slot.pages) * PAGE_SIZE:
            return 0
        self.note_full()
        pages, first = [], slot.length
        for start in range(first, len(prompt) - PAGE_SIZE, PAGE_SIZE):
            digest = _digest(slot.chain[-1], prompt[start : start + PAGE_SIZE].tobytes())
            page = self._pages.get(digest)
            if page is None:
                break
            pages.append(page)
            slot.chain.append(digest)
        self.pool.share(pages)
        self.slots.append_filled(slot, pages)
        slot.length = len(slot.pages) * PAGE_SIZE
        slot.tokens[first : slot.length] = prompt[first : slot.length].data
        return slot.length - first

    def note_full(self) -> None:
        """Take note of the pages that have become full; what they hold is computed."""
        for slot in self.slots.full:
            chain = slot.chain
            while chain and len(chain) * PAGE_SIZE <= slot.length:
                end = len(chain) * PAGE_SIZE
                chain.append(_digest(chain[-1], slot.tokens[end - PAGE_SIZE : end].tobytes()))
                self._add(chain[-1], slot.pages[len(chain) - 2])
        self.slots.full.clear()

    def forget(self, page: int) -> None:
        """Let nobody find a page any more: its owner is about to write to it."""
        self._evict(page)
        self.pool.forget(page)

    def check(self) -> None:
        """Raise AssertionError unless the pages that are kept are those that can be found."""
        assert {page: digest for digest, page in self._pages.items()} == self._digests
        for page in range(self.pool.num_pages):
            assert self.pool.is_kept(page) == (page in self._digests), f"page {page} is not found"

    def _add(self, digest: bytes, page: int) -> None:
        if digest not in self._pages and page not in self._digests:
            self._pages[digest] = page
            self._digests[page] = digest
            self.pool.keep(page)

    def _evict(self, page: int) -> None:
        del self._pages[self._digests.pop(page)]


def _digest(before: bytes, ids: bytes) -> bytes:
    return blake2b(before + ids, digest_size=DIGEST_BYTES).digest()
