"""What a request wants decoded: the parameters that completions and chats share."""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as short
from typing import TYPE_CHECKING, Final

from latentd_client import Sampling
from latentd_client.fields import SAMPLING
from latentd_openai import body as bodies
from latentd_openai.errors import CONTEXT, invalid

if TYPE_CHECKING:
    from latentd_client import DaemonInfo
    from latentd_openai.body import Body

MAX_N: Final = 128
"""Most continuations of a prompt."""
MAX_STOPS: Final = 16
"""Most stop strings."""
MAX_PROMPTS: Final = 128
"""Most prompts of one request."""
MAX_STEPS: Final = 1 << 30


@dataclass(frozen=True)
class Job:
    """`prompts` as tokens, `n` continuations of each, of up to `max_tokens`, which end in front of
    a string of `stop` or at a token of `ends`. `logprobs` is the number of likeliest tokens to tell
    beside each one (0: its own log-probability only), None for no log-probabilities."""

    prompts: list[list[int]]
    n: int
    max_tokens: int
    sampling: Sampling
    stop: list[str]
    ends: tuple[int, ...]
    logprobs: int | None
    echo: bool
    bias: dict[int, float] | None
    stream: bool
    stream_usage: bool

    @property
    def choices(self) -> int:
        """How many texts come of it."""
        return len(self.prompts) * self.n


def read_job(
    body: Body, info: DaemonInfo, prompts: list[list[int]], *, source: str, max_tokens: int,
    logprobs: int | None, echo: bool = False, stop: list[str] | None = None,
) -> Job:  # fmt: skip
    """The parameters that both kinds of request have, and then none may be left. The prompts come
    from the parameter `source`; `stop` are strings that end a text beside those of the request.
    Raises ApiError."""
    for name in ("presence_penalty", "frequency_penalty"):
        body.refuse(name, 0, why="latentd has no penalties")
    body.refuse("service_tier", "auto", "default")
    for name in ("user", "safety_identifier", "prompt_cache_key"):  # names for people
        body.take(name)
    stream = body.flag("stream")
    for tokens in prompts:
        if not tokens:
            raise invalid(source, "the prompt is empty: there is nothing to continue")
        if len(tokens) >= info.max_ctx:  # opening a slot samples a token
            text = f"the prompt has {len(tokens)} tokens, {info.model} takes {info.max_ctx - 1}"
            raise invalid(source, text, CONTEXT)
    job = Job(
        prompts, body.whole("n", 1, MAX_N) or 1, max_tokens, _sampling(body),
        body.texts("stop", MAX_STOPS) + (stop or []), info.eos_token_ids, logprobs, echo,
        bodies.bias(body, info.vocab_size), stream, _stream_usage(body, stream),
    )  # fmt: skip
    body.end()
    if job.choices > info.max_slots:
        text = f"{job.choices} texts at once are asked for, {info.model} has {info.max_slots} slots"
        raise invalid("n", text)
    return job


def read_model(body: Body, served: str) -> None:
    """The model that is asked for must be there. Raises ApiError."""
    name = body.take("model")
    if name is None:
        raise invalid("model", f"model is missing; here is {served!r}")
    check_model(name, served)


def check_model(name: object, served: str) -> None:
    """Raise ApiError for the name of another model."""
    if name != served:
        error = invalid("model", f"there is no model {short(name)}, only {served!r}")
        error.status, error.code = 404, "model_not_found"
        raise error


def _sampling(body: Body) -> Sampling:
    top_k = next(field for field in SAMPLING if field.name == "top_k")
    seed = body.whole("seed", -(1 << 63), (1 << 64) - 1)
    if body.peek("top_p") == 0:
        raise invalid("top_p", "top_p is 0, must be above 0, at most 1 (off)")
    return Sampling(
        temperature=body.number("temperature", 1.0, 0, 2),
        top_k=body.whole("top_k", int(top_k.low), int(top_k.high)) or 0,
        top_p=body.number("top_p", 1.0, 0, 1),
        min_p=body.number("min_p", 0.0, 0, 1),
        seed=None if seed is None else seed % (1 << 64),
    )


def _stream_usage(body: Body, stream: bool) -> bool:
    options = body.take("stream_options")
    if options is None:
        return False
    if not stream or not isinstance(options, dict):
        raise invalid("stream_options", "stream_options must be an object, beside stream: true")
    inner = bodies.Body(options)
    inner.refuse("include_obfuscation", False)
    usage = inner.flag("include_usage")
    inner.end()
    return usage
