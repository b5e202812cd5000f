"""What docs/ has of the protocol for other languages, and the types in the page's tables:

    python tests/protocol_files.py

writes them from latentd_client.fields, the page's examples and wire_vectors.py (`make protocol`).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import protocol_page
from latentd_client import errors, fields, protocol
from serving import Peer, serving
from wire_vectors import CONTROL_REQUESTS, REQUESTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fakes import FakeEngine
    from latentd_client.fields import Field

TABLE: Final = protocol_page.PATH.with_suffix(".json")
VECTORS: Final = protocol_page.PATH.with_name("protocol-vectors.json")


def table() -> dict[str, Any]:
    """The protocol as plain maps and lists: limits, codes, operations and their fields."""
    return {
        "version": protocol.VERSION,
        "default_endpoint": protocol.DEFAULT_ENDPOINT,
        "limits": {
            "header_bytes": protocol.MAX_HEADER_BYTES,
            "frame_bytes": protocol.MAX_FRAME_BYTES,
            "frames": protocol.MAX_FRAMES,
            "raw_dims": protocol.MAX_DIMS,
            "raw_elements": protocol.MAX_ELEMENTS,
            "stop_sequence_tokens": fields.MAX_SEQUENCE,
        },
        "raw_dtypes": {name: dtype.itemsize for name, dtype in protocol.RAW_DTYPES.items()},
        "codes": sorted(errors.CODES),
        "features": list(fields.FEATURES),
        "reserved_ops": sorted(fields.RESERVED_OPS),
        "data": {op: _fields(inner) for op, inner in fields.OPS.items()},
        "control": {op: _fields(inner) for op, inner in fields.CONTROL_OPS.items()},
        "step_rows": _fields(fields.STEP_ROWS),
    }


def _fields(table: tuple[Field, ...]) -> list[dict[str, Any]]:
    return [_field(field) for field in table]


def _field(field: Field) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": field.name, "kind": field.kind, "required": field.required}
    if field.kind not in ("bool", "map", "tensor"):
        plain |= {"min": field.low, "max": field.high}
    return plain | ({"fields": _fields(field.inner)} if field.inner else {})


def vectors() -> dict[str, Any]:
    """Messages in bytes: the page's examples, and requests with the replies that they get."""
    examples = protocol_page.read_examples(protocol_page.PATH.read_text())
    with tempfile.TemporaryDirectory(prefix="latentd-") as folder, talking(folder) as peers:
        exchanges = [
            {
                "name": name,
                "socket": socket,
                "request": [frame.hex() for frame in frames],
                "reply": ask(peers[socket], frames),
            }
            for socket, requests in {"data": REQUESTS, "control": CONTROL_REQUESTS}.items()
            for name, frames in requests.items()
        ]
    return {
        "version": protocol.VERSION,
        "messages": [
            {
                "section": example.section,
                "socket": "control" if "control socket" in example.section else "data",
                "from": "client" if "op" in example.header else "daemon",
                "header": example.header,
                "frames": [frame.hex() for frame in example.frames],
            }
            for example in examples
        ],
        "exchanges": exchanges,
    }


@contextlib.contextmanager
def talking(folder: str, engine: FakeEngine | None = None) -> Iterator[dict[str, Peer]]:
    """A daemon in `folder`, and peers without a session at its data and its control socket."""
    endpoint = f"ipc://{folder}/d.sock"
    control = protocol.control_endpoint(endpoint)
    with serving(endpoint, engine), Peer(endpoint) as data, Peer(control) as other:
        yield {"data": data, "control": other}


def ask(peer: Peer, frames: list[bytes]) -> dict[str, Any]:
    """The reply to a request in bytes, without the text for people that comes with a code."""
    peer.socket.send_multipart(frames)
    reply, _ = peer.receive()
    assert ("error" in reply) == (reply["status"] != "ok")
    return {name: value for name, value in reply.items() if name != "error"}


def lines(plain: dict[str, Any]) -> str:
    """JSON in which a change of one entry is a change of one line."""
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {_entry(v)}" for k, v in plain.items()) + "\n}\n"


def _entry(value: Any) -> str:
    if isinstance(value, dict):
        inner = (f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
        return "{\n" + ",\n".join(inner) + "\n}"
    if isinstance(value, list):
        return "[\n" + ",\n".join("  " + json.dumps(item) for item in value) + "\n]"
    return json.dumps(value)


def files() -> dict[Path, str]:
    """What this module writes, by path."""
    page = protocol_page.with_types(protocol_page.PATH.read_text())
    return {protocol_page.PATH: page, TABLE: lines(table()), VECTORS: lines(vectors())}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
