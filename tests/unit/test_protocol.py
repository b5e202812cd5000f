import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentd_client import ProtocolError, RequestRejected, field_checks, fields, protocol
from latentd_client._exchange import Exchange
from latentd_client._request import Call

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), values, max_size=5))
def test_a_header_comes_back_as_it_was(header: dict[str, object]) -> None:
    header.pop("raw", None)
    (frame,) = protocol.encode(header)
    assert repr(protocol.decode_header(bytes(frame))) == repr(header)


@pytest.mark.parametrize("dtype", sorted(protocol.RAW_DTYPES))
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3), (2, 0, 3)], ids=str)
def test_raw_frames_come_back_as_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(protocol.RAW_DTYPES[dtype])
    frames = [bytes(frame) for frame in protocol.encode({"id": 1}, [array, array.T])]
    header = protocol.decode_header(frames[0])
    first, second = protocol.decode_raw(header, frames[1:])
    np.testing.assert_array_equal(first, array)
    np.testing.assert_array_equal(second, array.T)
    assert first.dtype == array.dtype


@given(st.binary(max_size=200))
def test_random_bytes_are_a_header_or_a_protocol_error(frame: bytes) -> None:
    try:
        header = protocol.decode_header(frame)
    except ProtocolError:
        return
    assert type(header) is dict


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb(7),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"a": msgpack.ExtType(5, b"")}),
        msgpack.packb({"a": msgpack.Timestamp(1)}),
        b"\x81\xa1a" + b"\x91" * 100_000,
        b"\x81" * 100_000,
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xa1\xff",
        msgpack.packb({"a": 1}) + b"\x00",
        msgpack.packb({"a": "x" * protocol.MAX_HEADER_BYTES}),
    ],
    ids=[
        "empty", "reserved byte", "list", "int", "int key", "ext", "empty ext", "timestamp",
        "list bomb", "map bomb", "huge map", "huge list", "bad utf-8", "trailing", "too long",
    ],
)  # fmt: skip
def test_a_header_that_is_no_plain_map_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_header(frame)


@pytest.mark.parametrize(
    ("raw", "frames"),
    [
        (None, [b"1234"]),
        ([], [b"1234"]),
        ([{"dtype": "int32", "shape": [1]}], []),
        (7, [b"1234"]),
        ([7], [b"1234"]),
        ([{"shape": [1]}], [b"1234"]),
        ([{"dtype": ["int32"], "shape": [1]}], [b"1234"]),
        ([{"dtype": "object", "shape": [1]}], [b"1234"]),
        ([{"dtype": "int32"}], [b"1234"]),
        ([{"dtype": "int32", "shape": 1}], [b"1234"]),
        ([{"dtype": "int32", "shape": [2]}], [b"1234"]),
        ([{"dtype": "int32", "shape": [-1]}], [b"1234"]),
        ([{"dtype": "int32", "shape": [True]}], [b"1234"]),
        ([{"dtype": "int32", "shape": [1 << 50, 1 << 50]}], [b"1234"]),
        ([{"dtype": "int32", "shape": [1] * 9}], [b"1234"]),
        ([{"dtype": "int32", "shape": [0, 1 << 39, 1 << 39]}], [b""]),
    ],
    ids=str,
)
def test_raw_frames_that_differ_from_their_description_are_refused(
    raw: object, frames: list[bytes]
) -> None:
    with pytest.raises(ProtocolError, match="raw"):
        protocol.decode_raw({"raw": raw} if raw is not None else {}, frames)


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1])
def test_an_int_beyond_the_wire_is_named(value: int) -> None:
    with pytest.raises(ProtocolError, match=str(value)):
        protocol.encode({"pos": value})
    assert protocol.encode({"pos": 1}) == [msgpack.packb({"pos": 1})]  # nothing of it is left


@pytest.mark.parametrize("op", sorted(fields.OPS))
def test_a_missing_field_is_named(op: str) -> None:
    for field in fields.OPS[op]:
        if field.required:
            header = {f.name: good(f) for f in fields.OPS[op] if f.name != field.name}
            with pytest.raises(RequestRejected, match=field.name) as refused:
                field_checks.check(fields.OPS[op], header, op)
            assert refused.value.code == "invalid"


@pytest.mark.parametrize("op", sorted(fields.OPS))
def test_a_field_of_a_wrong_type_is_named(op: str) -> None:
    for field in fields.OPS[op]:
        for wrong in (b"x", [None], float("nan"), -1, 1 << 70):
            header = {f.name: good(f) for f in fields.OPS[op]} | {field.name: wrong}
            with pytest.raises(RequestRejected, match=field.name) as refused:
                field_checks.check(fields.OPS[op], header, op)
            assert refused.value.code == "invalid"


def good(field: fields.Field) -> object:
    """A value that the field takes."""
    lists = {"ints": [1, 1], "list": [{f.name: good(f) for f in field.inner}], "prompt": [1],
             "id lists": [[1]], "seats": [[1, 1, 1]]}  # fmt: skip
    maps = {"map": {f.name: good(f) for f in field.inner if f.required}, "tensor": {"raw": 0}}
    scalars = {"int": 1, "float": 0.5, "bool": True, "str": "x", **maps}
    return (lists | scalars)[field.kind]


def test_replies_to_abandoned_requests_are_skipped() -> None:
    exchange = Exchange()
    late: list[object] = []
    first, _ = exchange.start(Call("open", {}, on_late=late.append))
    second, _ = exchange.start(Call("ping", {}))
    exchange.abandon(first)
    for number in (first.request_id, 99, second.request_id):
        reply = protocol.encode({"v": 1, "id": number, "status": "ok"})
        exchange.receive([bytes(frame) for frame in reply])
    assert (exchange.skipped, len(late), len(second.replies)) == (2, 1, 1)


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=3))
def test_an_unreadable_reply_is_skipped(frames: list[bytes]) -> None:
    exchange = Exchange()
    pending, _ = exchange.start(Call("ping", {}))
    exchange.receive(frames)
    assert not pending.replies


@pytest.mark.parametrize(
    ("data", "control"),
    [
        ("ipc:///run/latentd/latentd.sock", "ipc:///run/latentd/latentd.ctl"),
        ("ipc:///run/a", "ipc:///run/a.ctl"),
        ("tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001"),
    ],
)
def test_the_control_socket_is_beside_the_data_socket(data: str, control: str) -> None:
    assert protocol.control_endpoint(data) == control


@pytest.mark.parametrize("path", ["/" + "a" * 106, "/" + "a" * 101 + ".sock"])
def test_the_control_path_fits_where_the_data_path_does(path: str) -> None:
    control = protocol.control_endpoint("ipc://" + path)
    assert control != "ipc://" + path
    assert len(control) - len("ipc://") <= 107
