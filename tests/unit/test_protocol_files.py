"""The protocol for other languages: docs/protocol.json and docs/protocol-vectors.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import protocol_files
from fakes import FakeEngine
from latentd_client import fields, protocol
from latentd_client.fields import Field
from serving import Peer
from wire_vectors import SESSION

TABLE = json.loads(protocol_files.TABLE.read_text())
VECTORS = json.loads(protocol_files.VECTORS.read_text())
OK = [
    "hello", "open", "fork", "step", "step", "stream", "credit", "resume", "step", "open",
    "truncate", "cancel", "close", "health", "stats", "trace", "drain",
]  # fmt: skip
"""Operations of the page's requests, in its order, that a daemon of 512 tokens runs."""
REFUSED = [
    ("open", "invalid"),  # another prompt under the key of the first one
    ("verify", "position_conflict"),  # behind a step that the page has further down
    ("attend", "invalid"),  # its layer
    ("export", "position_conflict"),
    ("adopt", "invalid"),  # pages of another geometry,
    ("adopt", "epoch_gone"),
    ("adopt", "epoch_gone"),
    ("step", "invalid"),  # a mask for fewer tokens
]


def unhex(frames: list[str]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in frames]


def read_fields(plain: list[dict[str, Any]]) -> tuple[Field, ...]:
    """The fields as another language reads them from the file."""
    return tuple(
        Field(
            field["name"], field["kind"], field.get("min", 0), field.get("max", fields.MAX_INT),
            field["required"], read_fields(field.get("fields", [])),
        )
        for field in plain
    )  # fmt: skip


def test_the_files_and_the_pages_types_are_what_the_tables_in_the_code_give() -> None:
    for path, text in protocol_files.files().items():
        assert path.read_text() == text, f"{path.name} is stale: run `make protocol`"


def test_the_table_holds_all_that_the_codecs_checks_look_at() -> None:
    assert {op: read_fields(plain) for op, plain in TABLE["data"].items()} == fields.OPS
    assert {op: read_fields(plain) for op, plain in TABLE["control"].items()} == fields.CONTROL_OPS
    assert read_fields(TABLE["step_rows"]) == fields.STEP_ROWS


@pytest.mark.parametrize("message", VECTORS["messages"], ids=lambda message: message["section"])
def test_the_codec_makes_a_message_of_the_bytes_and_the_bytes_of_it(
    message: dict[str, Any],
) -> None:
    frames, header = unhex(message["frames"]), dict(message["header"])
    assert protocol.decode_header(frames[0]) == header
    raw = protocol.decode_raw(header, frames[1:])
    header.pop("raw", None)
    assert [bytes(frame) for frame in protocol.encode(header, raw)] == frames


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Peer]]:
    """Peers without a session, by the socket that they talk to."""
    with protocol_files.talking(str(tmp_path_factory.mktemp("v"))) as peers:
        yield peers


@pytest.mark.parametrize("exchange", VECTORS["exchanges"], ids=lambda exchange: exchange["name"])
def test_a_daemon_answers_the_bytes_with_the_reply(
    strangers: dict[str, Peer], exchange: dict[str, Any]
) -> None:
    peer = strangers[exchange["socket"]]
    assert protocol_files.ask(peer, unhex(exchange["request"])) == exchange["reply"]


def test_a_daemon_reads_the_pages_requests_byte_for_byte(tmp_path: Path) -> None:
    requests = [message for message in VECTORS["messages"] if message["from"] == "client"]
    with protocol_files.talking(str(tmp_path), FakeEngine(vocab_size=512)) as peers:
        session, first_epoch, statuses = SESSION, 1 << 32, []
        for request in requests:
            frames = unhex(request["frames"])
            frames[0] = frames[0].replace(SESSION.encode(), session.encode())
            for slot in (0, 1):
                old, new = ((epoch + slot).to_bytes(8, "big") for epoch in (1 << 32, first_epoch))
                frames[0] = frames[0].replace(old, new)
            peer = peers[request["socket"]]
            peer.socket.send_multipart(frames)
            reply = await_reply(peer, request["header"])
            session = reply.get("session", session)
            first_epoch = reply["epoch"] - reply["slot"] if "epoch" in reply else first_epoch
            statuses.append((request["header"]["op"], reply["status"]))
    assert [op for op, status in statuses if status == "ok"] == OK
    assert [found for found in statuses if found[1] != "ok"] == REFUSED


def await_reply(peer: Peer, header: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request; of a stream the first frame, whose others pass by later."""
    while True:
        reply, _ = peer.receive()
        if reply["id"] == header["id"] and (header["op"] == "stream" or "more" not in reply):
            return reply
