"""CURVE keys: the files that `latentd keygen` writes, and what a client over tcp needs of them.

libzmq does the cryptography; a key is told as its 40 characters (Z85, https://rfc.zeromq.org/32).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.auth import load_certificate

from latentd_client.errors import KeyFault

FILE_VARIABLE: Final = "LATENTD_CLIENT_KEY"
SERVER_VARIABLE: Final = "LATENTD_SERVER_KEY"
KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
MOST_BYTES: Final = 4096
"""Of a file with a key pair."""
_FILE: Final = """\
# A CURVE key pair of latentd. Whoever reads this file is its owner to the daemon: keep it to
# yourself. The public key is for the other side.
metadata
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


@dataclass(frozen=True)
class KeyPair:
    """A public key, and the secret one, which is never shown."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class CurveKeys:
    """What a client needs where tcp is encrypted: its own pair, and the daemon's public key, by
    which it knows the daemon."""

    own: KeyPair
    server: str

    @classmethod
    def read(cls, path: str | os.PathLike[str], server_key: str) -> CurveKeys:
        """The pair of a file of `latentd keygen`, and the daemon's public key. Raises KeyFault."""
        return cls(read_pair(path), check_key(server_key, "the daemon's key"))

    @classmethod
    def of_environment(cls) -> CurveKeys | None:
        """The keys that LATENTD_CLIENT_KEY (a file) and LATENTD_SERVER_KEY name, if they do. Raises
        KeyFault."""
        path, server_key = os.environ.get(FILE_VARIABLE), os.environ.get(SERVER_VARIABLE)
        if not path and not server_key:
            return None
        if not path or not server_key:
            raise KeyFault(f"{FILE_VARIABLE} and {SERVER_VARIABLE} go together: set both or none")
        return cls.read(path, server_key)


def keys_for(endpoint: str, keys: CurveKeys | None) -> CurveKeys | None:
    """What a connection to an endpoint takes: nothing on ipc, where the system says who connects;
    else the keys given, or those of the environment. Raises KeyFault."""
    if keys is not None and not isinstance(keys, CurveKeys):
        raise KeyFault(f"keys are a {type(keys).__name__}, must be a latentd_client.CurveKeys")
    if not endpoint.startswith("tcp://"):
        return None
    return keys or CurveKeys.of_environment()


def check_key(text: str, what: str) -> str:
    """A key as it is told. Raises KeyFault, which does not tell it: it may be a secret one."""
    if not isinstance(text, str) or not KEY.fullmatch(text):
        raise KeyFault(f"{what} is not a key: 40 characters, as `latentd keygen` prints them")
    return text


def read_pair(path: str | os.PathLike[str]) -> KeyPair:
    """The key pair of a file, which only its owner may read. Raises KeyFault."""
    path = os.path.expanduser(path)
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise KeyFault(f"key file {path}: is no file of `latentd keygen`")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise KeyFault(
                f"key file {path}: mode {mode:04o} lets others read it; chmod 600 {path}"
            )
        public, secret = load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise KeyFault(f"key file {path}: {reason}") from None
    told = [key.decode("ascii", "replace") for key in (public, secret or b"")]
    pair = KeyPair(*(check_key(key, f"key file {path}: one of its keys") for key in told))
    if zmq.curve_public(pair.secret.encode()).decode() != pair.public:
        raise KeyFault(f"key file {path}: its public key is not that of its secret key")
    return pair


def write_pair(path: str | os.PathLike[str]) -> KeyPair:
    """A new key pair in a new file that only its owner may read. Raises KeyFault; a file that is
    there stays as it is."""
    path = os.path.expanduser(path)
    pair = _new_pair()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyFault(f"key file {path}: {error.strerror}; nothing is written") from None
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(_FILE.format(public=pair.public, secret=pair.secret))
    except OSError as error:  # half a key is of no use
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise KeyFault(f"key file {path}: {error.strerror}; nothing is written") from None
    return pair


def _new_pair() -> KeyPair:
    """One whose public key begins with a letter or digit: it will be a word of command lines."""
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        if public[0].isalnum():
            return KeyPair(public, secret)
