"""Mutated messages and garbage at a live daemon, beside a client that behaves; `make fuzz`.

    python tests/fuzz.py [--messages 1000000] [--device auto] [--model tiny] [--rate 4000]
        [--attackers 2] [--seconds 10] [--seed 0]

The client decodes one text again and again: each time it must have the same bits, and the slowest
hundredth of its steps must not take more than twice what it takes beside processes that use the
processors as much as the attackers and do not know of the daemon. All that the attackers had must
come back: sessions, slots, descriptors, threads, memory. Ends with 1 otherwise.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Final

import attacks
from judging import judged
from latentd.commands.child import Child
from process_figures import grown
from siege import Raid, Siege
from timed_streams import MODELS, touch_all_pages
from victims import Victim

if TYPE_CHECKING:
    from collections.abc import Sequence

ATTACKS: Final = (*attacks.DATA, *attacks.CONTROL)
ENDLESS: Final = 1 << 60
OVER_QUIET: Final = 2.0
"""At most, of the p99 beside the attackers over the quiet one."""
GROWTH_KB: Final = 4096
"""At most, of resident memory, once every attack was there already."""
WARM_UP: Final = 4000
"""Messages of each attack before the first look at the daemon."""


def main() -> None:
    """Start a daemon, attack it, and look at what is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="tiny", choices=MODELS)
    parser.add_argument("--rate", type=float, default=4000.0)
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    flags = ["--device", args.device, "--lease-s", "2", "--grace-s", "1"]
    flags += ["--max-slots", "16", "--max-ctx", "512"]

    def judge(daemon: Child) -> list[str]:
        touch_all_pages(daemon.endpoint)
        siege = Siege(daemon.endpoint, args.attackers, args.rate, args.seed)
        return besiege(siege, daemon.process.pid, args.messages, args.seconds)

    misses = judged(args.model, flags, judge)
    print("misses:", misses or "none")
    sys.exit(bool(misses))


def besiege(siege: Siege, pid: int, messages: int, seconds: float) -> list[str]:
    """All attacks, with figures; what they did that they must not."""
    victim = Victim(siege.endpoint)
    for name in ATTACKS:
        siege.raid(name, WARM_UP, seconds / 5)
    before = siege.settled(pid, 1)
    victim.start(seconds)
    print(quiet := Raid("quiet", 0, victim.times(), 0.0), flush=True)
    raids = []
    for name in ATTACKS:
        if name in attacks.MUTATING:
            raid = siege.raid(name, messages // len(attacks.MUTATING), math.inf, victim)
        else:
            raid = siege.raid(name, ENDLESS, seconds, victim)
        print(raid, flush=True)
        raids.append(raid)
    burnt = siege.burn(max(raid.cpu_share for raid in raids), seconds, victim)
    print(burnt, flush=True)
    after = siege.settled(pid, 1)
    print(f"the daemon before: {before}; after: {after}")
    victim.close()
    siege.close()
    return [*grown(before, after, GROWTH_KB), *slowed(raids, max(quiet.p99_us, burnt.p99_us))]


def slowed(raids: Sequence[Raid], quiet_us: float) -> list[str]:
    """The attacks beside which the client's p99 was too far above the quiet one. Those that have
    work done are left out: their rows share the device with everybody's."""
    return [
        f"p99 {raid.p99_us:.0f} us beside {raid.name}, quiet {quiet_us:.0f}"
        for raid in raids
        if raid.name not in attacks.WORKING and raid.p99_us > OVER_QUIET * quiet_us
    ]


if __name__ == "__main__":
    main()
