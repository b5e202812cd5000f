"""The wire format, version 1: one msgpack map as header, then raw tensor frames.

It owns bytes and limits and knows no sockets and no operations (those are in `fields`). It is the
only module that imports msgpack. Nothing is ever unpickled, extension types are refused.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgpack
import numpy as np

from latentd_client.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

VERSION: Final = 1
"""The protocol version this package speaks."""
DEFAULT_ENDPOINT: Final = "ipc:///run/latentd/latentd.sock"
"""Where daemon and clients meet when nothing else is said."""
MAX_HEADER_BYTES: Final = 1 << 20
"""Longest header: a prompt beyond about 200,000 token ids has to travel as a raw frame."""
MAX_FRAME_BYTES: Final = 16 << 20
"""Longest single frame unless the daemon says otherwise in `hello`."""
MAX_FRAMES: Final = 16
"""Most frames of one request, header included, unless the daemon says otherwise in `hello`."""
MAX_DIMS: Final = 8
"""Most dimensions of a raw frame."""
MAX_ELEMENTS: Final = 1 << 40
"""Largest product of a raw frame's dimensions."""
MAX_PORT: Final = 65535
RAW_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
    "uint8": np.dtype("u1"),
    "uint32": np.dtype("<u4"),
    "bfloat16": np.dtype("<u2"),  # numpy has none: its bits
}
"""What a raw frame may hold, little-endian."""

Header: TypeAlias = dict[str, Any]
Tensor: TypeAlias = (
    "NDArray[np.int32] | NDArray[np.float32] | NDArray[np.uint8 | np.uint16 | np.uint32]"
)


def encode(header: Mapping[str, Any], raw: Sequence[Tensor] = ()) -> list[bytes | memoryview]:
    """The frames of a message. `raw` arrays are described in the header and follow it; a
    C-contiguous one is not copied, so leave it alone until it is sent.

    Raises ProtocolError for a value that msgpack cannot hold and for another dtype.
    """
    if raw:
        header = {**header, "raw": [{"dtype": _name(a.dtype), "shape": a.shape} for a in raw]}
    try:
        frames: list[bytes | memoryview] = [_packers.pack(header)]
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"the header cannot be packed: {error}") from None
    for array in raw:
        if array.dtype not in RAW_DTYPES.values():
            raise ProtocolError(f"raw dtype {array.dtype}: the wire has {', '.join(RAW_DTYPES)}")
        frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return frames


def _name(dtype: np.dtype[Any]) -> str:
    """What the wire calls a dtype."""
    return "bfloat16" if dtype == np.uint16 else dtype.name


def _plain(value: object) -> object:
    """Numpy scalars as Python numbers; everything else has no place on the wire."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):
        raise OverflowError(f"{value} is out of range, must be -2^63 to 2^64 - 1")
    raise TypeError(f"{type(value).__name__} is not a wire type")


class _Packers(threading.local):
    """A packer for each thread: making one costs more than a header."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(default=_plain).pack


_packers = _Packers()


def decode_header(frame: bytes) -> Header:
    """The header's map. Raises ProtocolError for anything but one map with text keys, for
    extension types, deep nesting and a header over MAX_HEADER_BYTES."""
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"header of {len(frame)} bytes: at most {MAX_HEADER_BYTES}; send tensors as raw frames"
        )
    try:
        header = msgpack.unpackb(
            frame, ext_hook=_refuse_ext, max_ext_len=0, max_map_len=4096, max_array_len=1 << 18
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise ProtocolError(f"the header is not a msgpack message: {text[:200]}") from None
    if type(header) is not dict:
        raise ProtocolError(f"the header is a {type(header).__name__}, not a map")
    return header


def _refuse_ext(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code}")


def decode_raw(header: Header, frames: Sequence[bytes]) -> list[Tensor]:
    """The raw frames as read-only arrays, after the header's `raw` list.

    Raises ProtocolError when description and frames differ in number or size.
    """
    descriptions = header.get("raw", ())
    if not frames and not descriptions:
        return []
    if not isinstance(descriptions, (list, tuple)) or len(descriptions) != len(frames):
        raise ProtocolError(f"field raw must be a list that describes all {len(frames)} raw frames")
    return [_array(i, *pair) for i, pair in enumerate(zip(descriptions, frames, strict=True))]


def _array(index: int, description: object, frame: bytes) -> Tensor:
    if not isinstance(description, dict):
        raise ProtocolError(f"raw[{index}] must be a map of dtype and shape")
    name, shape = description.get("dtype"), description.get("shape")
    dtype = RAW_DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ProtocolError(f"raw[{index}].dtype must be one of {', '.join(RAW_DTYPES)}")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMS
        or not all(type(n) is int and n >= 0 for n in shape)
        or math.prod(n or 1 for n in shape) > MAX_ELEMENTS  # numpy minds beside a 0 too
    ):
        raise ProtocolError(
            f"raw[{index}].shape must be a list of at most {MAX_DIMS} sizes, whose product without "
            f"zeros is at most {MAX_ELEMENTS}"
        )
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(frame):
        raise ProtocolError(
            f"raw[{index}] has {len(frame)} bytes, but {name} {shape} takes {expected}"
        )
    return np.frombuffer(frame, dtype).reshape(shape)


def pick_raw(value: object, raw: Sequence[Tensor]) -> Tensor | None:
    """The raw frame that a field's value `{"raw": index}` names, or with `row` beside it that row
    of the frame; None when it names none."""
    if not isinstance(value, dict):
        return None
    index, row = value.get("raw"), value.get("row")
    tensor = raw[index] if type(index) is int and 0 <= index < len(raw) else None
    if tensor is None or row is None:
        return tensor
    return tensor[row] if type(row) is int and tensor.ndim and 0 <= row < len(tensor) else None


def has_port(endpoint: str) -> bool:
    """Whether a tcp endpoint ends with a port or `*`; others need none. libzmq does not look: it
    takes 99999 for 34463."""
    port = endpoint.rpartition(":")[2]
    return not endpoint.startswith("tcp://") or port == "*" or is_port(port)


def is_port(text: str) -> bool:
    """Whether a text is a port of 0 to MAX_PORT."""
    return text.isascii() and text.isdigit() and len(text) < 6 and int(text) <= MAX_PORT


def as_seen_from(data: str, control: str) -> str:
    """A control endpoint that a daemon tells, for a client that has reached its data endpoint: a
    daemon that listens at all addresses names none."""
    for nowhere in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if control.startswith(nowhere) and data.startswith("tcp://"):
            return f"{data.rpartition(':')[0]}:{control[len(nowhere) :]}"
    return control


def control_endpoint(endpoint: str) -> str:
    """Where the control socket is when nobody says otherwise: beside the data socket, with .ctl
    for .sock (never a longer path, the system allows 107 bytes), or the next tcp port: `*` where
    the system chooses, or none is next. What is no endpoint stays what it is."""
    if endpoint.startswith("tcp://"):
        address, _, port = endpoint.rpartition(":")
        if not is_port(port):
            return endpoint
        return f"{address}:{int(port) + 1 if 0 < int(port) < MAX_PORT else '*'}"
    stem = endpoint.removesuffix(".sock")
    return (stem if stem != endpoint or len(endpoint) <= 6 + 103 else endpoint[:-4]) + ".ctl"
