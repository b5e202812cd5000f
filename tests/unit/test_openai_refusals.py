"""What latentd-openai refuses, as OpenAI's client and others see it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from doors import door_before, openai_client  # noqa: E402
from fakes import FakeEngine  # noqa: E402
from latentd_client import Client  # noqa: E402
from serving import serving  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    endpoint = f"ipc://{tmp_path_factory.mktemp('d')}/d.sock"
    with serving(endpoint, FakeEngine(max_ctx=100)), door_before(endpoint) as url:
        yield url


def post(
    url: str, data: bytes, path: str = "/completions", **headers: str
) -> tuple[int, dict[str, Any]]:
    """A POST of bytes, well-formed or not: the status and the error."""
    kinds = {"content-type": "application/json"} | {
        k.replace("_", "-"): headers[k] for k in headers
    }
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, kinds)) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]


def refused(url: str, path: str, **fields: Any) -> dict[str, Any]:
    """The error of a bad request."""
    status, error = post(url, json.dumps({"model": "fake"} | fields).encode(), path)
    assert (status, error["type"]) == (400, "invalid_request_error")
    return error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5), ("frequency_penalty", -1), ("suffix", "."), ("best_of", 2),
        ("repetition_penalty", 1.1),
    ],
)  # fmt: skip
def test_what_completions_do_not_have_is_refused_by_name(
    url: str, name: str, value: object
) -> None:
    error = refused(url, "/completions", prompt="a", **{name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("modalities", ["audio"]),
        ("response_format", {"type": "json_object"}), ("store", True), ("audio", {}),
    ],
)  # fmt: skip
def test_what_chats_do_not_have_is_refused_by_name(url: str, name: str, value: object) -> None:
    error = refused(url, "/chat/completions", messages=CHAT, **{name: value})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_values_that_ask_for_nothing_are_taken(url: str) -> None:
    nothing = {"presence_penalty": 0, "frequency_penalty": 0.0, "tools": [], "tool_choice": "auto",
               "response_format": {"type": "text"}, "user": "me", "stop": None,
               "parallel_tool_calls": True, "service_tier": "auto"}  # fmt: skip
    fields = {"model": "fake", "messages": CHAT, "max_tokens": 2, "temperature": 0} | nothing
    status, reply = post(url, json.dumps(fields).encode(), "/chat/completions")
    assert (status, reply["usage"]["completion_tokens"]) == (200, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 3), ("temperature", "hot"), ("temperature", True), ("top_p", -0.1),
        ("top_k", 1.5), ("n", 0), ("n", 10_000), ("max_tokens", -1), ("logprobs", 21),
        ("logprobs", True), ("seed", 1 << 64), ("stop", [""]), ("stop", 5), ("stop", ["a"] * 17),
        ("stream", "yes"), ("stream_options", {"include_usage": True}), ("prompt", []),
        ("prompt", ""), ("prompt", [1, "a"]), ("prompt", {"a": 1}), ("prompt", "\ud800"),
        ("logit_bias", {"256": 1}), ("logit_bias", {"a": 1}), ("logit_bias", {"5": 101}),
        ("logit_bias", [1]), ("prompt", [-1]), ("top_p", 0), ("temperature", 10**400),
        ("logit_bias", {"5": 10**400}), ("\ud800", 1),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(url: str, name: str, value: object) -> None:
    fields = {"prompt": "a"} | {name: value}
    assert refused(url, "/completions", **fields)["param"] == name


@pytest.mark.parametrize(
    "messages",
    [
        [], "Hi", ["Hi"], [{"role": "tool", "content": "1"}], [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{}]}],
    ],
)  # fmt: skip
def test_messages_that_are_no_text_are_refused(url: str, messages: object) -> None:
    assert refused(url, "/chat/completions", messages=messages)["param"].startswith("messages")


def test_a_prompt_that_is_too_long_has_openai_s_code(url: str) -> None:
    long: Any = [{"role": "user", "content": "a" * 100}]
    with openai_client(url) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="fake", prompt="a" * 100)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="fake", messages=long)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_a_token_that_the_model_lacks_is_refused_by_the_daemon_streamed_or_not(url: str) -> None:
    for stream in (False, True):
        error = refused(url, "/completions", prompt=[256], stream=stream)
        assert error["code"] == "invalid"


def test_a_full_pool_is_a_rate_limit(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/d.sock"
    with (
        serving(endpoint, FakeEngine(max_ctx=100, pages=2)), door_before(endpoint) as url,
        Client(endpoint) as other, other.open([1] * 90),
        openai_client(url) as client, pytest.raises(openai.RateLimitError) as caught,
    ):  # fmt: skip
        client.completions.create(model="fake", prompt="a" * 90)
    assert caught.value.code == "no_pages"


def test_a_body_that_is_no_json_of_ours_is_refused(url: str) -> None:
    for data in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        assert post(url, data)[0] == 400
    for depth in range(100, 1000, 25):  # what is hard to print is no fault of the door
        deep = b'{"model":' + b"[" * depth + b"]" * depth + b"}"
        assert post(url, deep)[0] in (400, 404)
    assert post(url, b"{}", content_type="text/plain")[0] == 415
    assert post(url, b" " * ((16 << 20) + 1))[0] == 413
    assert post(url, b"{}", "/embeddings")[0] == 404


@pytest.mark.parametrize(
    "host",
    [
        "page.example",
        "localhost@page.example",
        "page.example/@localhost",
        "localhost:x",
        "[::1",
        "",
    ],
)
def test_a_web_page_s_host_is_refused_without_a_key(url: str, host: str) -> None:
    status, error = post(url, b"{}", host=host)
    assert (status, error["code"]) == (403, "denied")


@pytest.mark.parametrize("host", ["localhost", "LocalHost:80", "127.0.0.2:8000", "[::1]:8000"])
def test_this_machine_s_names_are_served_without_a_key(url: str, host: str) -> None:
    assert post(url, b"{}", host=host)[0] == 400
