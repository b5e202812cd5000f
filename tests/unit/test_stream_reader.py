import pytest

from fakes import FakeEngine
from latentd_client import Client, ConnectionLost
from latentd_client._request import Call, Reply
from latentd_client._stream import StreamReader
from serving import serving

CALL = Call("stream", {})


def reply(pos: int, tokens: list[int]) -> Reply:
    """A frame of a running stream."""
    header = {"status": "ok", "pos": pos, "tokens": tokens, "more": True}
    header |= {"logprobs": [-1.0] * len(tokens), "context_len": pos + len(tokens) - 1}
    return Reply(header, [])


def test_frames_that_follow_each_other_are_taken() -> None:
    reader = StreamReader(8, CALL)
    reader.take(reply(5, [1, 2]))
    reader.take(reply(7, []))
    reader.take(reply(7, [3]))
    assert [(step.token, step.context_len) for step in reader.ready] == [(1, 5), (2, 6), (3, 7)]


def test_a_gap_in_a_stream_is_no_shorter_text() -> None:
    reader = StreamReader(8, CALL)
    reader.take(reply(5, [1]))
    with pytest.raises(ConnectionLost, match="at length 7 after 6"):
        reader.take(reply(7, [3]))
    assert [step.token for step in reader.ready] == [1]


def test_a_slot_goes_on_from_the_last_token_before_a_gap(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(endpoint, FakeEngine()), Client(endpoint) as client:
        other = client.open([1, 2, 3])
        expected = [other.step().token for _ in range(6)]
        slot = client.open([1, 2, 3])
        stream = slot.stream(20, credit=2)
        tokens = [next(stream).token, next(stream).token]
        take = StreamReader.take
        monkeypatch.setattr(
            StreamReader, "take",
            lambda reader, frame: take(reader, reply(frame.header["pos"] + 1, [7])),
        )  # fmt: skip
        with pytest.raises(ConnectionLost, match="a frame was lost"):
            tokens += [step.token for step in stream]
        monkeypatch.undo()
        while len(tokens) < 6:
            tokens.append(slot.step().token)
        assert tokens == expected
