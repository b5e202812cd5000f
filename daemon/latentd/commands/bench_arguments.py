"""Parsers and checks of the kernel benchmarks' arguments."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from latentd.bench.shapes import ATTENTION_GRID, CHUNK_GRID, STEP_CONTEXTS
from latentd.options import MAX_PREFILL_CHUNK, MAX_SLOTS
from latentd_client.arguments import refusal, whole
from latentd_client.fields import MAX_INT
from latentd_kernels.attention_shapes import HEAD_WIDTHS, MAX_HEADS

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SIZE: Final = 1 << 20
"""Of a matrix: far above any model's, whose longest side is a vocabulary of some 160 thousand."""


def whole_numbers(text: str, high: int = MAX_INT) -> tuple[int, ...]:
    """Whole numbers from 1 to `high`, separated by commas, for argparse."""
    values = _numbers(text, ",", high)
    if not values:
        raise refusal(text, f"a list of whole numbers of 1 to {high}")
    return values


def _numbers(text: str, separator: str, high: int) -> tuple[int, ...]:
    """Whole numbers of that range; none at all when one of them is something else."""
    try:
        return tuple(whole(part, high=high) for part in text.split(separator))
    except argparse.ArgumentTypeError:
        return ()


def matrix_shape(text: str) -> tuple[int, int]:
    """Features and columns as MxK, for argparse."""
    values = _numbers(text, "x", MAX_SIZE)
    if len(values) != 2 or values[1] % 32:
        raise refusal(text, f"MxK with sizes up to {MAX_SIZE} and a K that 32 divides")
    return values[0], values[1]


def head_widths(text: str) -> tuple[int, int]:
    """nope and v as NOPE/V, for argparse."""
    known = {f"{nope}/{v}": (nope, v) for nope, v in HEAD_WIDTHS}
    if text not in known:
        raise refusal(text, f"one of the widths NOPE/V that have kernels: {', '.join(known)}")
    return known[text]


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
