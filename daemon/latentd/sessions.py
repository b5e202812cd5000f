"""All sessions of a daemon, by their tokens, and their leases. No sockets.

The engine thread owns everything here; the control thread only calls `renew` and `snapshot` and
reads counts.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from latentd.session import Session
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from latentd.records import SlotRecord

MAX_SESSIONS = 4096
MAX_ALL_CLOSED_BYTES = 512 << 20
"""What the closed slots of all sessions may take; the session that has most of it gives way."""


def _hash(token: str) -> bytes:
    """What is kept of a token where it could be read by others; it has 128 random bits."""
    return hashlib.sha256(token.encode()).digest()


class Sessions:
    """All sessions of this daemon's life, which `boot_id` names, and those of an earlier one that
    were restored."""

    def __init__(self, lease_s: float, grace_s: float) -> None:
        self.boot_id = secrets.token_hex(8)
        self.lease_s = lease_s
        self.grace_s = grace_s
        self._sessions: dict[bytes, Session] = {}  # by the hash of the token
        self._by_token: dict[str, Session] = {}  # those whose token is known
        self._ended: dict[bytes, float] = {}  # closed sessions: when, by the hash of the token
        self._closed_weight = 0  # of all sessions
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def snapshot(self) -> list[Session]:
        """All of them now, the oldest first. Safe on any thread: a list is made of a dict's values
        without letting go of the interpreter."""
        return list(self._sessions.values())

    def create(self, now: float) -> Session:
        """A new session. At MAX_SESSIONS the one that owns nothing and was silent longest gives
        way (clients that die in a loop leave many); RequestRejected("busy") when all own something.
        """
        if len(self._sessions) >= MAX_SESSIONS:
            idle = [s for s in self if not (s.slots or s.opens or s.running)]
            if not idle:
                raise RequestRejected(
                    "busy", f"all {MAX_SESSIONS} sessions have slots; close one or retry later",
                    retry_after_s=self.lease_s,
                )  # fmt: skip
            self.remove(min(idle, key=lambda session: session.expires_at))
        token = self.boot_id + secrets.token_hex(16)
        session = self.take_back(_hash(token), now)
        session.token = token
        self._by_token[token] = session
        return session

    def take_back(self, token_hash: bytes, now: float) -> Session:
        """A session of which only the hash of its token is known; who has the token has it."""
        self._num_made += 1
        session = Session("", token_hash, now + self.lease_s, number=self._num_made)
        self._sessions[token_hash] = session
        return session

    def renew(self, token: str, now: float) -> Session:
        """The session of a token; its lease starts anew, in the grace period too.

        Raises RequestRejected: "lease_lost" when it has ended, "epoch_gone" when the token is of
        another life of the daemon (detail boot_id). Safe on any thread.
        """
        session = self._by_token.get(token) or self._find(token)
        if session is not None:
            session.expires_at = now + self.lease_s
            return session
        if len(token) == 48 and not token.startswith(self.boot_id):
            raise RequestRejected(
                "epoch_gone", "the daemon was restarted since: say hello and open the slots again",
                boot_id=self.boot_id,
            )  # fmt: skip
        raise RequestRejected(
            "lease_lost", "the session is unknown or has ended: say hello and open the slots again"
        )

    def _find(self, token: str) -> Session | None:
        """A restored session, at the first sight of its token. On any thread: a session that ends
        meanwhile is not found."""
        session = self._sessions.get(_hash(token))
        if session is None:
            return None
        session.token = token
        self._by_token[token] = session
        if session.is_gone:
            self._by_token.pop(token, None)
            return None
        return session

    def peers(self) -> set[bytes]:
        """The connections that sessions use."""
        return {session.peer for session in self._sessions.values()}

    def remove(self, session: Session) -> None:
        """Forget a session; its slots are the caller's to close."""
        session.is_gone = True
        if self._sessions.pop(session.token_hash, None) is not None:
            self._closed_weight -= session.closed_weight
        self._by_token.pop(session.token, None)

    def note_closed(self, session: Session, record: SlotRecord) -> None:
        """A slot was closed; beyond the bound of all sessions the one that keeps most forgets."""
        self._closed_weight -= session.closed_weight
        session.note_closed(record)
        self._closed_weight += session.closed_weight
        while self._closed_weight > MAX_ALL_CLOSED_BYTES:
            largest = max(self, key=lambda one: one.closed_weight)
            self._forget(largest, next(iter(largest.closed)))

    def _forget(self, session: Session, seat: tuple[int, int]) -> None:
        self._closed_weight -= session.closed_weight
        session.forget(seat)
        self._closed_weight += session.closed_weight

    @property
    def ended(self) -> list[bytes]:
        """The hashes of the tokens of sessions that were closed, within the grace period."""
        return list(self._ended)

    def note_ended(self, token_hash: bytes, now: float) -> None:
        """A session was closed by its owner, who may ask that again."""
        self._ended[token_hash] = now
        if len(self._ended) > MAX_SESSIONS:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, token: str) -> bool:
        """Whether the session of a token was closed, within the grace period."""
        return _hash(token) in self._ended

    def overdue(self, now: float) -> tuple[list[Session], list[Session]]:
        """Sessions whose lease has run out (their streams must stop), and those whose grace
        period has run out too (they must be freed)."""
        lost = [s for s in self._sessions.values() if s.expires_at < now]
        return lost, [s for s in lost if s.expires_at + self.grace_s < now]

    def postpone(self, seconds: float) -> None:
        """Let all leases, and those of adoptions, last longer: nobody was heard for so long."""
        for session in self._sessions.values():
            session.expires_at += seconds
            for adoption in session.adoptions.values():
                adoption.expires_at += seconds

    def forget_old(self, now: float) -> None:
        """Drop what was closed after the grace period: slots, the stored replies of their opens,
        and who asked for it."""
        self._ended = {token: at for token, at in self._ended.items() if at + self.grace_s >= now}
        for session in self._sessions.values():
            for seat in list(session.closed):
                closed_at = session.slots[seat].closed_at
                if closed_at is None or closed_at + self.grace_s >= now:
                    break
                self._forget(session, seat)
