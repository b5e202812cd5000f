"""Settings as lines of TOML, for people to read and for a file to take over."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from latentd.config import GROUPS, SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from latentd.sources import Effective


def toml(value: object) -> str:
    """A setting's value in TOML. Texts are printable, so JSON's way to write them is TOML's."""
    if isinstance(value, bool):
        return str(value).lower()
    return (
        str(value) if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)
    )


def effective_lines(effective: Effective) -> Iterator[str]:
    """All settings as a TOML file; each line says where its value comes from."""
    for group in GROUPS:
        yield f"# {group}"
        for name, row in SETTINGS.items():
            value = getattr(effective.config, name)
            if row.group != group:
                continue
            if value in (None, ""):
                yield f"# {name} is not given"
            else:
                yield f"{f'{name} = {toml(value)}':<48} # {effective.origins[name]}"
