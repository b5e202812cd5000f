"""The text helpers of both clients, over the fake engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from fakes import FakeEngine
from latentd_client import AsyncClient, Client, RequestRejected, Sampling, text
from latentd_client.errors import TextError
from lives import Lives, continued
from serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from latentd_client._detokenizing import Codec
    from serving import Running

PROMPT = "Three €"
HOT = Sampling(temperature=1.0, seed=9)


class Plain:
    """`generate` and the pieces of `stream_text` on a new slot, of the blocking client."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        self.client = Client(endpoint, **options)

    def generate(self, *args: Any, **options: Any) -> text.Generated:
        return text.generate(self.client, *args, **options)

    def pieces(self, most: int | None, *args: Any, **options: Any) -> tuple[list[str], int]:
        """Up to `most` pieces, and the token of a step behind them."""
        with self.client.open(list(PROMPT.encode())) as slot:
            found = []
            for piece in text.stream_text(slot, *args, **options):
                found.append(piece)
                if len(found) == most:
                    break
            return found, slot.step().token

    def close(self) -> None:
        self.client.close()


class Awaited:
    """The same of the asyncio client."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self.client = AsyncClient(endpoint, **options)
        self._runner.run(self.client.connect())

    def generate(self, *args: Any, **options: Any) -> text.Generated:
        return self._runner.run(text.agenerate(self.client, *args, **options))

    def pieces(self, most: int | None, *args: Any, **options: Any) -> tuple[list[str], int]:
        async def read() -> tuple[list[str], int]:
            async with await self.client.open(list(PROMPT.encode())) as slot:
                found = []
                async for piece in text.astream_text(slot, *args, **options):
                    found.append(piece)
                    if len(found) == most:
                        break
                return found, (await slot.step()).token

        return self._runner.run(read())

    def close(self) -> None:
        self._runner.run(self.client.close())
        self._runner.close()


@pytest.fixture(params=[Plain, Awaited], ids=["client", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes one of the two."""
    made = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(request.param(*args, **options))
        return made[-1]

    yield make
    for helper in made:
        helper.close()


@pytest.fixture
def helper(running: Running, make: Callable[..., Any]) -> Any:
    return make(running.endpoint)


def tokens(count: int, seed: int = 0) -> list[int]:
    return continued(list(PROMPT.encode()), count, seed)


def decoded(count: int, seed: int = 0) -> str:
    return bytes(tokens(count, seed)).decode(errors="replace")


def test_a_text_is_that_of_the_tokens_of_plain_steps(helper: Any) -> None:
    assert helper.generate(PROMPT, 40) == (decoded(40), tokens(40), "max_steps")
    seed = HOT.seed or 0
    hot = helper.generate(PROMPT.encode(), 40, sampling=HOT)
    assert hot == (decoded(40, seed), tokens(40, seed), "max_steps")
    assert helper.generate(PROMPT, 40, draft="ngram").text == decoded(40)
    assert helper.generate(PROMPT, 1).tokens == tokens(1)


def test_pieces_are_those_of_the_text_and_the_slot_goes_on_behind_them(helper: Any) -> None:
    pieces, behind = helper.pieces(None, 40)
    assert "".join(pieces) == decoded(40)
    assert all(pieces)
    assert behind == tokens(41)[40]


def test_a_slot_goes_on_without_the_token_that_was_told(helper: Any) -> None:
    pieces, _ = helper.pieces(None, 39, is_new=False)
    assert "".join(pieces) == bytes(tokens(40)[1:]).decode(errors="replace")


def test_a_loop_that_is_left_early_leaves_the_slot_at_its_last_step(helper: Any) -> None:
    pieces, behind = helper.pieces(5, 200)
    told = len("".join(pieces))
    assert "".join(pieces) == decoded(200)[:told]
    assert behind in tokens(20)


def test_a_stop_string_over_several_tokens_ends_a_text_and_the_stream(helper: Any) -> None:
    whole = decoded(60)
    stop = whole[20:24]
    assert whole.find(stop) == 20
    for options, expected in (({}, whole[:20]), ({"keep_stop": True}, whole[:24])):
        found = helper.generate(PROMPT, 60, stop=["never in there", stop], **options)
        assert (found.text, found.end) == (expected, "stop")
        assert len(found.tokens) < 60
    pieces, behind = helper.pieces(None, 60, stop=stop)
    assert "".join(pieces) == whole[:20]
    assert behind == tokens(61)[len(found.tokens)]


def test_the_models_end_tokens_end_a_text_unless_others_are_given(helper: Any) -> None:
    plain = tokens(400)
    eos = plain.index(0)  # that of the fake model
    found = helper.generate(PROMPT, 400)
    assert (found.tokens, found.end) == (plain[: eos + 1], "stop")
    assert found.text == bytes(plain[:eos]).decode(errors="replace")
    assert helper.generate(PROMPT, 400, stop_tokens=[]).tokens == plain
    assert helper.generate(PROMPT, 400, stop_tokens=plain[:1]).tokens == plain[:1]


def test_a_text_that_fills_the_context_says_so(endpoint: str, make: Callable[..., Any]) -> None:
    with serving(endpoint, FakeEngine(max_ctx=100)):
        helper = make(endpoint)
        found = helper.generate(PROMPT, 500, stop_tokens=[])
        room = 100 - len(PROMPT.encode()) + 1
        assert (found.tokens, found.end) == (tokens(room), "context_full")


def test_a_prompt_without_tokens_is_refused(helper: Any) -> None:
    prompts: list[Any] = ["", []]
    for prompt in prompts:
        with pytest.raises(TextError, match="the prompt is empty"):
            helper.generate(prompt, 5)


def test_a_refusal_is_that_of_the_client(helper: Any) -> None:
    with pytest.raises(RequestRejected, match="999") as refused:
        helper.generate([5, 999], 5)
    assert refused.value.code == "invalid"


def test_a_model_without_bytes_wants_a_tokenizer(endpoint: str, make: Callable[..., Any]) -> None:
    with serving(endpoint, FakeEngine(vocab_size=1000)):
        helper = make(endpoint)
        with pytest.raises(TextError, match="'fake' has 1000 tokens, not bytes: give the path"):
            helper.generate(PROMPT, 5)
        with pytest.raises(TextError, match="ids up to 1999, 'fake' has 1000 tokens"):
            helper.generate(PROMPT, 5, text.ByteCodec(2000))


def test_a_checkpoints_tokenizer_gives_the_text_of_its_tokens(
    endpoint: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    from tokenizing import byte_level

    byte_level().save(str(tmp_path / "tokenizer.json"))
    with serving(endpoint, FakeEngine(vocab_size=320)):
        helper = make(endpoint)
        codec: Codec = text.load_codec(helper.client.info, tmp_path)
        found = helper.generate("The quick", 60, codec, stop_tokens=[])
        plain = helper.generate(codec.encode("The quick"), 60, codec, stop_tokens=[])
        assert found == plain
        assert found.text == codec.decode(found.tokens)
        assert "\ufffd" not in codec.decode(codec.encode("The quick"))


def test_another_file_than_that_of_the_checkpoint_is_refused_by_its_hash(
    endpoint: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers")
    from tokenizing import byte_level

    byte_level().save(str(tmp_path / "tokenizer.json"))
    sha256 = text.JsonCodec(tmp_path).sha256
    with serving(endpoint, FakeEngine(vocab_size=320, tokenizer=sha256)):
        helper = make(endpoint)
        assert helper.client.info.tokenizer == sha256
        codec = text.load_codec(helper.client.info, tmp_path)
        (tmp_path / "tokenizer.json").write_text(
            (tmp_path / "tokenizer.json").read_text().replace("<bos>", "<bes>")
        )
        with pytest.raises(
            TextError, match=rf"not the tokenizer\.json of 'fake'.*, not {sha256[:12]}"
        ):
            text.load_codec(helper.client.info, tmp_path)
        assert helper.generate("The", 5, text.JsonCodec(tmp_path)) == helper.generate(
            "The", 5, codec
        )


def test_a_text_goes_on_in_the_next_life_of_its_daemon(
    endpoint: str, make: Callable[..., Any]
) -> None:
    with Lives(endpoint) as lives:
        helper = make(endpoint, reopen=True, timeout_s=20.0)
        helper.client.info  # noqa: B018 - it has connected
        lives.restart()
        assert helper.generate(PROMPT, 60, stop_tokens=[]).text == decoded(60)
