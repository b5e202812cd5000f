"""How the messages of a chat become one prompt: by the model's own template, or plainly."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from latentd_client.errors import TextError
from latentd_openai.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Template

MAX_BYTES: Final = 16 << 20
"""Largest file that is read as a template or a tokenizer's settings."""

Message = dict[str, str]


class ChatTemplate(Protocol):
    """`stop` are strings that end an answer."""

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end an answer, beside those of the request."""

    def render(self, messages: list[Message]) -> str:
        """The prompt, up to where the answer begins. Raises ApiError."""


class PlainTemplate:
    """For models that know no roles, such as the bundled one: a dialogue with names."""

    stop = ("\nUser:",)
    _NAMES: Final = {"user": "User", "assistant": "Assistant"}

    def render(self, messages: list[Message]) -> str:
        """See ChatTemplate."""
        lines = []
        for message in messages:
            name = self._NAMES.get(message["role"])
            content = message["content"]
            lines.append(f"{content}\n\n" if name is None else f"{name}: {content}\n")
        return "".join(lines) + "Assistant:"


class JinjaTemplate:
    """The template of a checkpoint; `names` are the special tokens that it may write."""

    stop = ()

    def __init__(self, source: str, names: dict[str, str], where: str) -> None:
        """Raises TextError for one that cannot be compiled; `where` it is from."""
        self._names = names
        self._template = _compile(source, where)

    def render(self, messages: list[Message]) -> str:
        """See ChatTemplate."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None,
                **self._names,
            )  # fmt: skip
        except Exception as error:  # whatever a template does: the messages do not suit it
            text = f"the model's chat template does not take these messages: {error}"
            raise invalid("messages", text) from None


def load_template(tokenizer: Path | None, file: Path | None) -> ChatTemplate | None:
    """The template of a `file`, else what lies beside a tokenizer.json (its path or its folder's):
    chat_template.jinja or tokenizer_config.json's. Without a tokenizer the plain one; None where
    there is none. Raises TextError."""
    if tokenizer is None:
        return PlainTemplate() if file is None else JinjaTemplate(_read(file), {}, str(file))
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config_file = folder / "tokenizer_config.json"
    config = _settings(config_file) if config_file.is_file() else {}
    if file is None and (folder / "chat_template.jinja").is_file():
        file = folder / "chat_template.jinja"
    source, where = _source_in(config), str(config_file)
    if file is not None:
        source, where = _read(file), str(file)
    return None if source is None else JinjaTemplate(source, _token_names(config), where)


def _source_in(config: dict[str, Any]) -> str | None:
    """A tokenizer's settings have one template, or several with names."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token_names(config: dict[str, Any]) -> dict[str, str]:
    names = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        names[key] = text if isinstance(text, str) else ""
    return names


def _settings(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(path))
    except ValueError as error:
        raise TextError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise TextError(f"{path} holds a {type(config).__name__}, must be an object")
    return config


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeError) as error:
        raise TextError(f"cannot read {path}: {error}") from None
    if len(data) > MAX_BYTES:
        raise TextError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    return text


def _compile(source: str, where: str) -> Template:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime}
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise TextError(f"the chat template of {where} is broken: {error}") from None


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _strftime(form: str) -> str:
    return datetime.datetime.now().strftime(form)
