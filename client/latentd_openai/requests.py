"""The parameters of /v1/completions and of /v1/chat/completions. All functions raise ApiError."""

from __future__ import annotations

from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Final

from latentd_client.codecs import JsonCodec
from latentd_client.fields import MAX_LOGPROBS
from latentd_openai.body import text
from latentd_openai.errors import invalid
from latentd_openai.job import MAX_PROMPTS, MAX_STEPS, read_job, read_model

if TYPE_CHECKING:
    from latentd_client.text import Codec
    from latentd_openai.body import Body
    from latentd_openai.door import Served
    from latentd_openai.job import Job
    from latentd_openai.templates import Message

DEFAULT_STEPS: Final = 16
"""`max_tokens` of a completion that names none, as OpenAI has it."""
ROLES: Final = ("system", "developer", "user", "assistant")


def completion_job(body: Body, served: Served) -> Job:
    """What a completion wants."""
    read_model(body, served.name)
    prompts = _prompts(body, served.codec)
    body.refuse("suffix", "", why="latentd only continues text")
    body.refuse("best_of", body.peek("n") or 1, why="latentd tells every text that it decodes")
    steps = body.whole("max_tokens", 0, MAX_STEPS)
    return read_job(
        body, served.info, prompts, source="prompt",
        max_tokens=DEFAULT_STEPS if steps is None else steps,
        logprobs=body.whole("logprobs", 0, MAX_LOGPROBS), echo=body.flag("echo"),
    )  # fmt: skip


def chat_job(body: Body, served: Served) -> Job:
    """What a chat wants."""
    read_model(body, served.name)
    if served.template is None:
        raise invalid(
            "messages",
            f"{served.name} has no chat template: use /v1/completions, or start latentd-openai "
            "with --chat-template",
        )
    prompt = served.template.render(_messages(body))
    for name in ("tools", "functions"):
        body.refuse(name, [])
    for name in ("tool_choice", "function_call"):
        body.refuse(name, "none", "auto")
    body.refuse("response_format", {"type": "text"})
    body.refuse("modalities", ["text"])
    body.refuse("store", False)
    body.refuse("parallel_tool_calls", True, False)
    logprobs, top = body.flag("logprobs"), body.whole("top_logprobs", 0, MAX_LOGPROBS)
    if top and not logprobs:
        raise invalid("top_logprobs", "top_logprobs is for requests with logprobs: true")
    steps = [body.whole(name, 1, MAX_STEPS) for name in ("max_completion_tokens", "max_tokens")]
    return read_job(
        body, served.info, [_encode_rendered(served.codec, prompt)], source="messages",
        max_tokens=next(filter(None, steps), MAX_STEPS), logprobs=(top or 0) if logprobs else None,
        stop=list(served.template.stop),
    )  # fmt: skip


def _encode_rendered(codec: Codec, prompt: str) -> list[int]:
    """A template writes all special tokens itself."""
    if isinstance(codec, JsonCodec):
        return codec.encode(prompt, begins=False)
    return codec.encode(prompt)


def _prompts(body: Body, codec: Codec) -> list[list[int]]:
    """A text, token ids, or a list of either."""
    given = body.take("prompt")
    is_one = isinstance(given, str) or (
        isinstance(given, list) and bool(given) and all(type(item) is int for item in given)
    )
    prompts = [given] if is_one else given
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
        what = f"a string, a list of token ids, or a list of up to {MAX_PROMPTS} of either"
        raise invalid("prompt", f"prompt must be {what}")
    return [_prompt_tokens(item, codec) for item in prompts]


def _prompt_tokens(given: Any, codec: Codec) -> list[int]:
    if not isinstance(given, list):
        return codec.encode(text(given, "prompt"))
    if all(type(token) is int and 0 <= token < 1 << 31 for token in given):
        return given
    raise invalid("prompt", f"prompt: {short(given)} is no list of token ids")


def _messages(body: Body) -> list[Message]:
    given = body.take("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages", "messages must be a list with one message at least")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(given)]


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise invalid("messages", f"{where} is {short(given)}, must be an object")
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise invalid("messages", f"{where}: role is {short(role)}, must be one of {ROLES}")
    for name, value in given.items():
        if name not in ("role", "content", "name") and value:
            raise invalid("messages", f"{where}: {short(name)} is not supported")
    role = "system" if role == "developer" else role
    return {"role": role, "content": _content(content, f"{where}.content")}


def _content(given: Any, where: str) -> str:
    """A text, or parts that are texts."""
    parts = given if isinstance(given, list) else [{"type": "text", "text": given}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise invalid("messages", f"{where}: {short(part)} is not supported, only text is")
    return "".join(text(part.get("text"), where) for part in parts)
