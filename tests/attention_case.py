"""Attention inputs for the tests of both backends: hostile memory around honest contents.

Every token that must not count is NaN, every page that no row owns is NaN, every table entry that
must not be read is an absurd id, and outputs and workspace start as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

import oracle
from latentd_kernels.attention_shapes import MAX_CALL_ROWS
from latentd_kernels.attention_workspace import allocate_workspace
from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM, num_pages, num_splits
from latentd_kernels.ops import Rope
from latentd_kernels.staging import RingLayout, allocate_inputs
from latentd_kernels.work_plan import MAX_CTAS, fill_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from latentd_kernels.attention import AttentionLaunches
    from latentd_kernels.ops import Numerics, StepInputs
    from latentd_kernels.reference.attention import ReferenceAttention

ABSURD_ID = 0x7FFF_FFF0
LAYOUT = RingLayout(max_rows=512, max_updates=1, max_zero_pages=1)


@dataclass(frozen=True)
class Case:
    """A batch of rows with their cached contents, everything on one device."""

    inputs: StepInputs
    slab: Tensor  # [pages, layers, 64, 576] act
    layer: int
    contents: list[Tensor]  # per row [context_len, 576] act, zeros where the page is unmapped
    q: Tensor  # [rows, heads * (nope + 64)] act
    kv_b: Tensor  # [heads * (nope + v), 512] act
    rope: Rope
    heads: int
    nope_dim: int
    v_dim: int
    scale: float
    chunk: bool = False  # the rows are consecutive tokens of one slot, planned as such

    @property
    def rows(self) -> int:
        return len(self.contents)

    @property
    def max_ctx(self) -> int:
        return self.inputs.block_table.shape[1] * PAGE_SIZE


def make_rope(device: torch.device, interleaved: bool = True, magnitude: float = 1.0) -> Rope:
    inv_freq = 10000.0 ** -(torch.arange(32, dtype=torch.float32) / 32)
    return Rope(inv_freq.to(device), magnitude, interleaved)


def make_case(
    lengths: Sequence[int],
    heads: int,
    widths: tuple[int, int] = (128, 128),
    device: torch.device | str = "cpu",
    act: torch.dtype = torch.bfloat16,
    holes: Sequence[tuple[int, int]] = (),
    spread: float = 1.0,
    seed: int = 0,
) -> Case:
    """Rows of the given lengths; `holes` are (row, page index) entries left unmapped; `spread`
    multiplies the query: the larger, the more peaked the softmax."""
    device = torch.device(device)
    gen = torch.Generator(device).manual_seed(seed)
    nope_dim, v_dim = widths

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device).to(act)

    contents = [normal(length, ROW_DIM) for length in lengths]
    for row, page_idx in holes:
        contents[row][page_idx * PAGE_SIZE : (page_idx + 1) * PAGE_SIZE] = 0
    inputs = step_inputs(lengths, device, heads)
    total = sum(num_pages(length) for length in lengths)
    slab = torch.full((total + 3, 2, PAGE_SIZE, ROW_DIM), torch.nan, dtype=act, device=device)
    page_ids = torch.randperm(total + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    case = Case(
        inputs=inputs,
        slab=slab,
        layer=1,
        contents=contents,
        q=normal(len(lengths), heads * (nope_dim + 64)) * spread,
        kv_b=normal(heads * (nope_dim + v_dim), 512) / 16,
        rope=make_rope(device),
        heads=heads,
        nope_dim=nope_dim,
        v_dim=v_dim,
        scale=(nope_dim + 64) ** -0.5,
    )
    place_pages(case, page_ids, holes)
    return case


def step_inputs(lengths: Sequence[int], device: torch.device, heads: int = 0) -> StepInputs:
    """Inputs of a step whose row r sits in slot rows - 1 - r and has lengths[r] tokens; planned for
    attention of so many heads, if any."""
    rows, most = len(lengths), max(1, *(num_pages(length) for length in lengths))
    inputs = allocate_inputs(LAYOUT, rows, most + 2, device)
    inputs.block_table.fill_(ABSURD_ID)
    slots = torch.arange(rows - 1, -1, -1, dtype=torch.int32)
    return with_rows(inputs, slots.tolist(), lengths, heads)


def with_rows(
    inputs: StepInputs, slots: Sequence[int], lengths: Sequence[int], heads: int,
    chunk: bool = False,
) -> StepInputs:  # fmt: skip
    """The same block table under other batch rows; what follows them is poisoned."""
    device, rows = inputs.block_table.device, len(lengths)

    def field(values: Sequence[int], like: Tensor) -> Tensor:
        out = torch.full_like(like, ABSURD_ID)
        out[: len(values)] = torch.tensor(values, dtype=like.dtype, device=device)
        return out

    starts = [0] * (rows + 1)
    for row, length in enumerate(lengths):
        starts[row + 1] = starts[row] + num_splits(length)
    step = replace(
        inputs,
        slot_idx=field(slots, inputs.slot_idx),
        context_len=field(lengths, inputs.context_len),
        split_start=field(starts, inputs.split_start),
        row_plan=torch.full_like(inputs.row_plan, ABSURD_ID),
        work=torch.full_like(inputs.work, ABSURD_ID),
    )
    if heads and device.type == "cuda":
        fill_plan(step, lengths, slots, heads, num_ctas(device), chunk=chunk)
    return step


def num_ctas(device: torch.device) -> int:
    return min(MAX_CTAS, torch.cuda.get_device_properties(device).multi_processor_count)


def place_pages(case: Case, page_ids: Sequence[int], holes: Sequence[tuple[int, int]] = ()) -> None:
    """Give each row the next pages of `page_ids` and write its contents there, and only there."""
    free = iter(page_ids)
    unmapped = set(holes)
    for row, content in enumerate(case.contents):
        slot = int(case.inputs.slot_idx[row])
        for page_idx in range(num_pages(len(content))):
            tokens = content[page_idx * PAGE_SIZE : (page_idx + 1) * PAGE_SIZE]
            page = -1 if (row, page_idx) in unmapped else next(free)
            case.inputs.block_table[slot, page_idx] = page
            if page >= 0:
                case.slab[page, case.layer, : len(tokens)] = tokens


def select(case: Case, rows: Sequence[int]) -> Case:
    """A batch of only these rows of a case, in this order, over the same slab and table."""
    contents = [case.contents[row] for row in rows]
    slots = [int(case.inputs.slot_idx[row]) for row in rows]
    inputs = with_rows(case.inputs, slots, [len(content) for content in contents], case.heads)
    return replace(case, inputs=inputs, contents=contents, q=case.q[list(rows)].contiguous())


def as_chunk(case: Case, rows: int, chunk: bool = True) -> Case:
    """The last `rows` tokens of a case of one row, with queries of their own, as rows of a prompt
    chunk or, bit for bit the same, as decode rows that share a slot."""
    content, gen = case.contents[0], torch.Generator(case.q.device).manual_seed(rows)
    lengths = range(len(content) - rows + 1, len(content) + 1)
    slot = int(case.inputs.slot_idx[0])
    q = torch.randn((rows, case.q.shape[1]), generator=gen, device=case.q.device)
    return replace(
        case,
        inputs=with_rows(case.inputs, [slot] * rows, lengths, case.heads, chunk),
        contents=[content[:length] for length in lengths],
        q=q.to(case.q.dtype),
        chunk=chunk,
    )


def absorb(case: Case, ops: AttentionLaunches | ReferenceAttention) -> Tensor:
    q_abs = torch.full(
        (case.rows, case.heads, ROW_DIM), torch.nan, dtype=case.q.dtype, device=case.q.device
    )
    ops.absorb(case.q, case.kv_b, case.rope, q_abs, case.rows, case.nope_dim)
    return q_abs


def attend_and_expand(
    case: Case,
    ops: AttentionLaunches | ReferenceAttention,
    numerics: Numerics,
    q_abs: Tensor,
) -> Tensor:
    """o [rows, heads, v], in calls of MAX_CALL_ROWS rows."""
    device, act = case.q.device, case.q.dtype
    call_rows = min(case.rows, MAX_CALL_ROWS)
    workspace = allocate_workspace(call_rows, case.max_ctx, case.heads, numerics, device, act)
    workspace.partial_o.fill_(torch.nan)
    workspace.partial_ml.fill_(torch.nan)
    out = torch.full((case.rows, case.heads * case.v_dim), torch.nan, dtype=act, device=device)
    for first in range(0, case.rows, MAX_CALL_ROWS):
        num = min(case.rows - first, MAX_CALL_ROWS)
        ops.attend(q_abs, case.slab, case.layer, workspace, first, num, case.scale, case.chunk)
        ops.expand(workspace, case.kv_b, out, first, num, case.nope_dim)
    return out.view(case.rows, case.heads, case.v_dim)


def run(case: Case, ops: AttentionLaunches | ReferenceAttention, numerics: Numerics) -> Tensor:
    """absorb, attend and expand of the whole batch: o [rows, heads, v]."""
    return attend_and_expand(case, ops, numerics, absorb(case, ops))


def expected(case: Case, row: int) -> Tensor:
    """The oracle's o [heads, v] float64 of one row, from the query before absorption."""
    query = case.q[row].view(case.heads, -1)
    nope, rope_half = query[:, : case.nope_dim], query[:, case.nope_dim :]
    pairs = "neighbours" if case.rope.interleaved else "halves"
    position = len(case.contents[row]) - 1
    turned = oracle.rotated(rope_half, position, case.rope.inv_freq, case.rope.magnitude, pairs)
    kv_b = case.kv_b.view(case.heads, -1, 512)
    turned_query = torch.cat((nope.double(), turned), dim=1)
    return oracle.attention(turned_query, case.contents[row], kv_b, case.nope_dim, case.scale)


def expected_landed(case: Case, row: int, q_abs: Tensor) -> Tensor:
    """The emulated landed chain's o [heads, v] of one row, from its absorbed query."""
    kv_b = case.kv_b.view(case.heads, -1, 512)
    return oracle.landed_attention(q_abs[row], case.contents[row], kv_b, case.nope_dim, case.scale)
