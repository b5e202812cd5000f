"""`latentd bench attention | linear | moe | step`: the kernels on this GPU, without a daemon."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from latentd.bench import shapes
from latentd.commands import bench_runs
from latentd.commands.bench_arguments import head_widths, matrix_shape, whole_numbers
from latentd.commands.parsing import Parser, add_command
from latentd.model.fields import MAX_LAYERS
from latentd.options import MAX_PREFILL_CHUNK, MAX_SLOTS
from latentd_client.arguments import up_to, whole
from latentd_client.fields import MAX_INT
from latentd_kernels.geometry import MAX_CTX

if TYPE_CHECKING:
    from collections.abc import Callable

EPILOG = (
    "Every table has, from one run: the time (median of graph replays), the bytes that must be "
    "read, the floor (those bytes at the bandwidth of a large copy), the share of a copy's and of "
    "a read's bandwidth that was reached, and the time of torch with cuBLAS."
)


def add(parts: argparse._SubParsersAction[Parser]) -> None:
    """Declare the four benchmarks."""
    _add_attention(parts)
    _add_linear(parts)
    _add_moe(parts)
    _add_step(parts)


def _add(
    parts: argparse._SubParsersAction[Parser], name: str, help: str,
    run: Callable[[argparse.Namespace], int],
) -> Parser:  # fmt: skip
    parser = add_command(parts, name, help, run)
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--no-torch", action="store_true", help="leave torch and cuBLAS out")
    return parser


def _add_numbers(
    parser: Parser, flag: str, what: str, default: tuple[int, ...] | None, high: int = MAX_INT
) -> None:
    """A list of numbers up to `high`, or to a bound that depends on other flags."""
    shown = "the grid of docs/measurements.md" if default is None else ",".join(map(str, default))
    parser.add_argument(
        flag, type=partial(whole_numbers, high=high), default=default, metavar="N,...",
        help=f"{what} (default {shown})",
    )  # fmt: skip


def _add_numerics(parser: Parser) -> None:
    parser.add_argument(
        "--numerics", choices=("f32", "landed"), default="f32",
        help="rounding of the attention (default %(default)s)",
    )  # fmt: skip


def _add_attention(parts: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(
        parts, "attention", "absorb, attend and expand, microseconds a layer", bench_runs.attention
    )
    for flag, what in (("--heads", "heads"), ("--rows", "rows"), ("--contexts", "tokens attended")):
        _add_numbers(parser, flag, f"{what}; one of the three alone is combined with all", None)
    parser.add_argument(
        "--widths", type=head_widths, default=(128, 128), metavar="NOPE/V",
        help="head widths (default 128/128)",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=up_to(MAX_LAYERS), metavar="N",
        help=f"layers in a graph (default {shapes.ATTENTION_LAYERS}, with --chunk "
        f"{shapes.CHUNK_LAYERS})",
    )  # fmt: skip
    _add_max_ctx(parser)
    _add_numerics(parser)
    parser.add_argument(
        "--chunk", action="store_true",
        help="rows are the last ones of a prompt (default 512 of 512, 4096 and 32768 tokens); "
        "torch is expanded attention",
    )  # fmt: skip
    parser.add_argument(
        "--cuts", action="store_true",
        help="also time the best number of pages a split for each case, which no batch may choose",
    )  # fmt: skip
    parser.add_argument("--parts", action="store_true", help="also time the three kernels alone")


def _add_linear(parts: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(
        parts, "linear", "linear layers of published models, each as it is used", bench_runs.linear
    )
    parser.add_argument(
        "--config", action="append", metavar="NAME|DIR",
        help="a published geometry or a directory with config.json; may be repeated "
        "(default v2-lite, v3 and kimi-k2)",
    )  # fmt: skip
    parser.add_argument(
        "--shape", action="append", type=matrix_shape, default=[], metavar="MxK",
        help="a matrix of that many features and columns; may be repeated",
    )  # fmt: skip
    _add_numbers(parser, "--rows", "rows", shapes.LINEAR_ROWS, MAX_PREFILL_CHUNK)


def _add_moe(parts: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(
        parts, "moe", "the expert products of a layer, shared experts included", bench_runs.moe
    )
    parser.add_argument(
        "--config", default="v2-lite", metavar="NAME|DIR",
        help="a published geometry or a directory with config.json (default %(default)s)",
    )  # fmt: skip
    _add_numbers(parser, "--rows", "rows", shapes.MOE_ROWS, MAX_PREFILL_CHUNK)
    parser.add_argument(
        "--layers", type=up_to(MAX_LAYERS), default=4, metavar="N",
        help="layers of different weights in a graph (default %(default)s)",
    )  # fmt: skip


def _add_step(parts: argparse._SubParsersAction[Parser]) -> None:
    parser = _add(parts, "step", "whole decode steps, by rows and context", bench_runs.step)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--config", default="v2-lite", metavar="NAME|DIR",
        help="random weights in a published geometry, or in that of DIR/config.json "
        "(default %(default)s)",
    )  # fmt: skip
    source.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint")
    parser.add_argument(
        "--layers", type=up_to(MAX_LAYERS), metavar="N", help="layers of --config (default all)"
    )
    _add_numbers(parser, "--rows", f"rows, at most {MAX_SLOTS}", shapes.STEP_ROWS)
    parser.add_argument(
        "--contexts", type=whole_numbers, metavar="N,...",
        help="tokens attended (default 1024,8192,32768 as far as --max-ctx allows)",
    )  # fmt: skip
    _add_max_ctx(parser)
    _add_numerics(parser)
    parser.add_argument(
        "--steps", type=whole, default=30, metavar="N",
        help="replays of each case (default %(default)s)",
    )  # fmt: skip


def _add_max_ctx(parser: Parser) -> None:
    parser.add_argument(
        "--max-ctx", type=up_to(MAX_CTX), default=shapes.MAX_CTX, metavar="N",
        help="what the graphs are captured for (default %(default)s)",
    )  # fmt: skip
