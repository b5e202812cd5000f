"""Who may ask."""

from __future__ import annotations

import hmac
import ipaddress
import re
from reprlib import repr as short
from typing import Final

from latentd_openai.errors import ApiError

HOST: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/@\[\]]+))(?::[0-9]{1,5})?")
"""A Host header: an IPv6 address in brackets, or a name; perhaps a port."""


def check_access(host: str, authorization: str, key: str | None) -> None:
    """With a key: whoever sends it. Without one: programs of this machine, but no page of the web
    whose name leads here, which a browser tells in the Host header. Raises ApiError."""
    found = HOST.fullmatch(host)
    if key is None and not (found and is_loopback(found[1] or found[2])):
        text = f"the host is {short(host)}: without an API key only this machine's names are served"
        raise ApiError(403, text, code="denied")
    if key is not None and not hmac.compare_digest(
        authorization.encode(), f"Bearer {key}".encode()
    ):
        text = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
        raise ApiError(401, text, code="invalid_api_key")


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, for itself only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
