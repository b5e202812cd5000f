"""What is answered instead of a result, in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from latentd_client import ConnectionLost, DeadlineExceeded, ProtocolError, RequestRejected
from latentd_client.errors import TextError

if TYPE_CHECKING:
    from latentd_client import LatentdError

INVALID: Final = "invalid_request_error"
SERVER: Final = "server_error"
STATUS: Final = {
    "invalid": 400, "unsupported": 400, "too_large": 400, "context_full": 400, "denied": 403,
    "no_slot": 429, "no_pages": 429, "busy": 429, "deadline": 504, "draining": 503,
    "device_fault": 503, "epoch_gone": 503, "lease_lost": 503, "cancelled": 503,
}  # fmt: skip
"""The HTTP status for a code of the daemon; 500 for those that are not here."""
CONTEXT: Final = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long."""


class ApiError(Exception):
    """A refusal: an HTTP status, a text for people, the parameter at fault, and a stable code."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        return INVALID if self.status < 500 else SERVER

    def body(self) -> dict[str, Any]:
        """As it travels."""
        fields = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def headers(self) -> dict[str, str]:
        """When to come again, where that is known."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after-ms": str(max(1, round(self.retry_after_s * 1000)))}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A request at fault, by the name of its parameter."""
    return ApiError(400, message, param=param, code=code)


def of_daemon(error: LatentdError) -> ApiError:
    """What the client of the daemon has met."""
    if isinstance(error, RequestRejected):
        code = CONTEXT if error.code == "context_full" else error.code
        again = error.detail.get("retry_after_s")
        return ApiError(
            STATUS.get(error.code, 500), str(error), code=code,
            retry_after_s=again if isinstance(again, float | int) else None,
        )  # fmt: skip
    if isinstance(error, TextError | ProtocolError):
        return ApiError(400, str(error), code=error.code)
    status = {ConnectionLost: 503, DeadlineExceeded: 504}
    found = (number for kind, number in status.items() if isinstance(error, kind))
    return ApiError(next(found, 500), str(error), code=error.code)
