"""The HTTP side: routes, keys, and refusals in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from latentd_client import LatentdError, SessionLost
from latentd_openai import body as bodies
from latentd_openai.access import check_access
from latentd_openai.answering import EventStream, while_there
from latentd_openai.decoding import Decoding
from latentd_openai.errors import ApiError, of_daemon
from latentd_openai.job import check_model
from latentd_openai.replies import ChatReplies, CompletionReplies
from latentd_openai.requests import chat_job, completion_job

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from latentd_openai.body import Body
    from latentd_openai.door import Door, Served
    from latentd_openai.job import Job
    from latentd_openai.replies import Replies

    Answer = Callable[[Request, Served], Awaitable[Response]]

HEALTH: Final = "/health"
"""Where balancers ask, who have no key."""


def application(door: Door, key: str | None = None) -> Starlette:
    """The ASGI application. With a `key` requests must bring it as their bearer token, all but
    those that ask for its health."""

    def route(path: str, answer: Answer, method: str) -> Route:
        return Route(path, _Guarded(door, key, answer).respond, methods=[method])

    complete = partial(_decode, read=completion_job, kind=CompletionReplies)
    chat = partial(_decode, read=chat_job, kind=ChatReplies)
    return Starlette(
        routes=[
            route(HEALTH, _health, "GET"),
            route("/v1/models", _models, "GET"),
            route("/v1/models/{name:path}", _model, "GET"),
            route("/v1/completions", complete, "POST"),
            route("/v1/chat/completions", chat, "POST"),
        ],
        exception_handlers={HTTPException: _no_route, Exception: _fault},
    )


class _Guarded:
    """An answer for those who may ask, and refusals as OpenAI has them."""

    def __init__(self, door: Door, key: str | None, answer: Answer) -> None:
        self._door, self._key, self._answer = door, key, answer

    async def respond(self, request: Request) -> Response:
        """The answer, or why there is none."""
        served = None
        try:
            if self._key is None or request.scope["path"] != HEALTH:
                headers = request.headers
                authorization = headers.get("authorization", "")
                check_access(headers.get("host", ""), authorization, self._key)
            served = await self._door.served()
            return await self._answer(request, served)
        except ApiError as error:
            return refusal(error)
        except LatentdError as error:
            if isinstance(error, SessionLost) and served is not None:
                await self._door.drop(served)
            return refusal(of_daemon(error))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it


def refusal(error: ApiError) -> Response:
    """As it is sent."""
    return _json(error.body(), error.status, error.headers())


def _json(
    fields: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """In ASCII: what a request has named may be no text that can be encoded."""
    return Response(json.dumps(fields), status, headers, "application/json")


async def _health(request: Request, served: Served) -> Response:
    state = (await served.client.health())["state"]
    return _json({"state": state}, 200 if state == "ready" else 503)


async def _models(request: Request, served: Served) -> Response:
    return _json({"object": "list", "data": [_about(served)]})


async def _model(request: Request, served: Served) -> Response:
    check_model(request.path_params["name"], served.name)
    return _json(_about(served))


def _about(served: Served) -> dict[str, Any]:
    return {
        "id": served.name, "object": "model", "created": 0, "owned_by": "latentd",
        "max_model_len": served.info.max_ctx,
    }  # fmt: skip


async def _decode(
    request: Request, served: Served, read: Callable[[Body, Served], Job], kind: type[Replies]
) -> Response:
    body = bodies.parse(await _data(request))
    job = await asyncio.to_thread(read, body, served)  # a long text takes its tokenizer a while
    decoding = Decoding(served.client, served.codec, job)
    replies = kind(decoding, served.codec, served.name, served.fingerprint)
    if not job.stream:
        return _json(await while_there(request.receive, replies.whole()))
    chunks = replies.chunks()
    return EventStream(await while_there(request.receive, anext(chunks)), chunks)


async def _data(request: Request) -> bytes:
    """A request's body. A page of the web cannot send JSON here without asking first, which nobody
    answers: so what is in a browser on this machine has no access."""
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise ApiError(415, "the content type must be application/json")
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > bodies.MAX_BYTES:
            raise bodies.too_large()
    return bytes(data)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.scope['path']}: {error.detail}"
    return refusal(ApiError(error.status_code, text, code="unknown_url"))


async def _fault(request: Request, error: Exception) -> Response:
    """What should not be: the server's log has the rest."""
    return refusal(ApiError(500, f"a fault of latentd-openai: {type(error).__name__}"))
