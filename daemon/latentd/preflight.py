"""What is looked at before weights are loaded: limits of the process, and where it will serve."""

from __future__ import annotations

import resource
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from latentd.access import Access, AccessError
from latentd.endpoint import Binding, EndpointError, check_directory, check_form
from latentd.model.fields import CheckpointError, read_files
from latentd.snapshot_files import SnapshotError, check_target
from latentd_client import protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from latentd.options import ServerOptions


def raise_file_limit() -> None:
    """Let this process open as many files as it may, usually far more than the 1024 of a shell:
    each client has two, and libzmq (tcp with CURVE) aborts the process when none is left."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    with suppress(OSError, ValueError):  # then the limit stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_forms(options: ServerOptions) -> tuple[str, str]:
    """Both endpoints. Raises EndpointError for those that no machine could serve; nothing is looked
    at."""
    endpoint = options.endpoint
    control = options.control_endpoint or protocol.control_endpoint(endpoint)
    if control == endpoint and not control.endswith((":0", ":*")):
        raise EndpointError(f"endpoint and control_endpoint are both {control}; they must differ")
    for each in (endpoint, control):
        check_form(each, is_guarded=options.access.curve_key is not None)
    return endpoint, control


def check_endpoints(
    options: ServerOptions, handed_over: Mapping[str, socket.socket] | None = None
) -> None:
    """Bind both endpoints and let go of them, so that a path that cannot be served is refused
    before weights are loaded. Those of `handed_over` are bound already, and must be among
    them: nobody else would serve who connects there. Raises EndpointError, AccessError."""
    endpoints = check_forms(options)
    handed_over = handed_over or {}
    for other in handed_over:
        if other not in endpoints:
            raise EndpointError(
                f"the service manager listens at {other}, but endpoint is {endpoints[0]} and "
                f"control_endpoint {endpoints[1]}: give latentd.socket the same paths "
                "(ListenStream=), or mask it"
            )
    is_guarded = Access(options.access).pair is not None
    with ExitStack() as bound:
        for endpoint in endpoints:
            given = handed_over.get(endpoint)
            binding = Binding(endpoint, given, is_guarded)
            bound.callback(binding.release)
            if given is None:
                bound.enter_context(binding.socket)


def hindrances(options: ServerOptions, model_dir: Path | None) -> Iterator[str]:
    """What a start of this process's user would stop at on this machine as it is now, beside what
    is bound already: the config.json of a model, files of keys, directories of sockets, the place
    of snapshots. Nothing is made."""
    looks: list[Callable[[], object]] = [partial(Access, options.access)]
    for endpoint in check_forms(options):
        if endpoint.startswith("ipc://"):
            looks.append(partial(check_directory, endpoint[6:], may_make=False))
    if (save := options.access.save) is not None:
        looks.append(partial(check_target, save.absolute()))
    if model_dir is not None:
        looks.append(partial(read_files, model_dir))
    for look in looks:
        try:
            look()
        except (AccessError, CheckpointError, EndpointError, SnapshotError) as error:
            yield str(error)
