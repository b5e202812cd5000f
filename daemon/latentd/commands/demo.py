"""`latentd demo`: a daemon on the bundled model, text through the client, and what a step costs."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from latentd import demo
from latentd.commands.child import Child
from latentd.commands.connecting import add_sampling, sampling_of
from latentd.commands.generate import continuation, print_text, stop_tokens
from latentd.commands.latency import Case, measure
from latentd.commands.parsing import EXIT_CONFIG, Parser, add_command, require_daemon
from latentd.engine_figures import RING_STEPS
from latentd_client import Client
from latentd_client.arguments import whole
from latentd_client.text import ByteCodec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

START_TIMEOUT_S = 170.0
"""Longest wait for READY: importing torch, capture and self-test on a slow machine."""
SERVE_FLAGS = ("--max-slots", "8", "--max-ctx", "1024", "--drain-s", "2")
"""A pool small enough for any machine."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "demo", "start a daemon on the bundled model, decode text, show latencies",
        run, EXIT_CONFIG,
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="default %(default)s"
    )
    parser.add_argument(
        "--prompt", default=demo.DEFAULT_PROMPT, metavar="TEXT", help="text to start"
    )
    parser.add_argument(
        "--max-steps", type=whole, default=256, metavar="N",
        help="most bytes to generate (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the daemon running until Ctrl-C, for other clients",
    )
    add_sampling(parser, temperature=0.7)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration."""
    if not args.prompt:
        args.parser.error("the prompt is empty: there is nothing to continue")
    require_daemon("demo")
    begin = time.monotonic()
    flags = ["--model", str(demo.model_dir()), "--name", "demo", "--device", args.device]
    print(f"starting a daemon on the bundled model, device {args.device}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="latentd-") as folder,
        Child(Path(folder), [*flags, *SERVE_FLAGS]) as child,
    ):
        child.wait_ready(START_TIMEOUT_S, lambda status: print(f"  {status}", flush=True))
        print(f"ready after {time.monotonic() - begin:.1f} s at {child.endpoint}")
        show_text(child.endpoint, args)
        show_latencies(child.endpoint)
        if args.keep:
            wait(child)
        code = child.stop()
    print(f"the daemon has stopped (exit code {code})")
    return code


def show_text(endpoint: str, args: argparse.Namespace) -> None:
    """Print the prompt and its continuation as it comes, then how long it took."""
    with Client(endpoint) as client:
        print(f"{client.info.model} on {client.info.device}, {client.info.numerics}\n")
        print(args.prompt, end="", flush=True)
        times = [time.monotonic()]

        def timed(tokens: Iterator[int]) -> Iterator[int]:
            for token in tokens:
                times.append(time.monotonic())
                yield token

        stop = stop_tokens(client.info, None)
        prompt = demo.encode(args.prompt)
        tokens = timed(continuation(client, prompt, args.max_steps, stop, sampling_of(args)))
        print_text(tokens, ByteCodec(), prompt)
    first_ms = (times[1] - times[0]) * 1e3 if len(times) > 1 else 0.0
    print(f"\n\nprompt of {len(prompt)} tokens: first token after {first_ms:.1f} ms")
    if len(times) > 2:
        rate = (len(times) - 2) / (times[-1] - times[1])
        print(f"stream of {len(times) - 1} tokens: {rate:.0f} tokens/s")


def show_latencies(endpoint: str) -> None:
    """Print what single steps cost."""
    step = measure(endpoint, Case("step", 1, 1, context=16, steps=RING_STEPS, seconds=4.0))
    over_us = step.over_device_us
    over = "" if over_us is None else f", {over_us:.0f} us of it beyond the device's own time"
    print(
        f"{step.requests} single steps: p50 {step.p50_us:.0f} us, p99 {step.p99_us:.0f} us{over}",
        flush=True,
    )


def wait(child: Child) -> None:
    """Keep the daemon until Ctrl-C or its end."""
    print("\nstill running; in another terminal:")
    print(f"  latentd generate --endpoint {child.endpoint} 'In the beginning '")
    print(f"  latentd status --endpoint {child.endpoint}\nCtrl-C ends it", flush=True)
    try:
        child.process.wait()
    except KeyboardInterrupt:
        print()
