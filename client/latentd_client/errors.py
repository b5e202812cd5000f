"""The errors a caller can meet; the daemon raises the same `RequestRejected` to refuse a request.

LatentdError                     everything below; `code` is stable, the text is for people
  RequestRejected                the daemon refused: nothing changed, the connection is usable
  ProtocolError                  a message that cannot be read or sent (client side)
  ConnectionLost                 the connection broke or nobody listens: the request may have run,
                                 and the same call may be repeated
    SessionLost                  a daemon is there that does not know the session: restarted
                                 without its state; slots must be opened again
      ModelChanged               it would give other tokens: none of them can be opened again
  KeyFault                       a CURVE key or a file of one that cannot be used (client side)
  TextError                      a text or tokenizer that will not do (client side)
  DeadlineExceeded               no reply in time; the step may have run, repeat it safely
"""

from __future__ import annotations

from typing import Final

CODES: Final = frozenset(
    {
        "invalid", "unsupported", "version", "too_large", "no_slot", "no_pages", "context_full",
        "position_conflict", "epoch_gone", "lease_lost", "busy", "deadline", "cancelled", "denied",
        "draining", "device_fault", "internal",
    }
)  # fmt: skip
"""Codes a reply's status can carry besides "ok"."""


class LatentdError(Exception):
    """Base of all errors of latentd; `code` is one of CODES, "connection_lost", "protocol",
    "key" or "text"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestRejected(LatentdError):
    """The daemon refused a request; nothing changed. `detail` holds the reply's other fields
    (for example `context_len` with position_conflict, `retry_after_s` with busy)."""

    def __init__(self, code: str, message: str, **detail: object) -> None:
        super().__init__(code, message)
        self.detail = detail


class ProtocolError(LatentdError):
    """A message that breaks the wire format or the agreed limits; it was not sent or not used."""

    def __init__(self, message: str) -> None:
        super().__init__("protocol", message)


class KeyFault(LatentdError):
    """A CURVE key, or a file of one, that cannot be used; nothing was connected or written."""

    def __init__(self, message: str) -> None:
        super().__init__("key", message)


class TextError(LatentdError):
    """What `latentd_client.text` cannot do: no tokenizer, another model's, or no text to go on."""

    def __init__(self, message: str) -> None:
        super().__init__("text", message)


class ConnectionLost(LatentdError):
    """The connection broke, or nobody listens. Repeat the same call: if the daemon is still there,
    or was restarted with what it had saved (`serve --restore`), the session and its slots go on,
    and nothing is appended twice. Else that call raises SessionLost."""

    def __init__(self, message: str) -> None:
        super().__init__("connection_lost", message)


class SessionLost(ConnectionLost):
    """The daemon that answers does not know the session: it was restarted without its state, and
    the slots are lost with it. Make a new client and open them again; a client that was made with
    `reopen=True` does that by itself, and does not raise this."""


class ModelChanged(SessionLost):
    """The daemon that answers now serves another model, or the same one with other bits: what a
    client knows of its slots cannot be continued there. Raised where `reopen=True`."""


class DeadlineExceeded(LatentdError):
    """No reply within the call's time. The step may have run: repeat the same call safely."""

    def __init__(self, message: str) -> None:
        super().__init__("deadline", message)
