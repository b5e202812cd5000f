"""The process latentd-openai: who may ask, and what becomes of it when the daemon goes."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from doors import door_before, openai_client  # noqa: E402
from fakes import FakeEngine  # noqa: E402
from latentd_client.codecs import JsonCodec  # noqa: E402
from lives import Lives  # noqa: E402
from processes import latentd_openai  # noqa: E402
from serving import serving  # noqa: E402
from tokenizing import byte_fallback, byte_level  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_stream_that_the_daemon_ends_tells_why_in_its_last_event(endpoint: str) -> None:
    with (
        serving(endpoint, FakeEngine(max_ctx=300, pages=3)),
        door_before(endpoint) as url,
        openai_client(url) as client,
    ):
        chunks = client.completions.create(
            model="fake", prompt="a" * 60, max_tokens=200, n=2, stream=True, temperature=0
        )
        next(chunks)
        with pytest.raises(openai.APIError, match="no_pages"):
            list(chunks)


def test_with_a_key_file_only_its_key_is_served(endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    with serving(endpoint), door_before(endpoint, "--api-key-file", str(file)) as url:
        with openai_client(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert health(url) == 200
        with openai_client(url, "secret") as client:
            assert [model.id for model in client.models.list()] == ["fake"]


def test_a_door_open_to_other_machines_needs_a_key() -> None:
    done = latentd_openai("--host", "0.0.0.0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--api-key-file" in done.stderr


@pytest.mark.parametrize(
    ("flag", "text", "told"),
    [
        ("--port", "65536", "not a port of 0 to 65535"),
        ("--port", "-1", "not a port"),
        ("--timeout-s", "nan", "not a number of seconds above 0"),
        ("--timeout-s", "soon", "not a number of seconds"),
    ],
)
def test_a_flag_that_cannot_be_ends_it_for_good(flag: str, text: str, told: str) -> None:
    done = latentd_openai(f"{flag}={text}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{flag}: {text!r} is {told}" in done.stderr


def test_without_a_daemon_it_says_so_and_ends(endpoint: str) -> None:
    done = latentd_openai("--endpoint", endpoint, "--port", "0")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_it_goes_on_with_the_next_daemon_and_with_another_model(endpoint: str) -> None:
    with Lives(endpoint) as lives, door_before(endpoint) as url, openai_client(url) as client:
        asked: Any = {"model": "fake", "prompt": "a", "temperature": 0, "max_tokens": 5}
        text = client.completions.create(**asked).choices[0].text
        lives.restart()
        assert client.completions.create(**asked).choices[0].text == text
        lives.restart(FakeEngine(fingerprint="another", vocab_size=300))
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**asked)
        assert caught.value.status_code == 503
        assert client.completions.create(**asked).system_fingerprint == "fp_another"


def test_its_health_is_that_of_the_daemon(endpoint: str) -> None:
    with Lives(endpoint) as lives, door_before(endpoint) as url:
        assert health(url) == 200
        lives.end()
        assert health(url) == 503
        lives.begin()
        assert health(url) == 200


def health(url: str) -> int:
    """The status that a balancer sees, who has no key."""
    try:
        with urllib.request.urlopen(url.replace("/v1", "/health"), timeout=60) as reply:
            status: int = reply.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_tokenizer_that_does_not_fit_ends_it_with_one_line(endpoint: str, tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with serving(endpoint, FakeEngine(vocab_size=100)):
        done = latentd_openai("--endpoint", endpoint, "--tokenizer", str(tmp_path), "--port", "0")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "another model's" in done.stderr


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_any_tokenizer_s_text_is_the_same_whole_and_streamed_with_all_its_tokens(
    endpoint: str, tmp_path: Path, make: Callable[[], Any]
) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    codec = JsonCodec(tmp_path)
    prompt = "The quick fox – 狐狸. "  # noqa: RUF001
    asked: dict[str, Any] = {
        "model": "fake", "prompt": prompt, "max_tokens": 60, "temperature": 1, "seed": 5,
        "logprobs": 1, "echo": True,
    }  # fmt: skip
    with (
        serving(endpoint, FakeEngine(vocab_size=codec.vocab_size)),
        door_before(endpoint, "--tokenizer", str(tmp_path)) as url,
        openai_client(url) as client,
    ):
        whole = client.completions.create(**asked)
        chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    choice, usage = whole.choices[0], whole.usage
    assert (choice.logprobs is None, usage is None) == (False, False)
    assert "".join(chunk.text for chunk in chunks) == choice.text
    tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
    assert tokens == choice.logprobs.tokens
    assert len(tokens) == usage.total_tokens == usage.prompt_tokens + 60
    assert codec.decode(codec.encode(prompt)) in choice.text
    offsets = [at for chunk in chunks for at in chunk.logprobs.text_offset]
    assert offsets == sorted(choice.logprobs.text_offset)
