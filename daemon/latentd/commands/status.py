"""`latentd status`: health and counters of a running daemon, from its control socket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from latentd.commands.connecting import add_control, connect_control
from latentd.commands.parsing import Parser, add_command

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from latentd_client.protocol import Header

MOST_LINES = 20
"""Sessions on a screen."""


FOR_PROGRAMS = ("histograms", "build")
"""Figures that the screen leaves out: `--json` and `latentd metrics` have them."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(subparsers, "status", "show a running daemon's health and counters", run)
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    add_control(parser)


def run(args: argparse.Namespace) -> int:
    """Ask once and print."""
    with connect_control(args) as control:
        health, stats, sessions = control.health(), control.stats(), control.sessions()
    if args.json:
        print(json.dumps({"health": health, "stats": stats, "sessions": sessions}, indent=2))
    else:
        print("\n".join((*screen(health, stats), *session_lines(sessions))))
    return 0


def session_lines(sessions: list[Header]) -> Iterator[str]:
    """Whose the sessions are: a line each, those of the last that came."""
    if sessions:
        yield f"{'session':>8}{'slots':>7}{'runs':>6}{'silent s':>10}  of"
    for told in sessions[:MOST_LINES]:
        yield (
            f"{told['number']:>8}{told['slots']:>7}{told['running']:>6}{told['silent_s']:>10.1f}  "
            + _owner(told)
        )
    if len(sessions) > MOST_LINES:
        yield f"and {len(sessions) - MOST_LINES} more (--json)"


def _owner(told: Header) -> str:
    """Who uses a session."""
    if told["key"]:
        return f"{told['name'] or 'unlisted'}, key {told['key']}, at {told['address']}"
    if told["user"] is not None:
        return f"user {told['user']}, group {told['group']}, process {told['process']}"
    return f"nobody known, at {told['address']}" if told["address"] else "nobody since the restart"


def screen(health: Header, stats: dict[str, Any]) -> Iterator[str]:
    """The lines of one screen; counters that this version does not know come last."""
    rest = {key: value for key, value in stats.items() if key not in FOR_PROGRAMS}
    yield (
        f"{health['state']}, up {duration(health['uptime_s'])}, pid {health['pid']}, "
        f"boot {health['boot_id']}"
    )
    for name, used, total in (
        ("slots", "slots_used", "slots_total"),
        ("pages", "kv_pages_used", "kv_pages_total"),
    ):
        if used in rest and total in rest:
            yield f"{name:<8}{rest.pop(used)} of {rest.pop(total)} in use"
    times = {key: rest.pop(key, {}) for key in ("steps_by_bucket", "device_us", "step_us")}
    if times["steps_by_bucket"]:
        yield f"{'bucket':>8}{'steps':>12}{'device p50':>13}{'p99':>9}{'step p50':>13}{'p99':>9} us"
    for bucket, steps in times["steps_by_bucket"].items():
        device, step = (times[key].get(bucket, {}) for key in ("device_us", "step_us"))
        yield (
            f"{bucket:>8}{steps:>12}{_number(device, 'p50'):>13}{_number(device, 'p99'):>9}"
            f"{_number(step, 'p50'):>13}{_number(step, 'p99'):>9}"
        )
    for key, value in rest.items():
        name, _, unit = key.rpartition("_")
        if unit not in ("s", "us"):
            name, unit = key, ""
        yield f"{name.replace('_', ' ')}: {_text(value)} {unit}".rstrip()


def duration(seconds: float) -> str:
    """A time in its two largest units."""
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days:.0f} d {hours % 24:.0f} h"
    if hours:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"


def _text(value: object) -> str:
    """A counter, a time to a thousandth of its unit, or several of them by name."""
    if isinstance(value, dict):
        inner = (f"{name.replace('_', ' ')} {_text(item)}" for name, item in value.items())
        return ", ".join(inner) or "none"
    return str(round(value, 3) if isinstance(value, float) else value)


def _number(times: dict[str, float], key: str) -> str:
    return f"{times[key]:.1f}" if key in times else "-"
