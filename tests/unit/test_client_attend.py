"""Attention through a server, with both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from attend_promises import random_rows
from fakes import FakeEngine, fake_attention, latent_id
from latentd_client import ProtocolError, RequestRejected
from serving import Peer, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import Running

    Connect = Callable[..., Any]


@pytest.fixture
def client(running: Running, connect: Connect) -> Iterator[Any]:
    with connect(running.endpoint) as client:
        yield client


def seats(client: Any, rows: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """The rows as the client that is under test wants them."""
    return [(getattr(slot, "_target", slot), pos) for slot, pos in rows]


def test_a_slot_grows_by_attention_of_all_its_layers(running: Running, client: Any) -> None:
    slot = client.open([])
    held: list[int] = []
    for pos in range(70):
        q, latent = random_rows(running.engine, 1, pos)
        held.append(latent_id(latent[0]))
        for layer in range(2):
            o = client.attend(layer, seats(client, [(slot, pos)]), q, latent)
            assert o.dtype == np.uint16
            assert np.array_equal(o[0], fake_attention(q[0], held, layer, running.engine.info))
            assert slot.context_len == pos + layer


def test_torch_tensors_go_in_and_come_out(running: Running, client: Any) -> None:
    slot = client.open([])
    q, latent = random_rows(running.engine, 1, 3)
    as_torch = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (q, latent)]
    rows = seats(client, [(slot, 0)])
    o = client.attend(0, rows, *as_torch)
    assert o.dtype == torch.bfloat16
    assert o.shape == (1, 4, 128)
    bits = client.attend(0, rows, q, latent)
    assert np.array_equal(o.view(torch.int16).numpy().view(np.uint16), bits)


def test_a_tensor_that_does_not_lie_together_is_sent_as_it_is_seen(
    running: Running, client: Any
) -> None:
    slot = client.open([])
    q, latent = random_rows(running.engine, 1, 3)
    wide = np.repeat(q, 2, axis=2)
    rows = seats(client, [(slot, 0)])
    found = client.attend(0, rows, wide[:, :, ::2], latent)
    assert np.array_equal(found, client.attend(0, rows, q, latent))


@pytest.mark.parametrize("q", [None, [1.0], np.zeros((1, 4, 192)), np.zeros((1, 4, 192), np.int32)])
def test_what_is_no_bfloat16_is_told_before_anything_is_sent(client: Any, q: Any) -> None:
    slot = client.open([])
    with pytest.raises(ProtocolError, match="q is"):
        client.attend(0, seats(client, [(slot, 0)]), q, np.zeros((1, 576), np.uint16))


def test_a_refusal_names_the_row(running: Running, client: Any) -> None:
    one, two = client.open([]), client.open([])
    q, latent = random_rows(running.engine, 2, 3)
    with pytest.raises(RequestRejected, match="row 1 of 2") as refusal:
        client.attend(0, seats(client, [(one, 0), (two, 1)]), q, latent)
    assert refusal.value.code == "position_conflict"
    assert refusal.value.detail["row"] == 1
    assert client.attend(0, seats(client, [(one, 0), (two, 0)]), q, latent).shape == (2, 4, 128)


def test_a_slot_of_another_session_is_not_there(
    running: Running, connect: Connect, client: Any
) -> None:
    with connect(running.endpoint) as other:
        slot = other.open([])
        with pytest.raises(RequestRejected) as refusal:
            client.attend(0, seats(client, [(slot, 0)]), *random_rows(running.engine, 1, 0))
        assert refusal.value.code == "epoch_gone"


def test_the_same_request_in_flight_is_answered_twice_and_another_is_busy(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        opened = peer.hello().open([])
        q, latent = random_rows(running.engine, 1, 0)
        fields = {"layer": 1, "rows": [[opened["slot"], opened["epoch"], 0]],
                  "q": {"raw": 0}, "latent": {"raw": 1}}  # fmt: skip
        assert peer.ask("attend", [q, latent], **{**fields, "layer": 0})["context_len"] == [0]
        for _ in range(3):
            peer.send("attend", [q, latent], **fields)
        replies = [peer.receive() for _ in range(3)]
        assert [header["status"] for header, _ in replies] == ["ok"] * 3
        assert all(np.array_equal(raw[0], replies[0][1][0]) for _, raw in replies)
        assert [header["context_len"] for header, _ in replies] == [[1]] * 3
        other = peer.ask("attend", [q, latent + 1], **fields)
        assert other["status"] == "position_conflict"


def test_fields_of_other_kinds_are_refused(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        opened = peer.hello().open([])
        q, latent = random_rows(running.engine, 1, 0)
        seat = [opened["slot"], opened["epoch"], 0]
        fields = {"layer": 0, "rows": [seat], "q": {"raw": 0}, "latent": {"raw": 1}}
        changes: tuple[dict[str, Any], ...] = (
            {"rows": [seat[:2]]}, {"rows": [[*seat[:2], -1]]}, {"rows": [[1.5, 2, 3]]},
            {"rows": []}, {"rows": "x"}, {"layer": -1}, {"q": 1}, {"latent": {"raw": 9}},
        )  # fmt: skip
        for change in changes:
            assert peer.ask("attend", [q, latent], **{**fields, **change})["status"] == "invalid"
        request_id = peer.send("attend", [q, latent], **fields)
        header, raw = peer.receive()
        assert (header["id"], header["status"]) == (request_id, "ok")
        assert raw[0].shape == (1, 4, 128)


def test_a_result_that_no_frame_holds_is_refused(endpoint: str) -> None:
    with serving(endpoint, max_frame_bytes=4096) as running, Peer(endpoint) as peer:
        opened = peer.hello().open([])
        rows = [[opened["slot"], opened["epoch"], pos] for pos in range(5)]
        q = np.zeros((1, 4, 192), np.uint16)
        latent = random_rows(running.engine, 1, 0)[1]
        reply = peer.ask("attend", [q, latent], layer=0, rows=rows, q={"raw": 0}, latent={"raw": 1})
        assert reply["status"] == "too_large"


def test_a_daemon_of_attention_alone_says_so(endpoint: str, connect: Connect) -> None:
    engine = FakeEngine(attend_only=True)
    with serving(endpoint, engine), connect(endpoint) as client:
        assert client.info.attend_only
        assert "attend" in client.info.features
        assert "verify" not in client.info.features
        slot = client.open([])
        for ask, given in ((client.open, [1, 2]), (slot.step, 5)):
            with pytest.raises(RequestRejected) as refusal:
                ask(given)
            assert refusal.value.code == "unsupported"
        o = client.attend(0, seats(client, [(slot, 0)]), *random_rows(engine, 1, 0))
        assert o.shape == (1, 4, 128)


def test_a_draining_daemon_takes_no_attention(running: Running, client: Any) -> None:
    slot = client.open([])
    running.server._work.is_draining = True
    with pytest.raises(RequestRejected) as refusal:
        client.attend(0, seats(client, [(slot, 0)]), *random_rows(running.engine, 1, 0))
    assert refusal.value.code == "draining"
