"""docs/protocol.md against the code: its frames, operations, fields and codes."""

import re
from typing import Any

import pytest

import protocol_page
from attend_promises import random_rows
from fakes import FakeEngine
from latentd_client import CODES, Client, field_checks, fields, protocol
from serving import Peer, seat, serving

PAGE = protocol_page.PATH.read_text()
EXAMPLES = [(found.header, found.frames) for found in protocol_page.read_examples(PAGE)]


def example(request_id: int) -> dict[str, Any]:
    """The header of the one reply to a request."""
    (header,) = [h for h, _ in EXAMPLES if "status" in h and h["id"] == request_id]
    return header


@pytest.mark.parametrize(("header", "frames"), EXAMPLES, ids=[str(i) for i in range(len(EXAMPLES))])
def test_an_example_is_what_the_code_sends(header: dict[str, Any], frames: list[bytes]) -> None:
    assert protocol.decode_header(frames[0]) == header
    raw = protocol.decode_raw(header, frames[1:])
    bare = {name: value for name, value in header.items() if name != "raw"}
    assert [bytes(frame) for frame in protocol.encode(bare, raw)] == frames


@pytest.mark.parametrize("header", [h for h, _ in EXAMPLES if "op" in h], ids=lambda h: h["op"])
def test_an_example_request_has_the_fields_of_its_operation(header: dict[str, Any]) -> None:
    is_batch = header["op"] == "step" and "rows" in header
    table = fields.STEP_ROWS if is_batch else (fields.CONTROL_OPS | fields.OPS)[header["op"]]
    field_checks.check(table, header, header["op"])
    assert set(header) <= {"v", "id", "op", "raw"} | {field.name for field in table}


def test_the_examples_of_replies_have_the_keys_and_error_texts_of_real_ones(endpoint: str) -> None:
    replies = {h["id"]: set(h) - {"raw"} for h, _ in EXAMPLES if "status" in h and "more" not in h}
    with serving(endpoint) as running, Peer(endpoint) as peer:
        hello = peer.ask("hello", versions=[1, 1])
        peer.session = hello["session"]
        opened = peer.ask("open", key="a", prompt=[1, 2, 3])
        forked = peer.ask("fork", **seat(opened), key="f", sampling={"seed": 8})
        step = peer.ask("step", **seat(opened), logits=True)
        at = {**seat(opened), "pos": 4}
        peer.ask("close", slot=forked["slot"], epoch=forked["epoch"])
        other = {**seat(peer.ask("open", key="b", prompt=[1] * 12)), "pos": 9}
        rows = peer.ask("step", rows=[at, other])
        peer.send("stream", **{**at, "pos": 5}, max_steps=3, credit=9)
        while (last := peer.receive()[0]).get("more"):
            pass
        conflict = peer.ask("step", **{**at, "pos": 5})
        likely = peer.ask("step", **{**at, "pos": 8}, logprobs=2)
        verified = peer.ask("verify", **{**at, "pos": 9}, draft=[1])
        scored = peer.ask("open", key="c", prompt=[1, 2], prompt_logprobs=1)
        peer.send("export", **seat(opened) | {"pos": 10, "first": 0, "count": 1, "tokens": True})
        exported, (pages, checksums, tokens) = peer.receive()
        begin = {name: exported[name] for name in ("geometry", "fingerprint", "token")}
        put = {"first": 0, "pages": {"raw": 0}, "checksums": {"raw": 1}}
        begun = peer.ask("adopt", [tokens], key="d", begin={**begin, "tokens": {"raw": 0}})
        taken = peer.ask("adopt", [pages, checksums], key="d", put=put)
        adopted = peer.ask("adopt", key="d", commit=True)
        cut = peer.ask("truncate", **{**at, "pos": 10}, to=4)
        cancelled = peer.ask("cancel", request=5)
        closed = peer.ask("close", slot=opened["slot"], epoch=opened["epoch"])
        empty = peer.ask("open", key="e", prompt=[])
        peer.send(
            "attend", random_rows(running.engine, 1, 0), layer=0,
            rows=[[empty["slot"], empty["epoch"], 0]], q={"raw": 0}, latent={"raw": 1},
        )  # fmt: skip
        attended, _ = peer.receive()
        with Peer(hello["control"]) as asking:
            told = {41: asking.ask("health"), 42: asking.ask("stats", sessions=True)}
            told |= {43: asking.ask("trace", last=2), 44: asking.ask("drain", drain_s=2.5)}
    real = {1: hello, 2: opened, 3: step, 4: rows, 5: last, 7: conflict, 8: forked}
    real |= {21: likely, 22: scored, 24: verified, 25: cut, 26: cancelled, 27: closed}
    real |= told | {31: exported, 32: begun, 33: taken, 34: adopted, 35: attended}
    assert {number: set(reply) - {"raw"} for number, reply in real.items()} == replies
    assert [reply.get("error") for reply in (*rows["rows"], conflict)] == [
        reply.get("error") for reply in (*example(4)["rows"], example(7))
    ]
    (sizes,) = [h for h, _ in EXAMPLES if "limits" in h]
    assert set(sizes["model"]) == set(hello["model"])
    assert set(sizes["limits"]) == set(hello["limits"])
    assert set(example(42)["stats"]) < set(told[42]["stats"])
    assert set(example(42)["sessions"][0]) == set(told[42]["sessions"][0])
    assert {len(launch) for launch in (*example(43)["steps"], *told[43]["steps"])} == {10}


@pytest.mark.parametrize("op", sorted(fields.OPS | fields.CONTROL_OPS))
def test_every_operation_and_its_fields_are_on_the_page(op: str) -> None:
    assert op in PAGE
    for field in (fields.OPS | fields.CONTROL_OPS)[op]:
        assert f"`{field.name}`" in PAGE or f'"{field.name}"' in PAGE
        for inner in field.inner:
            assert f"`{inner.name}`" in PAGE


def test_every_code_has_its_line_and_no_other() -> None:
    table = PAGE.partition("\n## Codes\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"code"} == CODES


@pytest.mark.parametrize(
    ("code", "tokens"), [("context_full", 10_000), ("too_large", 400), ("no_pages", 200)]
)
def test_the_table_of_codes_names_the_other_fields_of_what_does_not_fit(
    endpoint: str, code: str, tokens: int
) -> None:
    with serving(endpoint, FakeEngine(pages=4)), Peer(endpoint) as peer:
        peer.hello().open()
        refused = peer.open([1] * tokens, key="a")
    assert_its_row_names_its_fields(code, refused)


def test_the_table_of_codes_names_the_other_field_of_a_daemon_without_slots(endpoint: str) -> None:
    with serving(endpoint, FakeEngine(max_slots=1, buckets=(1,))), Peer(endpoint) as peer:
        peer.hello().open()
        assert_its_row_names_its_fields("no_slot", peer.open(key="a"))


def assert_its_row_names_its_fields(code: str, refused: dict[str, Any]) -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {code} |"))
    others = set(refused) - {"v", "id", "status", "error"}
    assert (refused["status"], others) == (code, set(re.findall(r"`(\w+)`", row.split("|")[3])))


@pytest.mark.parametrize("name", sorted(fields.RESERVED_OPS))
def test_what_is_reserved_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE.partition("\n## Reserved\n")[2]


def test_a_client_works_against_the_documented_defaults(endpoint: str) -> None:
    with serving(endpoint), Client(endpoint) as client:
        assert client.info.control == protocol.control_endpoint(endpoint)
    assert protocol.DEFAULT_ENDPOINT in PAGE
    assert protocol.control_endpoint(protocol.DEFAULT_ENDPOINT) in PAGE
