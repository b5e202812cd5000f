"""The tokenizers of checkpoints: true ones of the package, made here."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from latentd_client import DaemonInfo
from latentd_client._detokenizing import Detokenizer
from latentd_client.codecs import ByteCodec, JsonCodec, load_codec
from latentd_client.errors import TextError
from tokenizing import TEXT, byte_fallback, byte_level

if TYPE_CHECKING:
    from collections.abc import Callable

tokenizers = pytest.importorskip("tokenizers")

INFO = DaemonInfo(
    model="m", fingerprint="f", vocab_size=100_000, eos_token_ids=(), layers=1, heads=1, nope_dim=1,
    v_dim=1, max_ctx=1, max_slots=1, buckets=(1,), page_size=64, numerics="f32", dtype="bfloat16",
    device="cpu", version=1, boot_id="b", lease_s=1.0, control="c", max_frame_bytes=1, max_frames=1,
    credits=1, features=(),
)  # fmt: skip


@pytest.fixture(params=[byte_level, byte_fallback], ids=lambda make: make.__name__)
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> JsonCodec:
    make: Callable[[], Any] = request.param
    make().save(str(tmp_path / "tokenizer.json"))
    return JsonCodec(tmp_path)


def told(codec: JsonCodec, tokens: list[int], context: list[int]) -> str:
    detokenizer = Detokenizer(codec, context)
    pieces = [detokenizer.push(token) for token in tokens]
    assert not any("\ufffd" in piece for piece in pieces)
    return "".join(pieces) + detokenizer.finish()


def test_a_text_comes_back_piece_by_piece_as_it_was(codec: JsonCodec) -> None:
    tokens = codec.encode(TEXT)
    assert codec.decode(tokens) == TEXT
    for cut in range(1, len(tokens)):
        before = codec.decode(tokens[:cut]).rstrip("\ufffd")
        assert before + told(codec, tokens[cut:], tokens[:cut]) == TEXT


def test_words_behind_a_special_token_keep_their_spaces(codec: JsonCodec) -> None:
    one, two = codec.encode("The fox"), codec.encode(" a fox")
    ids = [*one, 1, 1, *two] if codec.decode([1]) == "" else [*one, 0, 0, *two]
    assert told(codec, ids, []) == codec.decode(ids)


def test_random_tokens_never_give_broken_text(codec: JsonCodec) -> None:
    draw = random.Random(1)
    for _ in range(300):
        tokens = [draw.randrange(codec.vocab_size) for _ in range(draw.randrange(1, 30))]
        detokenizer = Detokenizer(codec)
        text = "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
        assert text.encode()  # no half of a surrogate
        if codec.decode(tokens).count("\ufffd") == 0:
            assert text == codec.decode(tokens)


def test_a_prompt_begins_as_its_tokenizer_says(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = load_codec(INFO, tmp_path / "tokenizer.json")
    assert codec.encode("The fox")[0] == 0
    assert codec.decode(codec.encode("The fox")) == "The fox"


def test_a_tokenizer_of_another_model_is_refused_with_numbers(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    size = JsonCodec(tmp_path).vocab_size
    with pytest.raises(TextError, match=rf"ids up to {size - 1}, 'm' has {size - 1} tokens"):
        load_codec(replace(INFO, vocab_size=size - 1), tmp_path)
    assert load_codec(replace(INFO, vocab_size=size), tmp_path).vocab_size == size


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        TextError, match=r"cannot read .*tokenizer\.json: No such file.*or none for"
    ):
        load_codec(INFO, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextError, match=r"tokenizer\.json is no tokenizer\.json: "):
        load_codec(INFO, tmp_path)


def test_bytes_are_taken_for_byte_level_models_only() -> None:
    assert isinstance(load_codec(replace(INFO, vocab_size=259)), ByteCodec)
    with pytest.raises(TextError, match="100000 tokens, not bytes: give the path"):
        load_codec(INFO)


def test_without_the_package_bytes_still_work_and_a_file_says_what_is_missing(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    script = f"""
import sys
sys.modules["tokenizers"] = None  # as if it was not there
from latentd_client.text import ByteCodec, JsonCodec
assert ByteCodec().decode(ByteCodec().encode("é")) == "é"
try:
    JsonCodec({str(tmp_path)!r})
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.startswith("TextError tokenizer.json takes the package tokenizers: pip inst")
