"""The shapes of replies: whole, or in chunks."""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

from latentd_openai.writing import Delta

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from latentd_client.text import Codec
    from latentd_openai.decoding import Decoding
    from latentd_openai.writing import Told

Fields = dict[str, Any]


class Replies:
    """What completions and chats have in common: one of these answers one request."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, decoding: Decoding, codec: Codec, model: str, fingerprint: str) -> None:
        self._decoding, self._codec = decoding, codec
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
            "system_fingerprint": fingerprint,
        }  # fmt: skip

    async def whole(self) -> Fields:
        """The reply of a request without `stream`. Raises LatentdError."""
        found = [Delta(index, "", []) for index in range(self._decoding.job.choices)]
        async with contextlib.aclosing(self._decoding.deltas()) as deltas:
            async for more in deltas:
                found[more.choice] = found[more.choice].joined(more)
        choices = [self.choice(one) for one in found]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[Fields, None]:
        """The chunks of a request with `stream`; the first comes when its prompt is in. Raises
        LatentdError."""
        begun: set[int] = set()
        async with contextlib.aclosing(self._decoding.deltas()) as deltas:
            async for delta in deltas:
                for choice in self.pieces(delta, delta.choice not in begun):
                    yield self._chunk([choice])
                begun.add(delta.choice)
        if self._decoding.job.stream_usage:
            yield self._chunk([]) | {"usage": self._usage()}

    def choice(self, one: Delta) -> Fields:
        """A choice of a whole reply."""
        raise NotImplementedError

    def pieces(self, delta: Delta, is_first: bool) -> list[Fields]:
        """The choices of the chunks that a delta is told in."""
        raise NotImplementedError

    def _chunk(self, choices: list[Fields]) -> Fields:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return chunk | {"usage": None} if self._decoding.job.stream_usage else chunk

    def _usage(self) -> Fields:
        decoding = self._decoding
        return {
            "prompt_tokens": decoding.prompt_tokens,
            "completion_tokens": decoding.completion_tokens,
            "total_tokens": decoding.prompt_tokens + decoding.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": decoding.cached_tokens},
        }

    def _name(self, token: int) -> str:
        """A token as text; one that is no whole character, by its number."""
        text = self._codec.decode([token])
        return f"token_id:{token}" if "\N{REPLACEMENT CHARACTER}" in text else text


class CompletionReplies(Replies):
    """Those of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, one: Delta) -> Fields:
        """See Replies."""
        return {
            "index": one.choice, "text": one.text, "logprobs": self._logprobs(one.told),
            "finish_reason": one.finish,
        }  # fmt: skip

    def pieces(self, delta: Delta, is_first: bool) -> list[Fields]:
        """See Replies."""
        return [self.choice(delta)]

    def _logprobs(self, told: list[Told]) -> Fields | None:
        wanted = self._decoding.job.logprobs
        if wanted is None:
            return None
        tops = [self._top(one) for one in told] if wanted else None
        return {
            "tokens": [self._name(one.token) for one in told],
            "token_logprobs": [one.logprob for one in told],
            "top_logprobs": tops,
            "text_offset": [one.offset for one in told],
        }

    def _top(self, one: Told) -> Fields | None:
        """The likeliest tokens and the one that came; None where nothing is told."""
        if one.logprob is None:
            return None
        return {self._name(token): logprob for token, logprob in one.top} | {
            self._name(one.token): one.logprob
        }


class ChatReplies(Replies):
    """Those of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def choice(self, one: Delta) -> Fields:
        """See Replies."""
        message = {"role": "assistant", "content": one.text, "refusal": None}
        return {
            "index": one.choice, "message": message, "logprobs": self._logprobs(one.told),
            "finish_reason": one.finish,
        }  # fmt: skip

    def pieces(self, delta: Delta, is_first: bool) -> list[Fields]:
        """See Replies."""
        pieces = [self._piece(delta, {"role": "assistant", "content": ""})] if is_first else []
        if delta.text or delta.told:
            piece = self._piece(delta, {"content": delta.text})
            pieces.append(piece | {"logprobs": self._logprobs(delta.told)})
        if delta.finish is not None:
            pieces.append(self._piece(delta, {}) | {"finish_reason": delta.finish})
        return pieces

    def _piece(self, delta: Delta, fields: Fields) -> Fields:
        return {"index": delta.choice, "delta": fields, "logprobs": None, "finish_reason": None}

    def _logprobs(self, told: list[Told]) -> Fields | None:
        if self._decoding.job.logprobs is None:
            return None
        return {"content": [self._content(one) for one in told], "refusal": None}

    def _content(self, one: Told) -> Fields:
        assert one.logprob is not None  # chats have no echo
        tops = [self._token(token, logprob) for token, logprob in one.top]
        return self._token(one.token, one.logprob) | {"top_logprobs": tops}

    def _token(self, token: int, logprob: float) -> Fields:
        name = self._name(token)
        is_part = name.startswith("token_id:")
        return {
            "token": name,
            "logprob": logprob,
            "bytes": None if is_part else list(name.encode()),
        }
