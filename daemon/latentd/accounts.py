"""Users and groups of this machine, by name or id."""

from __future__ import annotations

import grp
import pwd
from typing import Final

MOST: Final = (1 << 32) - 2
"""The largest id; the one behind it means none (chown(2))."""


def ids(kind: str, text: str) -> frozenset[int] | None:
    """The ids of a list of "users" or "groups" with commas; None when one of them is unknown. No
    text is nobody."""
    found = {_id(kind, part.strip()) for part in text.split(",")} if text else set()
    known = frozenset(number for number in found if number is not None)
    return known if len(known) == len(found) else None


def _id(kind: str, name: str) -> int | None:
    if name.isascii() and name.isdigit() and len(name) <= len(str(MOST)):
        return number if (number := int(name)) <= MOST else None
    try:
        return pwd.getpwnam(name).pw_uid if kind == "users" else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        return None
