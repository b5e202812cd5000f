"""`latentd serve`: from the configuration to a serving process."""

from __future__ import annotations

import faulthandler
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from latentd.access import read_lists
from latentd.commands.parsing import (
    EXIT_CONFIG,
    Parser,
    add_command,
    add_settings,
    read_config,
    require_daemon,
)
from latentd.config import GROUPS, RELOADABLE, SETTINGS
from latentd.logs import start_logging
from latentd.notify import Notifier
from latentd.preflight import check_forms
from latentd.snapshot_files import check_target

if TYPE_CHECKING:
    import argparse

    from latentd.config import Config
    from latentd.options import LifeOptions

log = logging.getLogger("latentd")


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(subparsers, "serve", "load a model and serve it", run, EXIT_CONFIG)
    add_settings(parser, GROUPS)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    config = read_config(args)
    notifier = Notifier()
    notifier.loading("starting")  # torch alone takes seconds to import, minutes from a cold disk
    faulthandler.enable()  # the watchdog's SIGABRT leaves the stacks of all threads in the log
    require_daemon("serve")
    start_logging(config.log_level)
    from latentd.serve import Daemon  # needs torch

    def reload() -> LifeOptions:
        return reread(args, config)

    daemon = Daemon(config.life_options(), reload, notifier)
    return daemon.run(config.engine_options(), config.server_options())


def reread(args: argparse.Namespace, config: Config) -> LifeOptions:
    """Read the configuration of a running daemon again: the log level changes at once, what else
    may change is the caller's, and what may not is named. Raises ConfigError, EndpointError,
    SnapshotError where nothing could be saved, or AccessError, also where only a restart would need
    what is wrong; then nothing has changed."""
    fresh = read_config(args)
    fresh.engine_options()
    check_forms(fresh.server_options())
    read_lists(fresh.access_options())
    if fresh.save is not None:
        check_target(fresh.save.absolute())
    changed = [name for name in SETTINGS if getattr(fresh, name) != getattr(config, name)]
    waiting = tuple(name for name in changed if name not in RELOADABLE)
    for name in waiting:
        log.warning("%s has changed; a restart is needed for it", name)
    logging.getLogger().setLevel(fresh.log_level.upper())
    values = {name: getattr(fresh, name) for name in RELOADABLE}
    given = [f"{name} {value}" for name, value in values.items() if value not in (None, "")]
    log.info("reloaded: %s", ", ".join(given))
    return replace(fresh.life_options(), waiting=waiting)
