"""The life of the serving process: start, READY, drain, reload and the exit code.

It knows signals and the service manager; it does not know the configuration (the command passes
plain options) nor what the engine and the server do.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from latentd import handed_over, snapshot, snapshot_files
from latentd.backend import start_engine
from latentd.freed_memory import keep_freed_memory
from latentd.leaving import leaving_on_device_fault, leaving_on_failure
from latentd.operations import DeviceFault
from latentd.preflight import check_endpoints, raise_file_limit
from latentd.reload import UNUSABLE, Reload
from latentd.server import Server
from latentd.snapshot_files import SnapshotError
from latentd.summary import summary_lines
from latentd_kernels.driver import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from latentd.engine import Engine
    from latentd.notify import Notifier
    from latentd.options import EngineOptions, LifeOptions, ServerOptions

EXIT_UNSAVED: Final = 74
"""EX_IOERR of sysexits.h: the daemon has left as asked, but could not save; not restarted."""
STOP_MARGIN_S: Final = 30.0
"""What the last launch and the last replies may take once the time of a drain is over."""
SWITCH_INTERVAL_S = 1e-4
"""How long another thread may hold the interpreter while the engine waits for it (measured:
a burst of pure Python stalls the engine 5-9 ms with the default of 5 ms, 0.7-4.7 with this)."""

log = logging.getLogger("latentd")


class Daemon:
    """One serving process. `reload` reads the configuration again and returns what may change
    while serving; it raises one of UNUSABLE when that cannot be used, and nothing has changed
    then."""

    def __init__(
        self, options: LifeOptions, reload: Callable[[], LifeOptions], notifier: Notifier
    ) -> None:
        self._restore_from = None if options.restore is None else options.restore.absolute()
        self._is_saving = False
        self._reload = reload
        self._notifier = notifier
        self._server: Server | None = None
        self._status = ""
        self._reloaded = Reload()
        self._is_stopping = False
        self._take_over(options)

    def run(self, engine_options: EngineOptions, server_options: ServerOptions) -> int:
        """Start, serve until a signal, and return the exit code. Raises what start-up raises."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._terminate)
        signal.signal(signal.SIGHUP, self._hang_up)
        begin = time.monotonic()
        raise_file_limit()
        keep_freed_memory()
        listening = handed_over.take()
        check_endpoints(server_options, listening)
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
            tick = self._notifier.tick
            fresh = replace(server_options, drain_s=self._drain_s, access=self._access)
            server = self._server = Server(engine, fresh, tick, listening)
            server.reload = self._reloaded
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
            self._status = f"serving {engine.info.name}"
            self._notifier.send(READY=1, STATUS=self._status + self._reloaded.note)
            with leaving_on_failure():
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
        except (DeviceFault, DriverError):
            raise
        except Exception:  # it was asked to leave: a restart would not bring the slots back
            log.critical("snapshot %s: nothing is saved", target, exc_info=True)
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
        self._notifier.send(STOPPING=1)
        self._notifier.loading("draining", self._drain_s + STOP_MARGIN_S)
        self._server.stop(self._drain_s)

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        """SIGHUP: take over what can change without a restart, and tell where all can see it what
        has come of it."""
        self._notifier.reloading()
        try:
            options = self._reload()
            self._take_over(options)
            self._reloaded = Reload(waiting=options.waiting)
        except UNUSABLE as error:
            log.error("reload failed, the old settings stay: %s", error)
            self._reloaded = self._reloaded._replace(failure=str(error))
        if self._server is not None:
            self._server.reload = self._reloaded
        if self._status and not self._is_stopping:
            self._notifier.send(READY=1, STATUS=self._status + self._reloaded.note)

    def _take_over(self, options: LifeOptions) -> None:
        """Have these settings from now on; while loading, once there is a server."""
        if self._server is not None:
            self._server.access.reload(options.access)
            self._server.drain_s = options.drain_s
        self._save_to = None if options.save is None else options.save.absolute()
        self._drain_s = options.drain_s
        self._access = options.access
