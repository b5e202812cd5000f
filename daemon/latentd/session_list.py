"""Whose the sessions are, for people: what `stats` of the control socket tells of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from latentd.access import Access
    from latentd.credentials import Credentials
    from latentd.session import Session
    from latentd.sessions import Sessions
    from latentd_client.protocol import Header

MOST_TOLD: Final = 512
"""Sessions in a reply."""


def told_to(who: Credentials, sessions: Sessions, access: Access) -> list[Header]:
    """The sessions that a peer may see, the last that came first: of others' only admins are told.
    Safe on any thread."""
    sees_all, now = access.is_admin(who), time.monotonic()
    seen = (s for s in reversed(sessions.snapshot()) if sees_all or s.owner == who.owner)
    return [
        _tell(session, access, now + sessions.lease_s)
        for session, _ in zip(seen, range(MOST_TOLD), strict=False)
    ]


def _tell(session: Session, access: Access, fresh: float) -> Header:
    """A session, without its token. `fresh` is when one would expire that was heard of now."""
    who = session.who
    return {
        "number": session.number,
        "user": who.user,
        "group": who.group,
        "process": who.process,
        "key": who.key,
        "name": access.name(who),
        "address": who.address,
        "slots": len(session.slots) - len(session.closed),
        "running": len(session.running),
        "silent_s": max(0.0, fresh - session.expires_at),
    }
