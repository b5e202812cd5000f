"""A slot's pages on their way from one daemon to another."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from latentd_client.results import Sampling


class PageGeometry(NamedTuple):
    """The shape of a page: `layers` runs of `page_size` rows of `row_dim` numbers of `dtype`."""

    layers: int
    page_size: int
    row_dim: int
    dtype: str


class Piece(NamedTuple):
    """Some pages in a row, from page `first` on: their bytes [n, bytes of a page], and the CRC-32
    of each."""

    first: int
    pages: NDArray[np.uint8]
    checksums: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Pages:
    """What `Slot.export` gives and `Client.adopt` takes. `tokens` are the slot's, `token` is the
    last sampled one (None: the next step must name its token), `sampling` what it is sampled with,
    seed and all.

    `pieces` are fetched while somebody iterates over them, once; the async client's by `async for`.
    To keep them, for example for several adoptions: `dataclasses.replace(pages,
    pieces=list(pages.pieces))`, which both clients take.
    """

    fingerprint: str
    geometry: PageGeometry
    tokens: NDArray[np.int32]
    token: int | None
    sampling: Sampling
    pieces: Iterable[Piece] | AsyncIterable[Piece]

    @property
    def context_len(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def num_pages(self) -> int:
        """The number of pages that hold them."""
        return -(-len(self.tokens) // self.geometry.page_size)
