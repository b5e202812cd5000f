"""Variables of the environment: those that clients read, and how an unknown one is refused."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Final

from latentd_client import keys

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX: Final = "LATENTD_"
ENDPOINT: Final = "LATENTD_ENDPOINT"
OF_CLIENTS: Final = (ENDPOINT, keys.FILE_VARIABLE, keys.SERVER_VARIABLE)
OF_KUBERNETES: Final = re.compile(
    r"LATENTD_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""What a container is told of a service whose name begins with latentd. Let through: nobody has
written it."""
LIKE: Final = 0.75
"""How much of two names is the same where one may be a slip of the other."""


def find_slip(environ: Iterable[str], program: str, where: str) -> str | None:
    """Why a program that reads OF_CLIENTS alone refuses an environment: a variable that would be
    the program's own (LATENTD_PROGRAM...), or that looks like one of those. All others are let
    through, as the daemon's settings may stand in the same environment. `where` tells of all."""
    names = [name.removeprefix(PREFIX) for name in OF_CLIENTS]
    for variable in sorted(environ):
        if variable in OF_CLIENTS or not variable.startswith(PREFIX):
            continue
        is_own = variable.startswith(PREFIX + program.upper())
        is_like = difflib.get_close_matches(variable.removeprefix(PREFIX), names, 1, LIKE)
        if is_like or (is_own and not OF_KUBERNETES.fullmatch(variable)):
            return unknown(variable, OF_CLIENTS, where)
    return None


def unknown(variable: str, known: Iterable[str], where: str) -> str:
    """The refusal of a variable that nobody reads; its value, which may be somebody's secret, is
    not told."""
    hint = nearest(variable, known)
    return f"unknown variable {variable} in the environment{hint} (unset it, or see {where})"


def nearest(word: str, known: Iterable[str]) -> str:
    """The words of a refusal that name the known one which is most like `word`, if one is."""
    near = difflib.get_close_matches(word, list(known), 1, LIKE)
    return f"; did you mean {near[0]}?" if near else ""
