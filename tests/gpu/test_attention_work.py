"""The sm_90a attention kernels of f32 mode: however their work is dealt, a row keeps its bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

import oracle
from attention_case import (
    Case,
    absorb,
    as_chunk,
    attend_and_expand,
    make_case,
    num_ctas,
    place_pages,
    run,
    select,
)
from latentd_kernels import attention_hopper, driver, head_tiles, work_plan
from latentd_kernels.attention import AttentionLaunches
from latentd_kernels.attention_hopper import HopperAttention
from latentd_kernels.attention_workspace import allocate_workspace
from latentd_kernels.cuda_ops import CudaOps
from latentd_kernels.expand_forms import ExpandForm
from latentd_kernels.geometry import PAGE_SIZE
from latentd_kernels.ops import Numerics
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs
from launching import CUDA, library, make_ops, stream

pytestmark = pytest.mark.gpu

MIXED = (1, 700, 0, 64, 65, 129, 2500, 4097, 9000, 17_000)
LONG = (4097, 2500, 17_000)
WORDS = ("row_plan", "work")
EXPANDS = [(32, 4, 16), (32, 2, 8), (64, 2, 1), (64, 2, 8), (128, 1, 1), (128, 1, 8)]


@pytest.fixture(autouse=True)
def on_sm_90a() -> Iterator[None]:
    if library().arch != "sm_90a":
        pytest.skip("these kernels are for sm_90a")
    torch.cuda.set_stream(stream())
    yield
    torch.cuda.synchronize()


def launches(case: Case) -> AttentionLaunches:
    ring = StepRing(RingLayout(1, 1, 1), torch.device("cpu"))  # attention reads nothing of it
    return AttentionLaunches(library(), case.inputs, ring, "f32", stream().cuda_stream)


def result(case: Case) -> torch.Tensor:
    return run(case, launches(case), "f32")


def replan(case: Case, ctas: int) -> None:
    """Deal the same rows to another number of CTAs."""
    lengths = [len(content) for content in case.contents]
    slots = case.inputs.slot_idx[: case.rows].tolist()
    work_plan.fill_plan(case.inputs, lengths, slots, case.heads, ctas)


@pytest.mark.parametrize("rows", [1, 5, 128, 130, 512])
@pytest.mark.parametrize("heads", [1, 16, 20, 33, 64, 96, 128])
def test_stage_plans_attention_as_the_plan_in_python(heads: int, rows: int) -> None:
    layout = RingLayout(max_rows=512, max_updates=1, max_zero_pages=1)
    ops = make_ops(layout, max_slots=16, max_pages=1024)
    gen = torch.Generator().manual_seed(rows)
    for most in (0, 200, 5000, 65_536):
        lengths = torch.randint(0, most + 1, (rows,), generator=gen)
        lengths[torch.rand(rows, generator=gen) < 0.2] = 0
        entry = ops.ring.entry(int(ops.ring.step_counter))
        entry.clear(rows)
        entry.context_len[:rows] = lengths
        entry.slot_idx[:rows] = torch.randint(-1, 16, (rows,), generator=gen)
        ops.stage(rows, heads)
        ops.publish(rows)
        torch.cuda.synchronize()
        truth = allocate_inputs(layout, 16, 1024, torch.device("cpu"))
        slots = entry.slot_idx[:rows].tolist()
        work_plan.fill_plan(truth, lengths.tolist(), slots, heads, num_ctas(CUDA))
        for name in WORDS:
            ours, theirs = getattr(ops.inputs, name).cpu(), getattr(truth, name)
            used = rows if name == "row_plan" else work_plan.num_calls(rows) * num_ctas(CUDA)
            if name == "work":  # the plan of a CTA without work means nothing
                ours, theirs = (torch.where(x[:, 3:4] > 0, x, 0) for x in (ours, theirs))
            assert torch.equal(ours[:used], theirs[:used]), (name, most)


@pytest.mark.parametrize("rows", [1, 100, 130, 512])
@pytest.mark.parametrize("heads", [5, 16, 20, 32])
def test_stage_plans_a_chunk_as_the_plan_in_python(heads: int, rows: int) -> None:
    layout = RingLayout(max_rows=512, max_updates=1, max_zero_pages=1)
    ops = make_ops(layout, max_slots=4, max_pages=1024)
    for last in (rows, 700, 4160, 65_536):
        lengths = list(range(max(last, rows) - rows + 1, max(last, rows) + 1))
        entry = ops.ring.entry(int(ops.ring.step_counter))
        entry.clear(rows)
        entry.context_len[:rows] = lengths
        entry.slot_idx[:rows] = 3
        ops.stage(rows, heads, chunk=True)
        ops.publish(1)
        torch.cuda.synchronize()
        truth = allocate_inputs(layout, 4, 1024, torch.device("cpu"))
        ctas = num_ctas(CUDA)
        work_plan.fill_plan(truth, lengths, [3] * rows, heads, ctas, chunk=True)
        assert torch.equal(ops.inputs.row_plan.cpu()[:rows], truth.row_plan[:rows])
        used = work_plan.num_calls(rows) * ctas
        ours, theirs = (
            torch.where(x[:, 3:4] > 0, x, 0)[:used] for x in (ops.inputs.work.cpu(), truth.work)
        )
        assert torch.equal(ours, theirs)


CHUNKS = [(100, 100), (512, 512), (700, 130), (4161, 512), (64, 64), (65, 33), (65, 9), (9000, 40)]
"""Tokens, and how many of them are the chunk's rows."""


@pytest.mark.parametrize(("tokens", "rows"), CHUNKS)
@pytest.mark.parametrize(
    ("heads", "widths"), [(5, (128, 128)), (16, (128, 128)), (20, (192, 256)), (24, (128, 128))]
)
def test_rows_of_a_chunk_that_share_pages_have_their_bits_alone(
    heads: int, widths: tuple[int, int], tokens: int, rows: int
) -> None:
    case = make_case([tokens], heads, widths, device="cuda")
    together = result(as_chunk(case, rows))
    assert together.isfinite().all()
    assert torch.equal(together, result(as_chunk(case, rows, chunk=False)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [3, 300, 511, 575])
@pytest.mark.parametrize("heads", [5, 16, 20])
def test_a_token_that_is_no_number_spoils_only_the_rows_of_a_chunk_that_attend_it(
    heads: int, column: int, value: float
) -> None:
    case = make_case([150], heads, device="cuda")
    for token in (71, 75, 127, 128, 149):
        case.contents[0][token, column] = value
    place_pages(case, list(range(case.slab.shape[0])))
    together, alone = (result(as_chunk(case, 100, chunk)) for chunk in (True, False))
    assert torch.equal(together.view(torch.int16), alone.view(torch.int16))
    assert together[:21].isfinite().all()
    assert not together[21:].isfinite().all()


@pytest.mark.parametrize("ctas", [1, 7, 50, 144])
@pytest.mark.parametrize("heads", [16, 96, 128])
def test_any_number_of_ctas_gives_the_same_bits(
    heads: int, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(MIXED, heads, device="cuda")
    before = result(case)
    monkeypatch.setattr(HopperAttention, "num_ctas", ctas)
    replan(case, ctas)
    assert torch.equal(result(case), before)


@pytest.mark.parametrize(
    ("heads", "tile"), [(heads, tile) for heads in (16, 20) for tile in (16, 32, 48)]
    + [(heads, tile) for heads in (64, 96) for tile in (32, 48)],
)  # fmt: skip
def test_any_head_tile_gives_the_same_bits(
    heads: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(MIXED, heads, device="cuda")
    before = result(case)
    monkeypatch.setattr(head_tiles, "head_tile", lambda *_: tile)
    monkeypatch.setattr(attention_hopper, "most_heads", lambda *_: tile)
    replan(case, num_ctas(CUDA))
    assert torch.equal(result(case), before)


@pytest.mark.parametrize("min_chains", [0, 10**6], ids=["chains", "single splits"])
@pytest.mark.parametrize("heads", [16, 96, 97, 128])
def test_chains_folded_by_attend_or_by_expand_have_the_same_bits(
    heads: int, min_chains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(MIXED[:7], heads, device="cuda")
    before = result(case)
    monkeypatch.setattr(head_tiles, "MIN_CHAINS", min_chains)
    replan(case, num_ctas(CUDA))
    assert torch.equal(result(case), before)


@pytest.mark.parametrize("cta_rows", [1, 3, 16])
@pytest.mark.parametrize("heads", [16, 96])
@pytest.mark.parametrize("values_cluster_parts", EXPANDS)
def test_any_form_of_expand_gives_the_same_bits(
    heads: int,
    cta_rows: int,
    values_cluster_parts: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(MIXED, heads, device="cuda")
    before = result(case)
    form = ExpandForm(*values_cluster_parts, cta_rows)
    form = form._replace(cta_rows=min(cta_rows, form.max_rows))
    monkeypatch.setattr(attention_hopper, "expand_form", lambda *_: form)
    assert torch.equal(result(case), before)


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [(96, (1024,) * 8), (128, (512, 400)), (128, (512, 0, 65, 1)), (96, (4096,)), (128, (2500,))],
)
def test_ctas_of_expand_that_ask_for_nodes_before_weights_give_the_same_bits(
    heads: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many nodes keep most SMs busy, so few lie in a row: starts_late in expand_nodes.cuh."""
    case = make_case(lengths, heads, device="cuda")
    before = result(case)
    form = ExpandForm(64, 2, 8, len(lengths))
    monkeypatch.setattr(attention_hopper, "expand_form", lambda *_: form)
    assert torch.equal(result(case), before)


def from_absorbed(case: Case, row: int, q_abs: torch.Tensor) -> torch.Tensor:
    """o [heads, v] float64 of one row from its absorbed query: with peaked scores its landing
    alone moves the result by more than the bounds."""
    content = case.contents[row].double()
    scores = q_abs[row].double() @ content.T * case.scale
    latent = torch.softmax(scores, -1) @ content[:, :512]
    w_uv = case.kv_b.view(case.heads, -1, 512)[:, case.nope_dim :].double()
    return torch.einsum("hvc,hc->hv", w_uv, latent)


@pytest.mark.parametrize("heads", [16, 96, 128])
def test_scores_far_above_the_first_pages_maximum_are_exact(heads: int) -> None:
    case = make_case(LONG, heads, device="cuda")
    for content in case.contents:  # in second and later pages of splits, some of them unmatched
        for page in (3, 17, 30, 34):
            content[page * PAGE_SIZE + 11] *= 40
    place_pages(case, list(range(case.slab.shape[0])))
    ops = launches(case)
    q_abs = absorb(case, ops)
    peak = q_abs[0].double() @ case.contents[0].double().T * case.scale * 1.4427
    firsts = peak[:, : 64 * PAGE_SIZE].view(heads, -1, 2, PAGE_SIZE)
    assert (firsts[:, :, 1].amax(-1) > firsts[:, :, 0].amax(-1) + 60).any()
    out = attend_and_expand(case, ops, "f32", q_abs)
    for row in range(case.rows):
        truth = from_absorbed(case, row, q_abs)
        assert oracle.relative_l2(out[row], truth) <= 6e-3
        assert torch.equal(result(select(case, [row]))[0], out[row])


@pytest.mark.parametrize("heads", [16, 96, 128])
def test_one_capture_serves_all_lengths(heads: int) -> None:
    sets: Sequence[Sequence[int]] = (
        (0, 1, 63, 64), (65, 777, 1024, 1025), (4096, 4097, 0, 8192), (64, 64, 64, 17_000),
        (0, 0, 0, 0),
    )  # fmt: skip
    cases = [make_case(lengths, heads, device="cuda") for lengths in sets]
    cases = [replace(case, q=cases[0].q, kv_b=cases[0].kv_b) for case in cases]
    wide = max(cases, key=lambda case: case.inputs.block_table.shape[1])
    pages = max(case.slab.shape[0] for case in cases)
    slab = torch.zeros((pages, *wide.slab.shape[1:]), dtype=torch.bfloat16, device="cuda")
    own = {name: getattr(wide.inputs, name).clone() for name in (*WORDS, "block_table")}
    static = replace(wide, slab=slab, inputs=replace(wide.inputs, **own))
    out = torch.empty(4, heads * 128, dtype=torch.bfloat16, device="cuda")
    workspace = allocate_workspace(4, static.max_ctx, heads, "f32", CUDA)
    ops = launches(static)
    q_abs = absorb(static, ops)

    def block() -> None:
        ops.attend(q_abs, slab, 1, workspace, 0, 4, static.scale)
        ops.expand(workspace, static.kv_b, out, 0, 4, 128)

    block()
    driver.begin_capture(stream().cuda_stream)
    block()
    graph = driver.end_capture(stream().cuda_stream)
    for case in cases:
        before = attend_and_expand(case, launches(case), "f32", q_abs)
        slab[: case.slab.shape[0]].copy_(case.slab)
        static.inputs.block_table.fill_(0x7FFF_FFF0)
        table = case.inputs.block_table
        static.inputs.block_table[:, : table.shape[1]].copy_(table)
        for name in WORDS:
            getattr(static.inputs, name).copy_(getattr(case.inputs, name))
        workspace.partial_o.fill_(torch.nan)
        workspace.partial_ml.fill_(torch.nan)
        out.fill_(torch.nan)
        graph.launch(stream().cuda_stream)
        assert torch.equal(out.view(4, heads, 128), before)
    graph.close()


def append_and_attend(
    case: Case, ops: CudaOps, kv: torch.Tensor, junk: torch.Tensor
) -> torch.Tensor:
    """The step's order of kernels, held up before the append by a node that zeroes many pages."""
    rows, heads = case.rows, case.heads
    q_abs = torch.zeros(rows, heads, 576, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(rows, heads * 128, dtype=torch.bfloat16, device="cuda")
    workspace = allocate_workspace(rows, case.max_ctx, heads, ops.numerics, CUDA)
    ops.inputs.zero_pages[:] = torch.arange(len(ops.inputs.zero_pages), device="cuda")
    ops.inputs.num_zero_pages.fill_(len(ops.inputs.zero_pages))
    ops.library.function("zero_pages").prefer_shared_memory()  # attend's CTAs find room beside it
    weight = torch.ones(512, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    ops.zero_pages(junk)
    ops.append_absorb(
        kv, weight, 1e-6, None, case.slab, case.layer, case.q, case.kv_b, q_abs, rows, 128
    )
    ops.attend(q_abs, case.slab, case.layer, workspace, 0, rows, case.scale)
    ops.expand(workspace, case.kv_b, out, 0, rows, 128)
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize(("numerics", "appended"), [("f32", 2), ("f32", 3), ("landed", 3)])
def test_no_page_of_this_step_is_read_before_its_append(numerics: Numerics, appended: int) -> None:
    # The rows share a slot; the first appended token is the last of its page.
    lengths = [640 + i for i in range(appended)]
    case = make_case([lengths[-1]], 16, device="cuda")
    slot = int(case.inputs.slot_idx[0])
    table = case.inputs.block_table[slot]
    inputs = allocate_inputs(RingLayout(128, 1, 512), 1, case.inputs.block_table.shape[1], CUDA)
    inputs.block_table[0].copy_(table)
    inputs.slot_idx[:appended] = 0
    inputs.context_len[:appended] = torch.tensor(lengths)
    layers = case.slab.shape[1]
    places = [
        int(table[(n - 1) // PAGE_SIZE]) * layers * PAGE_SIZE + (n - 1) % PAGE_SIZE for n in lengths
    ]
    inputs.kv_row[:appended] = torch.tensor(places)
    work_plan.fill_plan(inputs, lengths, [0] * appended, 16, num_ctas(CUDA))
    q = case.q.repeat(appended, 1)
    step = replace(case, inputs=inputs, q=q, contents=[case.contents[0][:n] for n in lengths])
    ops = CudaOps(
        library(), inputs, StepRing(RingLayout(128, 1, 512), CUDA), numerics, stream().cuda_stream
    )
    kv = torch.randn(appended, 576, device="cuda").bfloat16()
    junk = torch.empty(512, 24, 64, 576, dtype=torch.bfloat16, device="cuda")
    append_and_attend(step, ops, kv, junk)
    truth = append_and_attend(step, ops, kv, junk)  # the tokens are there already

    def stale() -> None:
        for place in places:
            step.slab.view(-1, 576)[place + step.layer * PAGE_SIZE] = 5.0

    def attempts() -> Iterator[bool]:
        """Whether the step's result is right, time after time: each is a race of its own."""
        for _ in range(8):
            stale()
            yield torch.equal(append_and_attend(step, ops, kv, junk), truth)

    assert all(attempts())
    if numerics == "landed":
        return
    # With a plan that calls every page old, what this test watches for shows.
    inputs.row_plan[:, 6] = 1000
    inputs.work[:, 10] = 1000
    assert not all(attempts())


def test_ctas_that_rehearse_for_want_of_work_leave_no_trace() -> None:
    """Enough rows for some splits a CTA, too few for a chain each: attend_many in attend.cu."""
    case = make_case((1024,) * 8, 96, device="cuda")
    splits = case.inputs.work[: num_ctas(CUDA), 3]
    assert splits[0] > 1
    assert (splits == 0).any()
    ops = launches(case)
    q_abs = absorb(case, ops)
    workspace = allocate_workspace(8, 65_536, 96, "f32", CUDA)
    workspace.partial_o.fill_(-7.0)
    workspace.partial_ml.fill_(-7.0)
    ops.attend(q_abs, case.slab, case.layer, workspace, 0, 8, case.scale)
    torch.cuda.synchronize()
    assert (workspace.partial_o[:32] != -7.0).any(-1).all()
    assert (workspace.partial_o[32:] == -7.0).all()
    assert (workspace.partial_ml[32:] == -7.0).all()
    together = result(case)
    for row in (0, 7):
        assert torch.equal(result(select(case, [row]))[0], together[row])
