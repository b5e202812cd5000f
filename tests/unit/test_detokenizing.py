"""Text as it comes: whole characters, and stop strings across the borders of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentd_client._detokenizing import Detokenizer, StopStrings
from latentd_client._text_reader import TextReader
from latentd_client.codecs import ByteCodec
from latentd_client.errors import TextError

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXTS = st.text(st.sampled_from("aé€😀\ufffd \n"), max_size=20)
BYTES = st.binary(max_size=20) | st.lists(
    st.sampled_from(b"a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff"), max_size=20
).map(bytes)


class Grouped:
    """A codec whose tokens are runs of bytes."""

    def __init__(self, runs: Sequence[bytes]) -> None:
        self._runs = runs
        self.vocab_size = len(runs)

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self._runs[token] for token in tokens).decode(errors="replace")


def told(detokenizer: Detokenizer, tokens: Sequence[int]) -> str:
    """All pieces together; none of them has half a character."""
    pieces = [detokenizer.push(token) for token in tokens]
    return "".join(pieces) + detokenizer.finish()


@given(BYTES | TEXTS.map(str.encode))
def test_bytes_one_by_one_give_the_text_of_all_of_them(data: bytes) -> None:
    assert told(Detokenizer(ByteCodec()), list(data)) == data.decode(errors="replace")


@given(TEXTS.map(str.encode), st.lists(st.integers(1, 5), min_size=40, max_size=40))
def test_characters_split_over_tokens_are_told_whole(data: bytes, sizes: list[int]) -> None:
    runs, at = [], 0
    for size in sizes:
        runs.append(data[at : at + size])
        at += size
    text = data[:at].decode(errors="replace")
    assert told(Detokenizer(Grouped(runs)), range(len(runs))) == text


@given(TEXTS, TEXTS)
def test_a_context_gives_no_text_of_its_own(context: str, text: str) -> None:
    detokenizer = Detokenizer(ByteCodec(), list(context.encode()))
    given_back = context[len(context.rstrip("\ufffd")) :]  # it may have been half a character
    assert told(detokenizer, list(text.encode())) == given_back + text


def test_a_character_waits_for_its_last_byte() -> None:
    detokenizer = Detokenizer(ByteCodec())
    assert [detokenizer.push(byte) for byte in "a€".encode()] == ["a", "", "", "€"]


def test_bytes_that_become_no_character_are_not_waited_for() -> None:
    detokenizer = Detokenizer(ByteCodec())
    pieces = [detokenizer.push(byte) for byte in b"\xff" * 200]
    assert pieces.count("") < 80
    assert "".join(pieces) + detokenizer.finish() == "\ufffd" * 200


def test_a_long_text_is_not_decoded_again_for_each_token() -> None:
    codec = ByteCodec()
    longest = 0
    decode = codec.decode

    def watched(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    codec.decode = watched  # type: ignore[method-assign]
    text = "The cat … é, or was it two? … sat 😀 there. " * 50
    assert told(Detokenizer(codec), list(text.encode())) == text
    assert longest < 12


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("stop", "before", "found"),
    [
        (["##"], "ab#c", "##"),
        (["c##", "##d"], "ab#", "c##"),
        (["zzz"], "ab#c##d#e", None),
        (["d#e", "##d"], "ab#c", "##d"),
        (["ab#c##d#e"], "", "ab#c##d#e"),
        (["#e"], "ab#c##d", "#e"),
        (["b#c", "b"], "a", "b"),  # whichever is complete first
    ],
    ids=str,
)
def test_a_stop_string_is_found_however_the_text_is_cut(
    size: int, stop: list[str], before: str, found: str | None
) -> None:
    text, strings, out = "ab#c##d#e", StopStrings(stop), ""
    for at in range(0, len(text), size):
        out += strings.push(text[at : at + size])
        assert text.startswith(out)
    assert (out + strings.finish(), strings.found) == (before, found)


def test_what_may_begin_a_stop_string_waits_until_it_does_not() -> None:
    strings = StopStrings(["\nUser:"])
    pushed = [strings.push(text) for text in ("one\nUs", "age\n", "User", ":")]
    assert pushed == ["one", "\nUsage", "", ""]
    assert strings.found == "\nUser:"


def test_a_stop_string_may_be_kept() -> None:
    strings = StopStrings(["##"], is_kept=True)
    assert strings.push("a#") + strings.push("#b") + strings.push("c") == "a##"


def test_a_stop_token_ends_a_text_and_is_no_part_of_it() -> None:
    reader = TextReader(ByteCodec(), stop_tokens=[0])
    assert "".join(map(reader.push, b"ab\xe2\0")) == "ab\ufffd"
    assert (reader.end, reader.finish(), reader.tokens) == ("stop", "", list(b"ab\xe2\0"))


@pytest.mark.parametrize("stop", [[""], [7], ["a", None]], ids=str)
def test_a_stop_string_that_is_none_is_named(stop: list[object]) -> None:
    with pytest.raises(TextError, match="must be strings that are not empty"):
        TextReader(ByteCodec(), stop)  # type: ignore[arg-type]
