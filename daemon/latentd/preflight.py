"""What is looked at before weights are loaded: limits of the process, and where it will serve."""

from __future__ import annotations

import resource
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

import zmq

from latentd.access import Access
from latentd.endpoint import Binding, EndpointError
from latentd_client import protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    from latentd.options import ServerOptions


def raise_file_limit() -> None:
    """Let this process open as many files as it may, usually far more than the 1024 of a shell:
    libzmq aborts the process when a client connects and no descriptor is left."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    with suppress(OSError, ValueError):  # then the limit stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_endpoints(options: ServerOptions, handed_over: Collection[str] = ()) -> None:
    """Bind both endpoints and let go of them, so that a path that cannot be served is refused
    before weights are loaded. Those of `handed_over` are bound already, and must be among
    them: nobody else would serve who connects there. Raises EndpointError, AccessError."""
    control = options.control_endpoint or protocol.control_endpoint(options.endpoint)
    if control == options.endpoint and control.startswith("ipc://"):
        raise EndpointError(f"endpoint and control_endpoint are both {control}; they must differ")
    for other in handed_over:
        if other not in (options.endpoint, control):
            raise EndpointError(
                f"the service manager listens at {other}, but endpoint is {options.endpoint} and "
                f"control_endpoint {control}: give latentd.socket the same paths (ListenStream=), "
                "or mask it"
            )
    is_guarded = Access(options.access).pair is not None
    with zmq.Context() as context, ExitStack() as bound:
        for endpoint in (options.endpoint, control):
            router = bound.enter_context(closing(context.socket(zmq.ROUTER)))
            is_bound = endpoint in handed_over
            bound.callback(Binding(router, endpoint, is_bound, is_guarded).release)
