"""OpenAI's own Python client, through latentd-openai, on a daemon of the bundled model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from doors import door_before, openai_client  # noqa: E402
from latentd.commands.child import Child  # noqa: E402
from latentd.demo import model_dir  # noqa: E402
from latentd_client import Client, Sampling  # noqa: E402
from latentd_client.text import generate  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai import OpenAI

PROMPT = "In the beginning "
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("d")
    flags = ("--model", str(model_dir()), "--name", "demo", "--device", "cpu", "--max-slots", "4")
    with Child(folder, (*flags, "--max-ctx", "512")) as child:
        child.wait_ready(120, lambda status: None)
        yield child.endpoint


@pytest.fixture(scope="module")
def client(endpoint: str) -> Iterator[OpenAI]:
    with door_before(endpoint) as url, openai_client(url) as client:
        yield client


@pytest.fixture
def expected(endpoint: str) -> str:
    """What the daemon's own client makes of the prompt."""
    with Client(endpoint) as direct:
        return generate(direct, PROMPT, 24).text


def test_the_model_is_listed_and_found_by_its_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "latentd"
    with pytest.raises(openai.NotFoundError, match="only 'demo'"):
        client.models.retrieve("other/model")


def test_a_completion_is_the_text_of_the_daemon_whole_and_streamed(
    client: OpenAI, expected: str
) -> None:
    asked = GREEDY | {"prompt": PROMPT, "max_tokens": 24}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "length")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 24)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert len(chunks) > 12
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_ends_the_text_in_front_of_it(client: OpenAI, expected: str) -> None:
    stop = expected[9:13]
    before = expected[: expected.index(stop)]
    asked = GREEDY | {"prompt": PROMPT, "max_tokens": 24, "stop": stop, "logprobs": 0}
    choice = client.completions.create(**asked).choices[0]
    assert (choice.text, choice.finish_reason) == (before, "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list(before)
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == before
    assert [token for chunk in chunks for token in chunk.logprobs.tokens] == list(before)


def test_a_seed_gives_the_same_texts_and_each_of_n_its_own(client: OpenAI, endpoint: str) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "prompt": PROMPT, "max_tokens": 12, "seed": 7, "n": 3,
    }  # fmt: skip
    texts = [choice.text for choice in client.completions.create(**asked).choices]
    assert len(set(texts)) == 3
    with Client(endpoint) as direct:
        for seed, text in enumerate(texts, 7):
            hot = Sampling(temperature=1.0, seed=seed)
            assert generate(direct, PROMPT, 12, sampling=hot).text == text
    streamed = ["", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_prompts_as_texts_or_tokens_have_their_choices_in_order(client: OpenAI) -> None:
    alone = [
        client.completions.create(**GREEDY, prompt=prompt, max_tokens=6).choices[0].text
        for prompt in (PROMPT, "And ")
    ]
    for prompts in ([PROMPT, "And "], [list(PROMPT.encode()), list(b"And ")]):
        both = client.completions.create(**GREEDY, prompt=prompts, max_tokens=6)
        assert [choice.text for choice in both.choices] == alone


def test_echo_with_no_tokens_scores_a_prompt(client: OpenAI, endpoint: str) -> None:
    asked = GREEDY | {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 2}
    choice = client.completions.create(**asked).choices[0]
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == list(range(len(PROMPT)))
    with Client(endpoint) as direct, direct.open(list(PROMPT.encode()), prompt_logprobs=0) as slot:
        assert slot.prompt_logprobs is not None
        scores = slot.prompt_logprobs.logprobs.tolist()
    assert choice.logprobs.token_logprobs == [None, *scores[1:]]
    assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs[1:])


def test_a_bias_decides_what_is_sampled(client: OpenAI) -> None:
    choice = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=5, logit_bias={str(ord("z")): 100}
    ).choices[0]
    assert choice.text == "zzzzz"


def test_a_chat_is_a_dialogue_with_names_that_ends_at_the_next_one(
    client: OpenAI, endpoint: str
) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who art thou?"}]},
    ]
    prompt = "Be brief.\n\nUser: Who art thou?\nAssistant:"
    with Client(endpoint) as direct:
        expected = generate(direct, prompt, 20, stop=["\nUser:"]).text
    asked = GREEDY | {"messages": messages, "max_completion_tokens": 20}
    choice = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(one.token for one in choice.logprobs.content) == expected
    assert all(one.top_logprobs[0].logprob == one.logprob for one in choice.logprobs.content)
    *chunks, last = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert (last.choices, last.usage.completion_tokens) == ([], len(choice.logprobs.content))
