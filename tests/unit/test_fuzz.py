"""A short `make fuzz`: mutated messages at the codec and at a daemon, garbage on its sockets."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attacks
import fuzz
import fuzz_codec
from latentd.commands.child import Child
from mutations import mutated, requests
from process_figures import grown
from siege import Siege
from timed_streams import source
from victims import Victim

MESSAGES = {"mutate": 15_000, "mutate_foreign": 15_000, "mutate_control": 300, "flood": 10_000}
SECONDS = {"garbage": 1.0, "come_and_go": 1.0, "heartbeats": 1.0}


@settings(max_examples=300)
@given(draw=st.randoms(use_true_random=False), which=st.integers(0, 19))
def test_a_mutated_message_is_read_or_refused(draw: random.Random, which: int) -> None:
    frames = mutated(requests("s" * 48, fuzz_codec.SEAT, 7)[which], draw)
    fuzz_codec.check_frames(frames, draw)
    fuzz_codec.check_header(frames)


def test_20000_mutated_messages_break_no_promise_of_the_codec() -> None:
    fuzz_codec.fuzz(20_000 // fuzz_codec.EACH)


@pytest.fixture
def daemon() -> Iterator[Child]:
    """A daemon of its own process, whose clients are soon forgotten."""
    with tempfile.TemporaryDirectory(prefix="latentd-") as folder:
        flags = [*source("tiny", Path(folder)), "--device", "cpu", "--lease-s", "1"]
        with Child(Path(folder), [*flags, "--grace-s", "0.5"]) as daemon:
            daemon.wait_ready(120, lambda status: None)
            yield daemon


def test_40000_messages_and_garbage_harm_neither_the_daemon_nor_a_client_beside(
    daemon: Child,
) -> None:
    siege = Siege(daemon.endpoint, attackers=1, rate=1e6, seed=0)
    victim = Victim(siege.endpoint)
    try:
        siege.raid("mutate", 500, 5.0)
        before = siege.settled(daemon.process.pid, 1)
        for name, count in MESSAGES.items():
            assert siege.raid(name, count, 60.0, victim).times
        for name, seconds in SECONDS.items():
            assert siege.raid(name, fuzz.ENDLESS, seconds, victim).count > 10
        after = siege.settled(daemon.process.pid, 1)
    finally:
        siege.close()
        victim.close()
    assert grown(before, after, growth_kb=16384) == []
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


def test_every_attack_is_in_the_short_run() -> None:
    assert {*MESSAGES, *SECONDS} == {*attacks.DATA, *attacks.CONTROL}
