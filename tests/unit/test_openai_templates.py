"""Chats by the template of a checkpoint, and the tokens that the daemon is given."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("tokenizers")

from doors import door_before, openai_client  # noqa: E402
from fakes import FakeEngine, next_token  # noqa: E402
from latentd_client.codecs import JsonCodec  # noqa: E402
from latentd_client.errors import TextError  # noqa: E402
from latentd_openai.errors import ApiError  # noqa: E402
from latentd_openai.templates import PlainTemplate, load_template  # noqa: E402
from serving import serving  # noqa: E402
from tokenizing import byte_level  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 400
TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
[{{ m.role }}] {{ m.content }}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""
RENDERED = "<bos>[system] Be brief.\n[user] Who?\n[assistant]"
MESSAGES: Any = [
    {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Who?"}
]  # fmt: skip
PARSED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's tokenizer and its settings."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def rendered(path: Path, file: Path | None = None) -> str:
    template = load_template(path, file)
    assert template is not None
    return template.render(PARSED)


def test_a_chat_is_rendered_by_the_template_and_its_special_tokens_come_once(
    folder: Path, endpoint: str
) -> None:
    codec = JsonCodec(folder)
    tokens = codec.encode(RENDERED, begins=False)
    assert tokens.count(0) == 1
    with (
        serving(endpoint, FakeEngine(vocab_size=VOCAB)),
        door_before(endpoint, "--tokenizer", str(folder), "--model-name", "mine") as url,
        openai_client(url) as client,
    ):
        asked: Any = {"model": "mine", "messages": MESSAGES, "temperature": 0, "max_tokens": 6}
        reply = client.chat.completions.create(**asked)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(tokens)
    for _ in range(6):
        tokens.append(next_token(tokens, VOCAB, 0))
    assert reply.choices[0].message.content == codec.decode(tokens[-6:])


def test_without_a_template_chats_are_refused_and_completions_are_not(
    folder: Path, endpoint: str
) -> None:
    (folder / "tokenizer_config.json").unlink()
    with (
        serving(endpoint, FakeEngine(vocab_size=VOCAB)),
        door_before(endpoint, "--tokenizer", str(folder)) as url,
        openai_client(url) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            client.chat.completions.create(model="fake", messages=MESSAGES)
        reply = client.completions.create(model="fake", prompt="The quick", max_tokens=1)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(JsonCodec(folder).encode("The quick"))


def test_the_template_is_that_of_a_file_else_the_one_beside_the_tokenizer(folder: Path) -> None:
    assert rendered(folder) == rendered(folder / "tokenizer.json") == RENDERED
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ bos_token }}")
    assert rendered(folder) == "Be brief.<bos>"
    (folder / "own.jinja").write_text("{{ messages | length }}")
    assert rendered(folder, folder / "own.jinja") == "2"


def test_of_several_templates_the_default_one_is_taken(folder: Path) -> None:
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert rendered(folder) == "yes"


def test_messages_that_a_template_does_not_take_are_the_asker_s_fault(folder: Path) -> None:
    template = load_template(folder, None)
    assert template is not None
    with pytest.raises(ApiError, match="no tools") as caught:
        template.render([{"role": "tool", "content": ""}])
    assert caught.value.status == 400


def test_a_template_has_no_way_out_of_its_sandbox(folder: Path) -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(ApiError, match="unsafe"):
        rendered(folder)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("chat_template.jinja", b"{% if"), ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b"{"), ("tokenizer_config.json", b"[]"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    with pytest.raises(TextError, match=name):
        load_template(folder, None)


def test_a_byte_level_model_has_a_plain_dialogue() -> None:
    assert isinstance(load_template(None, None), PlainTemplate)
