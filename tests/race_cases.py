"""Small launches of every kernel of sm_90a, for racecheck: it multiplies a kernel's time by
thousands, so that cases have few CTAs, tokens and columns, but more blocks than a ring has stages.

Results are not looked at; the tests of each kernel do that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import numpy as np
import torch

import attention_case
from latentd_kernels import attention_workspace, head_tiles, work_plan
from latentd_kernels import hopper_linear as hopper_linear_launches
from latentd_kernels.attend_rows import AttendRing
from latentd_kernels.cuda_ops import CudaOps
from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM
from latentd_kernels.launcher import HOPPER
from latentd_kernels.limits import LimitRing, SeatLimits
from latentd_kernels.linear_plan import OTHERS, WHOLE, WholeKernel, parse
from latentd_kernels.linear_rows import MANY_ROWS
from latentd_kernels.linear_strips import STRIPS
from latentd_kernels.linear_table import MEASURED
from latentd_kernels.moe_workspace import allocate_moe_workspace
from latentd_kernels.ops import RouterParams
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latentd_kernels.ops import Numerics, StepInputs

PORTABLE: Final = "sm_90"
"""An architecture that has none of the kernels of sm_90a; the cubins of sm_90a have all others."""
LENGTHS: Final = (65, 129)
LAYOUT: Final = RingLayout(max_rows=132, max_updates=8, max_zero_pages=4)


@dataclass(frozen=True)
class Card:
    """What the launches see of the library: a card of few SMs, so that persistent grids are small,
    and of an architecture that may lack kernels which the cubins have."""

    library: Any  # a Library, or a Recorder
    device: torch.device
    stream: int
    arch: str = HOPPER
    sm_count: int = 4
    max_smem: int = 232_448
    launched: set[str] = field(default_factory=set)

    def launch(self, name: str, *args: Any, **rest: Any) -> None:
        self.launched.add(name)
        self.library.launch(name, *args, **rest)

    def ops(self, inputs: StepInputs | None = None, numerics: Numerics = "f32") -> CudaOps:
        """Operations over these inputs, else over rows that are all live."""
        if inputs is None:
            inputs = allocate_inputs(LAYOUT, 132, 4, self.device)
            inputs.slot_idx.copy_(torch.arange(len(inputs.slot_idx)))
        library: Any = self
        return CudaOps(library, inputs, StepRing(LAYOUT, self.device), numerics, self.stream)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * 0.1).to(dtype)


def attention(
    heads: int,
    lengths: Sequence[int],
    numerics: Numerics = "f32",
    widths: tuple[int, int] = (128, 128),
    chunk: int = 0,
    min_chains: int = head_tiles.MIN_CHAINS,
) -> Callable[[Card], None]:
    """absorb, attend and expand of these rows, or of a chunk of the one row's last tokens."""

    def run(card: Card) -> None:
        has_hopper = card.arch == HOPPER
        case = attention_case.make_case(lengths, heads, widths, card.device)
        case = attention_case.as_chunk(case, chunk) if chunk else case
        ops = card.ops(case.inputs, numerics)
        slots = case.inputs.slot_idx[: case.rows].tolist()
        tokens = [len(content) for content in case.contents]
        with (
            patch.object(head_tiles, "MIN_CHAINS", min_chains),
            patch.object(attention_workspace, "has_hopper_kernels", lambda _: has_hopper),
        ):
            work_plan.fill_plan(case.inputs, tokens, slots, heads, ops.num_ctas, chunk=case.chunk)
            attention_case.run(case, ops, numerics)

    return run


def append(rows: int, widths: tuple[int, int] = (128, 128)) -> Callable[[Card], None]:
    """append, beside absorb where one kernel does both."""

    def run(card: Card) -> None:
        case = attention_case.make_case((9,) * rows, 2, widths, card.device)
        layers = case.slab.shape[1]
        case.inputs.kv_row[:rows] = torch.arange(rows) * layers * PAGE_SIZE + 5
        q_abs = torch.empty(rows, 2, ROW_DIM, dtype=torch.bfloat16, device=card.device)
        card.ops(case.inputs).append_absorb(
            card.randn(rows, ROW_DIM), card.randn(512), 1e-6, case.rope, case.slab, 1, case.q,
            case.kv_b, q_abs, rows, widths[0],
        )  # fmt: skip

    return run


def hopper_linear(name: str, gated: bool) -> Callable[[Card], None]:
    """One kernel of sm_90a: more blocks of k than its ring has stages, a tile of rows and one row
    more, with its segments in one CTA and in a cluster, stored in every way."""

    def run(card: Card) -> None:
        own = parse(name, 8).segments
        for ctas, kind in ((1, 0),) if gated else ((1, 0), (2, 1), (2, 2)):
            kernel = parse(name, own * ctas)
            if kernel.turns or kernel.smem > card.max_smem:
                kernel = parse(name, own)
            blocks = kernel.blocks * (kernel.stages_w + 2)
            rows, k = kernel.rows + 1, blocks * 64 * kernel.segments
            weight, x = card.randn(80 * (1 + gated), k), card.randn(rows, k)
            dtype = torch.float32 if kind else torch.bfloat16
            out = torch.zeros(rows, 80, dtype=dtype, device=card.device)
            card.ops().hopper_product(x, weight, out, rows, kind, gated, kernel)

    return run


def strips(card: Card) -> None:
    """linear_strips and gated_strips: two tiles of a CTA, more strips than stages, a tile of rows
    and one row more, stored in every way."""
    rows, k = STRIPS.rows + 1, 2048 + 64
    features = 70 * card.sm_count
    weight, x = card.randn(2 * features, k), card.randn(rows, k)
    for kind, gated in ((0, True), (0, False), (1, False), (2, False)):
        dtype = torch.float32 if kind else torch.bfloat16
        out = torch.zeros(rows, features, dtype=dtype, device=card.device)
        matrix = weight if gated else weight[:features]
        card.ops().hopper_product(x, matrix, out, rows, kind, gated, STRIPS)


def rows_product(card: Card) -> None:
    """linear_rows: more blocks of k than its rings have stages, a tile of rows and one row more, a
    tile of features and twelve more, stored in every way."""
    rows, k, features = MANY_ROWS.rows + 1, 9 * 64, MANY_ROWS.features + 12
    weight, x = card.randn(features, k), card.randn(rows, k)
    for kind in (0, 1, 2):
        dtype = torch.float32 if kind else torch.bfloat16
        out = torch.zeros(rows, features, dtype=dtype, device=card.device)
        card.ops().hopper_product(x, weight, out, rows, kind, False, MANY_ROWS)


def whole_linear(kernel: WholeKernel) -> Callable[[Card], None]:
    """The products by CTAs that hold their weights, both kinds; with a norm in front and with parts
    beside it for one row."""

    def run(card: Card) -> None:
        ops, k = card.ops(), kernel.blocks * kernel.ctas * 64
        weight, added, landed = card.randn(64, k), card.randn(3, 64).float(), card.randn(3, 64)
        parts = card.randn(1, 9, 64).float(), torch.ones(1, 9, device=card.device)
        for rows in (1, 3):
            x = card.randn(rows, k)
            ops.whole_product(x, weight, landed, rows, 0, kernel)
            ops.whole_product(x, weight, added, rows, 2, kernel, *(parts if rows == 1 else ()))
        residual, parts = card.randn(1, k).float(), (card.randn(1, 9, k).float(), parts[1])
        with patch.object(hopper_linear_launches, "whole", lambda *_: kernel):
            ops.norm_linear(residual, card.randn(k), 1e-6, weight, landed, *parts)

    return run


def portable_linear(weight_rows: int, rows: int, sm_count: int) -> Callable[[Card], None]:
    """The portable products, both plain and gated."""

    def run(card: Card) -> None:
        ops = replace(card, sm_count=sm_count).ops()
        weight, x = card.randn(weight_rows, 320), card.randn(rows, 320)
        plain = torch.zeros(rows, weight_rows, device=card.device)
        gated = torch.zeros(rows, weight_rows // 2, dtype=torch.bfloat16, device=card.device)
        ops.linear(x, weight, plain, rows, accumulate=True)
        ops.gated_linear(x, weight, gated, rows)

    return run


def moe(
    rows: int, experts: int = 8, inner: int = 128, hidden: int = 256, plain_route: bool = False
) -> Callable[[Card], None]:
    """A whole MoE layer, or the choice by logits that are there and the expert products."""

    def run(card: Card) -> None:
        params = RouterParams(2, "sigmoid", 2, 1, "top2", True, 1.0, 1)
        total, act = experts + 1, torch.bfloat16
        space = allocate_moe_workspace(rows, 3, total, inner, hidden, act, card.device)
        ops, x = card.ops(), card.randn(rows, hidden, dtype=torch.float32)
        normed, logits = card.randn(rows, hidden), torch.zeros(rows, experts, device=card.device)
        gate_up, down = card.randn(total, 2 * inner, hidden), card.randn(total, hidden, inner)
        if plain_route:
            ops.route(card.randn(rows, experts, dtype=torch.float32), None, params, space, rows)
            ops.experts(normed, gate_up, down, params, space, rows)
        else:
            ops.moe(
                x, card.randn(hidden), 1e-6, normed, card.randn(experts, hidden), None, logits,
                gate_up, down, params, space, rows,
            )  # fmt: skip

    return run


def sampling(vocab: int, top_k: int, top_p: float, min_p: float) -> Callable[[Card], None]:
    def run(card: Card) -> None:
        ops = card.ops()
        ops.inputs.temperature.fill_(0.8)
        ops.inputs.top_k.fill_(top_k)
        ops.inputs.top_p.fill_(top_p)
        ops.inputs.min_p.fill_(min_p)
        limits = ops.ring.limits = LimitRing(vocab, 128, 2, card.device)
        ids, mask = np.arange(9, dtype=np.int32), np.full(limits.mask_words, 0x5555, np.uint32)
        limits.write(0, [(1, SeatLimits(ids, np.ones(9, np.float32), mask))])
        ops.place_limits(1, 0)
        logits = card.randn(2, vocab, dtype=torch.float32)
        ops.sample(logits, 0, 2, limited=False)
        ops.sample(logits, 0, 2)
        ops.score(logits, 0, 2, 0, 20, 0)

    return run


def stage(heads: int, chunk: bool = False) -> Callable[[Card], None]:
    """stage, zero_pages and publish of a step that has updates and pages to zero."""

    def run(card: Card) -> None:
        ops = card.ops()
        entry, rows = ops.ring.entry(0), 130
        entry.clear(rows)
        entry.context_len[:rows] = range(200, 200 + rows)
        entry.slot_idx[:rows] = 3
        entry.updates[:2] = [(3, 0, 4, 1), (3, 1, 2, 2)]
        entry.num_updates[0] = 2
        entry.zero_pages[:2] = (0, 1)
        entry.num_zero_pages[0] = 2
        ops.stage(rows, heads, chunk)
        ops.zero_pages(torch.ones(3, 1, PAGE_SIZE, ROW_DIM, device=card.device).bfloat16())
        ops.publish(rows)

    return run


def attend_rows(card: Card) -> None:
    """take_rows, store_rows and give_rows, of three layers."""
    ops, rows, layers = card.ops(), 2, 3
    shape = ops.inputs.block_table.shape
    ops.inputs.token_ids.fill_(1)
    ops.inputs.context_len.fill_(2 * PAGE_SIZE)
    ops.inputs.kv_row[:rows] = torch.arange(rows, device=card.device)
    ring = AttendRing.allocate(
        2, rows, 2, 128, 128, (shape[0], shape[1]), card.device, torch.bfloat16
    )
    ops.take_rows(ring, layers, rows)
    ops.store_rows(ring, torch.ones(9, 1, PAGE_SIZE, ROW_DIM, device=card.device).bfloat16(), rows)
    ops.give_rows(ring, rows)


def elementwise(card: Card) -> None:
    """embed and norm, of both kinds of rows and with parts to add."""
    ops, rows, dim = card.ops(), 2, 2112
    x, weight, out = card.randn(rows, dim), card.randn(dim), card.randn(rows, dim)
    residual = card.randn(rows, dim, dtype=torch.float32)
    ops.embed(card.randn(9, dim), torch.tensor([3, -1], device=card.device).int(), residual, rows)
    ops.norm(x, weight, 1e-6, out, rows)
    parts = card.randn(rows, 3, dim, dtype=torch.float32)
    ops.norm(residual, weight, 1e-6, out, rows, parts, torch.ones(rows, 3, device=card.device))


def on_sms(sm_count: int, run: Callable[[Card], None]) -> Callable[[Card], None]:
    """The same on a card of so many SMs."""
    return lambda card: run(replace(card, sm_count=sm_count))


def portable(run: Callable[[Card], None], **changes: Any) -> Callable[[Card], None]:
    """The same with the kernels that all architectures have."""
    return lambda card: run(replace(card, arch=PORTABLE, **changes))


def _hopper_linears() -> dict[str, Callable[[Card], None]]:
    names = {(name, gated) for (_, _, gated), (_, row) in MEASURED.items() for name in row.split()}
    kinds = {True: "gated", False: "linear"}
    made = {}
    for name, gated in sorted(case for case in names if case[0] not in OTHERS):
        kernel = parse(name, 8)
        made[f"{kinds[gated]}_{kernel.variant}"] = hopper_linear(name, gated)
    return made


NARROW: Final = 131_072
"""Shared memory of a card whose portable attention takes 16 heads a CTA."""
BOTH: Final[tuple[Numerics, ...]] = ("f32", "landed")
CASES: Final[dict[str, Callable[[Card], None]]] = {
    "attend 16 heads": attention(16, LENGTHS),
    "attend 16 heads, 1 row": attention(16, (129,)),
    "attend 64 heads 192/256": attention(64, (65, 1), widths=(192, 256)),
    "attend 16 heads, chains": attention(16, (0, 700, 65), min_chains=0),
    "attend 16 heads, 3 rows": attention(16, (65, 1, 129)),
    "attend 16 heads, 9 rows": attention(16, (1,) * 8 + (129,)),
    "attend 20 heads 192/256": attention(20, LENGTHS, widths=(192, 256)),
    "attend 40 heads": attention(40, LENGTHS),
    "attend 64 heads": attention(64, LENGTHS),
    "attend 96 heads": attention(96, (129,)),
    "attend 96 heads, long": attention(96, (700,)),
    "attend 96 heads, rehearsed": attention(96, (700,), min_chains=0),
    "attend 96 heads, 5 rows": attention(96, (1, 65, 1, 1, 1)),
    "attend 128 heads": attention(128, LENGTHS),
    "attend 128 heads, chains": attention(128, (700,), min_chains=0),
    "attend 128 heads, 2 rows": attention(128, (300, 300)),
    "attend a chunk, 5 heads": attention(5, (70,), chunk=40),
    "attend a chunk, 16 heads": attention(16, (70,), chunk=40),
    "attend a chunk, 24 heads": attention(24, (70,), chunk=40),
    **{f"landed {heads} heads": attention(heads, LENGTHS, "landed") for heads in (16, 32, 48)},
    **{f"landed {heads} heads": attention(heads, (65,), "landed") for heads in (64, 96)},
    "landed 128 heads": attention(128, (65, 1, 129, 1), "landed"),
    "landed 128 heads, a chain": attention(128, (193,), "landed"),  # 32 heads a CTA
    "landed 128 heads, all SMs": on_sms(16, attention(128, (193,), "landed")),  # 16, of splits 32
    **{f"append {rows} rows": append(rows) for rows in (2, 9, 17)},
    **{f"append {rows} rows, 192": append(rows, (192, 256)) for rows in (2, 9, 17)},
    **{
        f"portable {numerics}, {form}": portable(attention(20, LENGTHS, numerics), max_smem=smem)
        for numerics in BOTH
        for form, smem in (("narrow", NARROW), ("wide", 232_448))
    },
    "portable append": portable(append(2)),
    "portable absorb 192": portable(append(2, (192, 256))),
    **_hopper_linears(),
    "strips": strips,
    "rows": rows_product,
    **{f"linear, {kernel.ctas} CTAs that hold W": whole_linear(kernel) for kernel in WHOLE},
    **{
        f"portable linear {weight_rows}, {rows} rows, {sms} SMs": portable(
            portable_linear(weight_rows, rows, sms)
        )
        for weight_rows in (64, 2592)
        for rows, sms in ((1, 4), (9, 4), (17, 4), (33, 4), (65, 1), (65, 132))
    },
    "portable linear, deep": portable(portable_linear(2592, 1, 132)),
    **{f"experts, {rows} rows": moe(rows) for rows in (1, 5, 12, 70)},
    "experts of an odd tile": moe(1, hidden=192, plain_route=True),
    "route, 20 rows": moe(20, plain_route=True),
    **{f"portable experts, {rows} rows": portable(moe(rows)) for rows in (2, 80)},
    "sample, 5000 ids": sampling(5000, 40, 0.9, 0.02),
    "sample, 9 ids": sampling(9, 0, 1.0, 0.0),
    "portable sample": portable(sampling(5000, 40, 0.9, 0.02)),
    "stage": stage(0),
    "stage 16 heads": stage(16),
    "stage 128 heads": stage(128),
    "stage a chunk": stage(16, chunk=True),
    "attend rows": attend_rows,
    "embed and norm": elementwise,
}
