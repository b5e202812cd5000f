"""Who may connect, and who may stop the daemon or change how it runs.

Decisions only: it knows neither sockets nor sessions. Any thread may ask; a reload swaps the lists.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from latentd.options import AccessOptions
from latentd_client.errors import KeyFault, RequestRejected
from latentd_client.keys import KEY, KeyPair, read_pair

if TYPE_CHECKING:
    from pathlib import Path

    from latentd.credentials import Credentials

MOST_BYTES: Final = 1 << 20
"""Of a file of clients: some ten thousand."""


class AccessError(Exception):
    """Rules of access that cannot be used; the text names the setting and says what to do."""


@dataclass(frozen=True)
class Lists:
    """The options with their files read; keys have names."""

    options: AccessOptions
    clients: dict[str, str]
    admins: dict[str, str]


class Access:
    """The rules. `version` counts how often they were changed."""

    def __init__(self, options: AccessOptions | None = None) -> None:
        """Read the files. Raises AccessError."""
        options = options or AccessOptions()
        self.version = 0
        self.pair: KeyPair | None = None
        """Of the daemon, where tcp is encrypted."""
        if options.curve_key is not None:
            try:
                self.pair = read_pair(options.curve_key)
            except KeyFault as error:
                raise AccessError(f"curve_key: {error}") from None
        self._lists = read_lists(options)

    def reload(self, options: AccessOptions) -> None:
        """Have these rules from now on, with the key pair of before. Raises AccessError, and has
        changed nothing then."""
        self._lists = read_lists(options)
        self.version += 1

    def admits(self, who: Credentials) -> bool:
        """Whether a peer may connect. Root, the daemon's own user and the admins always may."""
        lists = self._lists
        if who.key:
            return who.key in lists.clients or who.key in lists.admins
        options = lists.options
        if who.user is None or not (options.allow_users or options.allow_groups):
            return True
        is_listed = who.user in options.allow_users or bool(who.groups & options.allow_groups)
        return is_listed or self.is_admin(who)

    def is_admin(self, who: Credentials) -> bool:
        """Whether a peer may do what concerns everybody."""
        if who.key:
            return who.key in self._lists.admins
        return who.user is not None and (
            self.is_self(who) or who.user in self._lists.options.admin_users
        )

    def is_self(self, who: Credentials) -> bool:
        """Whether it is root or the daemon's own user, whose files are the daemon's."""
        return who.user in (0, os.getuid()) and not who.key

    def check_target(self, who: Credentials, target: Path) -> None:
        """Raise "denied" where a snapshot may not be saved for a peer. Root and the daemon's own
        user could write anywhere without it."""
        save = self._lists.options.save
        is_beside = save is not None and target.parent.resolve() == save.absolute().parent.resolve()
        if not is_beside and not self.is_self(who):
            raise RequestRejected(
                "denied", f"drain: field save: {who} may save beside the setting save only"
                f" ({'which is not given' if save is None else save.absolute()})",
            )  # fmt: skip

    def name(self, who: Credentials) -> str:
        """What the files call a key."""
        return self._lists.admins.get(who.key) or self._lists.clients.get(who.key, "")

    def check(self, who: Credentials) -> None:
        """Raise "denied" for who may not connect (any more)."""
        if not self.admits(who):
            raise RequestRejected("denied", f"{who} is not among those who may connect")

    def check_admin(self, who: Credentials, op: str) -> None:
        """Raise "denied" for who may not do that."""
        if not self.is_admin(who):
            raise RequestRejected(
                "denied", f"{op}: {who} is neither root, nor the daemon's own user, nor an admin "
                "(admin_users, curve_admins)",
            )  # fmt: skip


def read_lists(options: AccessOptions) -> Lists:
    """The rules with the files of public keys. Raises AccessError."""
    files = {"curve_clients": options.curve_clients, "curve_admins": options.curve_admins}
    given = {name: path for name, path in files.items() if path is not None}
    keys = {name: read_keys(name, path) for name, path in given.items()}
    return Lists(options, keys.get("curve_clients", {}), keys.get("curve_admins", {}))


def read_keys(name: str, path: Path) -> dict[str, str]:
    """The public keys of a file, and what they are called. Raises AccessError."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise AccessError(f"{name}: {path} is no file of at most {MOST_BYTES} bytes")
        if found.st_mode & 0o022:
            mode = stat.S_IMODE(found.st_mode)
            raise AccessError(f"{name}: {path} has mode {mode:04o}: others may write to it")
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise AccessError(f"{name}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise AccessError(f"{name}: cannot read {path}: {error}") from None
    keys = {}
    for number, line in enumerate(lines, 1):
        key, _, called = line.strip().partition(" ")
        if not key or key == "#":  # a key may begin with one, and has no blank behind it
            continue
        if not KEY.fullmatch(key):
            raise AccessError(
                f"{name}: line {number} of {path} does not begin with a public key of 40 "
                "characters; a comment has a blank behind its #"
            )
        keys[key] = called.strip() or f"line {number}"
    return keys
