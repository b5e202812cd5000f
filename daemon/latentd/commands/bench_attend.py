"""`latentd bench attend`: what attention of one layer costs an engine that runs the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from latentd.commands.bench_cases import ROWS, add_case_flags, print_json
from latentd.commands.latency import WARM_UP
from latentd.commands.parsing import Parser, add_command
from latentd.engine_figures import RING_STEPS
from latentd.options import MAX_SLOTS
from latentd_client import Client
from latentd_client.arguments import up_to
from latentd_kernels.geometry import ROPE_DIM, ROW_DIM

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from latentd_client import DaemonInfo, Slot


@dataclass(frozen=True)
class Measured:
    """The outcome of a case, in microseconds of a request as the client sees it; `token_us` is the
    median of all layers of a position, one after the other. `device_us` is the device's median of
    its last attentions (at most RING_STEPS), None where others than this case's are among them."""

    rows: int
    requests: int
    p50_us: float
    p90_us: float
    p99_us: float
    token_us: float
    device_us: float | None


def add(parts: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(
        parts, "attend", "latency of attention of one layer at a time, for engines that run the "
        "rest of the model", run,
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=up_to(MAX_SLOTS), action="append", default=[], metavar="N",
        help="slots in a request; may be given again (default 1, 2, 4, ... that fit)",
    )  # fmt: skip
    add_case_flags(parser, 128, "positions")


def run(args: argparse.Namespace) -> int:
    """Measure case by case, printing each as it is done."""
    with Client(args.endpoint, timeout_s=args.timeout_s) as client:
        info = client.info
        if args.context >= info.max_ctx:
            args.parser.error(f"--context {args.context}: at most {info.max_ctx - 1} here")
        most = info.buckets[-1]
        for rows in args.rows:
            if rows > most:
                args.parser.error(f"--rows {rows}: at most {most} here")
        counts = args.rows or [rows for rows in ROWS if rows <= most]
        results = (measure(client, rows, args) for rows in counts)
        if args.json:
            print_json(info, args.context, results)
            return 0
        print(
            f"{info.model} on {info.device}, {info.numerics}, {info.layers} layers, "
            f"{args.context} tokens at the start"
        )
        print_table(results)
    return 0


def print_table(results: Iterable[Measured]) -> None:
    """One line a case; printed as the cases end."""
    print(
        f"{'rows':>5}{'requests':>10}{'p50 us':>10}{'p90 us':>10}{'p99 us':>10}"
        f"{'device us':>11}{'token us':>11}"
    )
    for row in results:
        device = "-" if row.device_us is None else f"{row.device_us:.1f}"
        print(
            f"{row.rows:>5}{row.requests:>10}{row.p50_us:>10.1f}{row.p90_us:>10.1f}"
            f"{row.p99_us:>10.1f}{device:>11}{row.token_us:>11.1f}",
            flush=True,
        )


def measure(client: Client, rows: int, args: argparse.Namespace) -> Measured:
    """Run one case, of `args.context`, `args.steps` and `args.seconds`."""
    slots: list[Slot] = []
    q, latent = draw(client.info, rows)
    try:
        for number in range(rows):
            slots.append(_open(client, args.context, number))
        times: list[float] = []
        tokens: list[float] = []
        deadline = time.perf_counter() + args.seconds
        for number in range(args.steps + WARM_UP):
            layers = list(_position(client, slots, q, latent, args.context))
            if number >= WARM_UP:
                times += layers
                tokens.append(sum(layers))
                if time.perf_counter() > deadline:
                    break
        device_us = _device_us(client, (len(tokens) + WARM_UP) * client.info.layers)
    finally:
        for slot in slots:
            slot.close()
    p50, p90, p99 = (round(float(value), 1) for value in np.percentile(times, (50, 90, 99)))
    token_us = round(float(np.median(tokens)), 1)
    return Measured(rows, len(times), p50, p90, p99, token_us, device_us)


def _device_us(client: Client, requests: int) -> float | None:
    """The daemon's median, if so many requests make up all that it looks back on."""
    stats = client.stats()
    attends, times = stats["attends"], stats["attend_device_us"]
    assert isinstance(attends, int)
    assert isinstance(times, dict)
    return float(times["p50"]) if requests >= min(attends, RING_STEPS) else None


def _position(
    client: Client, slots: list[Slot], q: np.ndarray, latent: np.ndarray, context: int
) -> Iterator[float]:
    """All layers of the next position of all slots, each request's time; full slots start over."""
    if slots[0].context_len >= client.info.max_ctx:
        for slot in slots:
            slot.truncate(context)
    rows = [(slot, slot.context_len) for slot in slots]
    for layer in range(client.info.layers):
        start = time.perf_counter()
        client.attend(layer, rows, q, latent)
        yield (time.perf_counter() - start) * 1e6


def _open(client: Client, length: int, seed: int) -> Slot:
    """A slot of so many positions: a random prompt, or rows in all layers where none can be run."""
    info = client.info
    if not info.attend_only:
        prompt = np.random.default_rng(seed).integers(info.vocab_size, size=length, dtype=np.int32)
        return client.open(prompt)
    slot, most = client.open([]), info.buckets[-1]
    q, latent = draw(info, most)
    while slot.context_len < length:
        count = min(most, length - slot.context_len)
        rows = [(slot, slot.context_len + row) for row in range(count)]
        for layer in range(info.layers):
            client.attend(layer, rows, q[:count], latent[:count])
    return slot


def draw(info: DaemonInfo, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random q and latents of so many rows, as the daemon's dtype has them."""
    rng = np.random.default_rng(rows)
    q = rng.standard_normal((rows, info.heads, info.nope_dim + ROPE_DIM), np.float32)
    latent = rng.standard_normal((rows, ROW_DIM), np.float32)
    if info.dtype == "float32":
        return q, latent
    return _bits(q), _bits(latent)


def _bits(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)
