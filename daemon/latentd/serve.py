"""The life of the serving process: start, READY, drain, reload and the exit code.

It knows signals and the service manager; it does not know the configuration (the command passes
plain options) nor what the engine and the server do.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import sys
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Final

import torch
import zmq

from latentd import snapshot, snapshot_files
from latentd.backend import start_engine
from latentd.endpoint import Binding, EndpointError
from latentd.leaving import leaving_on_device_fault
from latentd.server import Server
from latentd.snapshot_files import SnapshotError
from latentd.summary import summary_lines
from latentd_client import protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from latentd.engine import Engine
    from latentd.notify import Notifier
    from latentd.options import EngineOptions
    from latentd.server import ServerOptions

EXIT_UNSAVED: Final = 74
"""EX_IOERR of sysexits.h: the daemon has left as asked, but could not save; not restarted."""
SWITCH_INTERVAL_S = 1e-4
"""How long another thread may hold the interpreter while the engine waits for it (measured:
a burst of pure Python stalls the engine 5-9 ms with the default of 5 ms, 0.7-4.7 with this)."""

log = logging.getLogger("latentd")


class Daemon:
    """One serving process. `reload` reads the configuration again and returns the new drain_s;
    it raises ValueError when that cannot be used. Slots are saved at `save` and were at `restore`.
    """

    def __init__(
        self, drain_s: float, reload: Callable[[], float], notifier: Notifier,
        save: Path | None = None, restore: Path | None = None,
    ) -> None:  # fmt: skip
        self._save_to = None if save is None else save.absolute()
        self._restore_from = None if restore is None else restore.absolute()
        self._is_saving = False
        self._drain_s = drain_s
        self._reload = reload
        self._notifier = notifier
        self._server: Server | None = None
        self._is_stopping = False

    def run(self, engine_options: EngineOptions, server_options: ServerOptions) -> int:
        """Start, serve until a signal, and return the exit code. Raises what start-up raises."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._terminate)
        signal.signal(signal.SIGHUP, self._hang_up)
        begin = time.monotonic()
        raise_file_limit()
        check_endpoints(server_options)
        if self._save_to is not None:
            snapshot_files.check_target(self._save_to)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))  # one core for the sockets
        with leaving_on_device_fault():
            try:
                engine = start_engine(engine_options, self._report)
            except BaseException:
                if not self._is_stopping:
                    raise
            if self._is_stopping:  # whatever failed on the way out, or took the SystemExit
                return 0
            server = self._server = Server(engine, server_options, on_tick=self._notifier.tick)
            held = self._restore(engine, server)
            if self._is_stopping:
                return 0  # and the snapshot stays for another start
            server.bind()
            self._consume(held)
            endpoints = (server.endpoint, server.control_endpoint)
            total_s = time.monotonic() - begin
            for line in summary_lines(engine.info, engine.startup, endpoints, total_s):
                log.info("%s", line)
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            gc.collect()
            gc.freeze()
            self._notifier.send(READY=1, STATUS=f"serving {engine.info.name}")
            server.serve()
            self._notifier.send(STOPPING=1)
            code = self._save(engine, server)
        log.info("stopped")
        return code

    def _restore(self, engine: Engine, server: Server) -> str | None:
        """Bring the last snapshot back, if there is one; returns what it held. The sockets come
        later: nobody asks for a session that is not there yet. Raises SnapshotError."""
        source = self._restore_from
        if source is None:
            return None
        held = snapshot.restore(engine, server.sessions, source, self._notifier.loading)
        if held is None:
            log.warning("nothing to restore: there is no snapshot at %s", source)
        return held

    def _consume(self, held: str | None) -> None:
        """Take the restored snapshot away, before anybody is served. Raises SnapshotError."""
        if held is not None and self._restore_from is not None:
            snapshot_files.consume(self._restore_from)
            log.info("restored %s from %s", held, self._restore_from)

    def _save(self, engine: Engine, server: Server) -> int:
        """Save what the daemon has, if that was asked for; returns the exit code."""
        target = server.save_to or self._save_to
        if target is None:
            return 0
        begin = time.monotonic()
        self._is_saving = True
        try:
            held = snapshot.save(engine, server.sessions, target, self._notifier.loading)
        except SnapshotError as error:
            log.error("%s", error)
            return EXIT_UNSAVED
        finally:
            self._is_saving = False
        log.info("saved %s at %s in %.1f s", held, target, time.monotonic() - begin)
        return 0

    def _report(self, text: str) -> None:
        log.info("%s", text)
        self._notifier.loading(text)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """First SIGTERM or SIGINT: drain. Second: stop at once; while saving, leave without a
        snapshot. While loading: leave."""
        if self._is_saving and self._is_stopping:
            self._is_saving = False
            raise SnapshotError("a signal has ended the saving; nothing is saved")
        if self._server is None:
            self._is_stopping = True
            self._notifier.send(STOPPING=1)
            raise SystemExit(0)
        if self._is_stopping:
            self._server.abort()
            return
        self._is_stopping = True
        log.info("%s: draining for at most %g s", signal.Signals(number).name, self._drain_s)
        self._notifier.send(STOPPING=1, STATUS="draining")
        self._server.stop(self._drain_s)

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        """SIGHUP: take over what can change without a restart."""
        self._notifier.reloading()
        try:
            self._drain_s = self._reload()
        except ValueError as error:
            log.error("reload failed, the old settings stay: %s", error)
        if self._server is not None:
            self._notifier.send(READY=1)


def raise_file_limit() -> None:
    """Let this process open as many files as it may, usually far more than the 1024 of a shell:
    libzmq aborts the process when a client connects and no descriptor is left."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    with suppress(OSError, ValueError):  # then the limit stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_endpoints(options: ServerOptions) -> None:
    """Bind both endpoints and let go of them, so that a path that cannot be served is refused
    before weights are loaded. Raises EndpointError."""
    control = options.control_endpoint or protocol.control_endpoint(options.endpoint)
    if control == options.endpoint and control.startswith("ipc://"):
        raise EndpointError(f"endpoint and control_endpoint are both {control}; they must differ")
    with zmq.Context() as context, ExitStack() as bound:
        for endpoint in (options.endpoint, control):
            router = bound.enter_context(closing(context.socket(zmq.ROUTER)))
            bound.callback(Binding(router, endpoint).release)
