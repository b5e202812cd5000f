"""Parsers and checks of the kernel benchmarks' arguments."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from latentd.bench.shapes import ATTENTION_GRID, CHUNK_GRID, STEP_CONTEXTS
from latentd.options import MAX_PREFILL_CHUNK, MAX_SLOTS
from latentd_kernels.attention_shapes import MAX_HEADS

if TYPE_CHECKING:
    from collections.abc import Sequence


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, separated by commas, for argparse."""
    values = _numbers(text, ",")
    if not values:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers of at least 1")
    return values


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    """Whole numbers of at least 1; none at all when one of them is something else."""
    try:
        values = tuple(int(part) for part in text.split(separator))
    except ValueError:
        return ()
    return values if min(values) >= 1 else ()


def matrix_shape(text: str) -> tuple[int, int]:
    """Features and columns as MxK, for argparse."""
    values = _numbers(text, "x")
    if len(values) != 2 or values[1] % 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not MxK with a K that 32 divides")
    return values[0], values[1]


def head_widths(text: str) -> tuple[int, int]:
    """nope and v as NOPE/V, for argparse."""
    values = _numbers(text, "/")
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not NOPE/V")
    return values[0], values[1]


def attention_cases(args: argparse.Namespace) -> list[tuple[int, int, int]]:
    """The grid, or every combination of what is given; contexts must fit --max-ctx."""
    grid = CHUNK_GRID if args.chunk else ATTENTION_GRID
    cases = list(grid)
    if args.heads or args.rows or args.contexts:
        usual = [sorted(set(column)) for column in zip(*grid, strict=True)]
        heads, rows, contexts = (
            given or values
            for given, values in zip((args.heads, args.rows, args.contexts), usual, strict=True)
        )
        cases = [(h, r, c) for h in heads for r in rows for c in contexts]
    _limit(args, "--heads", [heads for heads, _, _ in cases], MAX_HEADS)
    _limit(
        args,
        "--rows",
        [rows for _, rows, _ in cases],
        MAX_PREFILL_CHUNK if args.chunk else MAX_SLOTS,
    )
    _limit(args, "--contexts", [context for _, _, context in cases], args.max_ctx)
    if args.chunk and args.cuts:
        args.parser.error("--cuts is for decode rows, not for --chunk")
    if args.chunk:
        _limit(args, "--rows", [max(rows for _, rows, _ in cases)], min(c for _, _, c in cases))
    return cases


def step_contexts(args: argparse.Namespace) -> tuple[int, ...]:
    """The contexts asked for, or those of the usual ones that fit --max-ctx."""
    usual = tuple(context for context in STEP_CONTEXTS if context <= args.max_ctx)
    contexts: tuple[int, ...] = args.contexts or usual or (args.max_ctx,)
    _limit(args, "--rows", args.rows, MAX_SLOTS)
    _limit(args, "--contexts", contexts, args.max_ctx)
    return contexts


def _limit(args: argparse.Namespace, flag: str, values: Sequence[int], most: int) -> None:
    if max(values) > most:
        args.parser.error(f"{flag} {max(values)}: at most {most} here")
