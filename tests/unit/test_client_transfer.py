"""Export and adopt through both clients, between two daemons and within one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fakes import FakeEngine
from gates import wait_until
from latentd_client import Client, Pages, ProtocolError, RequestRejected, Sampling
from latentd_client._transfer import PIECE_BYTES
from serving import Blocking, Running, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Connect = Callable[..., Any]

PROMPT = [n % 251 for n in range(300)]
PAGE_BYTES = 2 * 64 * 576 * 2


@pytest.fixture
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Another daemon on the same model."""
    folder: Path = tmp_path_factory.mktemp("s")
    with serving(f"ipc://{folder}/s") as running:
        yield running


def keep(client: Any, pages: Pages) -> Pages:
    """The same with all pieces in memory."""
    if not isinstance(client, Blocking):
        return replace(pages, pieces=list(pages.pieces))  # type: ignore[arg-type]
    return replace(pages, pieces=list(client._iterate(pages.pieces)))


def test_a_session_moves_to_another_daemon_and_goes_on(
    connect: Connect, running: Running, second: Running
) -> None:
    hot = Sampling(temperature=1.0, seed=9)
    with connect(running.endpoint) as here, connect(second.endpoint) as there:
        assert {"export", "adopt"} <= set(here.info.features)
        slot = here.open(PROMPT, sampling=hot)
        slot.step()
        pages = slot.export(piece_bytes=2 * PAGE_BYTES)
        assert (pages.context_len, pages.num_pages, pages.sampling) == (301, 5, hot)
        moved = there.adopt(pages)
        assert (moved.context_len, moved.token, moved.seed) == (301, slot.token, 9)
        assert moved.step() == slot.step()
        assert list(moved.stream(70)) == list(slot.stream(70))


def test_pieces_are_of_the_size_asked_for_and_can_be_kept(
    connect: Connect, running: Running
) -> None:
    with connect(running.endpoint) as client:
        slot = client.open(PROMPT)
        kept = keep(client, slot.export(piece_bytes=2 * PAGE_BYTES))
        assert [(piece.first, len(piece.pages)) for piece in kept.pieces] == [  # type: ignore[union-attr]
            (0, 2), (2, 2), (4, 1)
        ]  # fmt: skip
        assert kept.tokens.dtype == np.int32
        assert kept.tokens.tolist() == PROMPT
        assert len(keep(client, slot.export()).pieces) == 1  # type: ignore[arg-type]
        assert PIECE_BYTES > 5 * PAGE_BYTES
        slot.close()
        twins = [client.adopt(kept) for _ in range(2)]
        assert len({(twin.slot_id, twin.epoch) for twin in twins}) == 2
        assert twins[0].step() == twins[1].step()


def test_a_stream_left_early_is_exported_as_far_as_it_was_read(
    connect: Connect, running: Running
) -> None:
    with connect(running.endpoint) as client:
        slot = client.open(PROMPT)
        stream = iter(slot.stream(500))
        read = [next(stream) for _ in range(5)]
        moved = client.adopt(keep(client, slot.export()))
        assert (moved.context_len, moved.token) == (read[-1].context_len, read[-1].token)
        assert list(moved.stream(9)) == list(slot.stream(9))


def test_other_sampling_replaces_that_of_the_pages(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        pages = keep(client, client.open(PROMPT, sampling=Sampling(1.0, seed=3)).export())
        assert client.adopt(pages).seed == 3
        assert client.adopt(pages, sampling=Sampling(1.0, seed=4)).seed == 4


def test_an_adoption_is_found_again_by_its_key(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        pages = keep(client, client.open(PROMPT).export())
        adopted, again = client.adopt(pages, key="mine"), client.adopt(pages, key="mine")
        assert (adopted.slot_id, adopted.epoch) == (again.slot_id, again.epoch)
        with pytest.raises(RequestRejected, match="another open, fork or adoption"):
            client.open(PROMPT, key="mine")
        assert running.engine.slots.num_used == 2


@pytest.mark.parametrize("what", ["fingerprint", "geometry", "tokens", "checksums", "bytes"])
def test_what_is_wrong_is_named_and_nothing_is_kept(
    connect: Connect, running: Running, what: str
) -> None:
    with connect(running.endpoint) as client:
        pages = keep(client, client.open(PROMPT).export(piece_bytes=PAGE_BYTES))
        pieces: Any = pages.pieces
        wrong, names = {
            "fingerprint": (replace(pages, fingerprint="1" * 64), "fingerprint"),
            "geometry": (
                replace(pages, geometry=pages.geometry._replace(layers=3)), "layers is 3"
            ),
            "tokens": (replace(pages, tokens=pages.tokens[:200]), "pages from 4 on, of 4 in all"),
            "checksums": (
                replace(pages, pieces=[p._replace(checksums=p.checksums + 1) for p in pieces]),
                "page 0 has another checksum",
            ),
            "bytes": (
                replace(pages, pieces=[p._replace(pages=p.pages[:, :-2]) for p in pieces]),
                "raw uint8 frame",
            ),
        }[what]  # fmt: skip
        used = running.engine.slots.pool.num_used
        with pytest.raises(RequestRejected, match=names) as refusal:
            client.adopt(wrong)
        assert refusal.value.code == "invalid"
        client.ping()
        assert (running.engine.slots.num_used, running.engine.slots.pool.num_used) == (1, used)
        assert client.adopt(pages).context_len == 300


def test_an_adoption_without_all_its_pages_is_refused_with_numbers(
    connect: Connect, running: Running
) -> None:
    with connect(running.endpoint) as client:
        pages = keep(client, client.open(PROMPT).export(piece_bytes=PAGE_BYTES))
        short = replace(pages, pieces=pages.pieces[:3])  # type: ignore[index]
        with pytest.raises(RequestRejected, match="2 of 5 pages are missing, the first is page 3"):
            client.adopt(short)
        assert running.engine.slots.num_used == 1


def test_an_adoption_given_up_gives_its_pages_back(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        pages = keep(client, client.open(PROMPT).export(piece_bytes=PAGE_BYTES))

        def broken() -> Iterator[Any]:
            yield from pages.pieces[:2]  # type: ignore[index]
            raise OSError("the source is gone")

        with pytest.raises(OSError, match="the source is gone"):
            client.adopt(replace(pages, pieces=broken()))
        wait_until(lambda: (client.ping(), running.engine.slots.num_used)[1] == 1)


def test_an_export_of_a_slot_that_has_gone_on_is_refused(
    connect: Connect, running: Running
) -> None:
    with connect(running.endpoint) as client:
        slot = client.open(PROMPT)
        pages = slot.export(piece_bytes=PAGE_BYTES)
        slot.step()
        with pytest.raises(RequestRejected) as refusal:
            keep(client, pages)
        assert refusal.value.code == "position_conflict"


def test_pieces_are_cut_to_the_frames_that_the_other_daemon_takes(
    running: Running, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("s")
    with (
        serving(f"ipc://{folder}/s", max_frame_bytes=2 * PAGE_BYTES) as small,
        Client(running.endpoint) as here,
        Client(small.endpoint) as there,
    ):
        slot = here.open(PROMPT)
        moved = there.adopt(slot.export())
        assert moved.step() == slot.step()
        assert here.adopt(moved.export()).context_len == 301


def test_an_empty_slot_moves_too(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        moved = client.adopt(client.open([]).export())
        assert (moved.context_len, moved.token) == (0, None)
        assert moved.step(5).context_len == 1


def test_what_are_no_pages_is_told(connect: Connect, running: Running) -> None:
    with connect(running.endpoint) as client:
        for wrong in (None, [1, 2], b"pages"):
            with pytest.raises(ProtocolError, match=r"must be what Slot\.export gives"):
                client.adopt(wrong)
        with pytest.raises(ProtocolError, match="piece_bytes"):
            client.open([1]).export(piece_bytes=1.5)


def test_the_blocking_client_does_not_take_the_pieces_of_an_async_one(running: Running) -> None:
    with Client(running.endpoint) as client:
        pages = client.open([1]).export()

        async def pieces() -> Any:
            yield None

        with pytest.raises(ProtocolError, match="AsyncClient"):
            client.adopt(replace(pages, pieces=pieces()))
        assert isinstance(running.engine, FakeEngine)
        assert running.engine.slots.num_used == 1
