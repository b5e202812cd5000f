"""`latentd serve`: from the configuration to a serving process."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from latentd.commands.parsing import (
    EXIT_CONFIG,
    Parser,
    add_command,
    add_settings,
    read_config,
    require_daemon,
)
from latentd.config import SETTINGS
from latentd.notify import Notifier
from latentd.sources import unknown_variables

if TYPE_CHECKING:
    import argparse

log = logging.getLogger("latentd")


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(subparsers, "serve", "load a model and serve it", run, EXIT_CONFIG)
    groups = dict.fromkeys(row.group for row in SETTINGS.values())
    add_settings(parser, groups)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    config = read_config(args)
    require_daemon("serve")
    start_logging(config.log_level)
    for line in unknown_variables():
        log.warning("%s", line)
    from latentd.serve import Daemon  # needs torch

    engine_options, server_options = config.engine_options(), config.server_options()

    def reload() -> float:
        fresh = read_config(args)
        logging.getLogger().setLevel(fresh.log_level.upper())
        for name, row in SETTINGS.items():
            if not row.reloadable and getattr(fresh, name) != getattr(config, name):
                log.warning("%s has changed; a restart is needed for it", name)
        log.info("reloaded: log_level %s, drain_s %g", fresh.log_level, fresh.drain_s)
        return fresh.drain_s

    daemon = Daemon(config.drain_s, reload, Notifier(), config.save, config.restore)
    return daemon.run(engine_options, server_options)


def start_logging(level: str) -> None:
    """Log to stderr; under systemd with the level as a prefix instead of the time."""
    under_systemd = "JOURNAL_STREAM" in os.environ
    style = "%(message)s" if under_systemd else "%(asctime)s %(levelname)s %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JournalFormatter(style) if under_systemd else logging.Formatter(style))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _JournalFormatter(logging.Formatter):
    """Puts the syslog level before the text, as sd-daemon(3) describes."""

    def format(self, record: logging.LogRecord) -> str:
        """Format with a prefix such as <6>."""
        level = 3 if record.levelno >= 40 else 4 if record.levelno >= 30 else 6
        return f"<{level}>{super().format(record)}"
