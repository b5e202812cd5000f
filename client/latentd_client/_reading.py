"""How the text helpers of both clients ask and read; without any waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from latentd_client._detokenizing import MAX_CONTEXT
from latentd_client._given import whole
from latentd_client._text_reader import TextReader
from latentd_client.codecs import codec_for
from latentd_client.errors import TextError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from latentd_client._detokenizing import Codec
    from latentd_client._drafting import Draft
    from latentd_client._given import Bias, Mask, Prompt
    from latentd_client._slot import BaseSlot
    from latentd_client.results import DaemonInfo, Sampling


class TextOptions(TypedDict, total=False):
    """Where a text ends: before the first of the strings `stop` (behind it with `keep_stop`), also
    where it begins in one token and ends in another; or at one of `stop_tokens`, which are those of
    the model unless given. All else is as in `Slot.stream`."""

    stop: Iterable[str]
    stop_tokens: Iterable[int] | None
    keep_stop: bool
    sampling: Sampling | None
    bias: Bias | None
    mask: Mask | None
    draft: Draft | None
    timeout_s: float | None


class Generated(NamedTuple):
    """A text, the tokens that it was made of (with those of its stop), and why it ends: "stop",
    "max_steps" or "context_full"."""

    text: str
    tokens: list[int]
    end: str


@dataclass(eq=False)
class Reading:
    """One text on its way: `room` steps are to be asked for, which end at `stops`, with the other
    options of a stream in `rest`; with `is_cut` there is no room in the context for more."""

    reader: TextReader
    room: int
    stops: list[int]
    rest: dict[str, Any]
    is_new: bool
    is_cut: bool

    @classmethod
    def of(
        cls, slot: BaseSlot, info: DaemonInfo, max_steps: int, codec: Codec | None, is_new: bool,
        options: TextOptions,
    ) -> Reading:  # fmt: skip
        """Raises TextError, ProtocolError."""
        rest: dict[str, Any] = dict(options)
        given = rest.pop("stop_tokens", None)
        stops = list(info.eos_token_ids if given is None else given)
        context = [int(token) for token in slot.prompt[-MAX_CONTEXT:]]
        ends = rest.pop("stop", ()), stops, context, rest.pop("keep_stop", False)
        reader = TextReader(codec_for(info, codec), *ends)
        is_new = is_new and slot.token is not None
        room, left = whole(max_steps, "max_steps") - is_new, info.max_ctx - slot.context_len
        return cls(reader, min(room, left), stops, rest, is_new, left < room)

    @property
    def is_over(self) -> bool:
        """Whether no token is wanted any more."""
        return self.reader.end is not None

    def first(self, token: int | None) -> Iterator[str]:
        """What the token of a new slot tells."""
        if self.is_new and token is not None:
            yield from self.push(token)
            if self.is_over:
                self.room = 0

    def push(self, token: int) -> Iterator[str]:
        """What a token tells, if anything."""
        if piece := self.reader.push(token):
            yield piece

    def last(self) -> Iterator[str]:
        """What has been waiting, if anything."""
        if piece := self.reader.finish("context_full" if self.is_cut else "max_steps"):
            yield piece

    def result(self, text: str) -> Generated:
        """All of it."""
        return Generated(text, self.reader.tokens, self.reader.end or "")


def prompt_tokens(codec: Codec, prompt: str | Prompt) -> Prompt:
    """The tokens of a prompt, which may be tokens already. Raises TextError when there are none."""
    tokens = codec.encode(prompt) if isinstance(prompt, str) else prompt
    if not len(tokens):
        raise TextError("the prompt is empty: there is nothing to continue")
    return tokens


def opening(options: TextOptions) -> dict[str, Any]:
    """Those of the options that an open takes."""
    names = ("sampling", "bias", "mask", "timeout_s")
    return {name: value for name, value in options.items() if name in names}
