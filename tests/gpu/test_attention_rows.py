"""append and absorb on the GPU, bit by bit against the torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_case import LAYOUT, Case, absorb, make_case, make_rope, step_inputs
from latentd_kernels.attention import AttentionLaunches
from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM
from latentd_kernels.library import Library
from latentd_kernels.ops import Rope
from latentd_kernels.reference.attention import ReferenceAttention
from latentd_kernels.staging import StepRing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_stream")]

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
ROPES = [
    pytest.param(make_rope(CPU, interleaved=True), id="neighbours"),
    pytest.param(make_rope(CPU, interleaved=False, magnitude=1.25), id="halves, scaled"),
    pytest.param(None, id="no rope"),
]
POSITIONS = (0, 1, 63, 4095, 65_535, 163_839, 1_048_575, 7)


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


def to_cuda(case: Case) -> Case:
    inputs = replace(
        case.inputs,
        context_len=case.inputs.context_len.cuda(),
        kv_row=case.inputs.kv_row.cuda(),
    )
    return replace(case, inputs=inputs, q=case.q.cuda(), kv_b=case.kv_b.cuda())


def launches(library: Library, case: Case) -> AttentionLaunches:
    stream = torch.cuda.current_stream().cuda_stream
    return AttentionLaunches(library, case.inputs, StepRing(LAYOUT, CPU), "f32", stream)


def on_device(rope: Rope | None, device: torch.device) -> Rope | None:
    return rope and replace(rope, inv_freq=rope.inv_freq.to(device))


def bf16_ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance of two bf16 tensors, counted in representable numbers."""

    def ordinal(x: torch.Tensor) -> torch.Tensor:
        bits = x.cpu().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((ordinal(a) - ordinal(b)).abs().max())


@pytest.mark.parametrize("rope", ROPES)
def test_append_is_within_one_ulp_of_the_reference(library: Library, rope: Rope | None) -> None:
    rows = len(POSITIONS)
    gen = torch.Generator().manual_seed(3)
    kv = torch.randn(rows, ROW_DIM + 64, generator=gen).bfloat16()[:, :ROW_DIM]  # a free stride
    weight = torch.rand(512, generator=gen).bfloat16()
    places = [(row * 3 % 5) * 3 * PAGE_SIZE + row * 7 for row in range(rows)]
    places[4] = -1
    slabs = []
    for device in (CPU, CUDA):
        inputs = step_inputs([1] * rows, device)
        inputs.context_len[:rows] = torch.tensor(POSITIONS) + 1
        inputs.kv_row[:rows] = torch.tensor(places)
        slab = torch.full((5, 3, PAGE_SIZE, ROW_DIM), 7.0, dtype=torch.bfloat16, device=device)
        ring = StepRing(LAYOUT, CPU)
        ops = (
            ReferenceAttention(inputs, ring, "f32")
            if device is CPU
            else AttentionLaunches(
                library, inputs, ring, "f32", torch.cuda.current_stream().cuda_stream
            )
        )
        there = torch.empty(rows, ROW_DIM + 64, dtype=torch.bfloat16, device=device)[:, :ROW_DIM]
        there.copy_(kv)
        ops.append(there, weight.to(device), 1e-6, on_device(rope, device), slab, 2, rows)
        slabs.append(slab)
    # Untouched rows are compared too: they hold 7 on both sides, so nothing else was written.
    assert bf16_ulps(slabs[0], slabs[1]) <= 1


def test_append_past_every_32_bit_offset_writes_the_same_bits(library: Library) -> None:
    # 24 layers: int32 element offsets wrap at page 2428, uint32 ones at 4855. The slab is never
    # filled: only the touched page of it is compared.
    slab = torch.empty(4900, 24, PAGE_SIZE, ROW_DIM, dtype=torch.bfloat16, device=CUDA)
    kv = torch.randn(2, ROW_DIM, device=CUDA).bfloat16()
    kv[1] = kv[0]
    inputs = step_inputs([1, 1], CUDA)
    inputs.context_len[:2] = 12
    inputs.kv_row[:2] = torch.tensor([page * 24 * PAGE_SIZE + 11 for page in (1, 4899)])
    stream = torch.cuda.current_stream().cuda_stream
    ops = AttentionLaunches(library, inputs, StepRing(LAYOUT, CPU), "f32", stream)
    slab[1].fill_(3)
    slab[4899].fill_(3)
    weight = torch.ones(512, dtype=torch.bfloat16, device=CUDA)
    ops.append(kv, weight, 1e-6, make_rope(CUDA), slab, 23, 2)
    assert torch.equal(slab[1], slab[4899])
    assert not torch.equal(slab[4899, 23, 11], slab[4899, 23, 10])


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("rows", [1, 8, 17, 100, 130])
@pytest.mark.parametrize(
    ("heads", "widths"), [(3, (128, 128)), (20, (192, 256))], ids=["3 heads", "20 heads 192/256"]
)
def test_absorb_agrees_with_the_reference(
    library: Library, heads: int, widths: tuple[int, int], rows: int, rope: Rope | None
) -> None:
    case = make_case([5] * min(rows, 128), heads, widths)
    case = replace(case, inputs=replace(case.inputs, context_len=torch.arange(rows).int() * 37 + 1))
    gen = torch.Generator().manual_seed(4)
    q = torch.randn(rows, case.q.shape[1], generator=gen).bfloat16()
    case = replace(case, q=q, contents=[q] * rows, rope=rope or make_rope(CPU))
    reference = ReferenceAttention(case.inputs, StepRing(LAYOUT, CPU), "f32")
    there = torch.empty(rows, heads, ROW_DIM, dtype=torch.bfloat16)
    reference.absorb(case.q, case.kv_b, rope, there, rows, widths[0])

    on_gpu = to_cuda(case)
    out = torch.full_like(there, torch.nan, device="cuda")
    launches(library, on_gpu).absorb(
        on_gpu.q, on_gpu.kv_b, on_device(rope, CUDA), out, rows, widths[0]
    )
    # Two f32 orders of one sum differ by at most 2^-16 of its size; near zero that is many ULP.
    torch.testing.assert_close(out.cpu(), there, rtol=2**-7, atol=2**-12)
    assert bf16_ulps(out[..., 512:], there[..., 512:]) <= 1


@pytest.mark.parametrize("heads", [3, 16])
def test_absorb_gives_a_row_the_same_bits_in_every_batch(library: Library, heads: int) -> None:
    case = make_case([9] * 128, heads, device="cuda")
    together = absorb(case, launches(library, case))
    for rows in (1, 2, 17, 64):
        fewer = replace(case, contents=case.contents[:rows], q=case.q[:rows])
        assert torch.equal(absorb(fewer, launches(library, fewer)), together[:rows])


@pytest.mark.parametrize("rows", [1, 8, 17, 64, 128])
@pytest.mark.parametrize("heads", [3, 16, 128])
def test_rows_appended_beside_absorb_have_the_bits_of_append(
    library: Library, heads: int, rows: int
) -> None:
    case = make_case([9] * rows, heads, device="cuda")
    inputs, layers = case.inputs, case.slab.shape[1]
    inputs.kv_row[:rows] = torch.arange(rows, device=CUDA) * layers * PAGE_SIZE + 5
    inputs.kv_row[rows // 2 : rows // 2 + rows // 8] = -1
    kv = torch.randn(rows, ROW_DIM, device=CUDA).bfloat16()
    weight = torch.rand(512, device=CUDA).bfloat16()
    apart, beside = case.slab.clone(), case.slab.clone()
    launches(library, case).append(kv, weight, 1e-6, case.rope, apart, 1, rows)
    q_abs = torch.empty(rows, heads, ROW_DIM, dtype=torch.bfloat16, device=CUDA)
    launches(library, case).append_absorb(
        kv, weight, 1e-6, case.rope, beside, 1, case.q, case.kv_b, q_abs, rows, case.nope_dim
    )
    # As integers: what no row owns is NaN, and must stay the same NaN.
    assert torch.equal(apart.view(torch.int16), beside.view(torch.int16))
    assert not torch.equal(case.slab.view(torch.int16), beside.view(torch.int16))
    assert torch.equal(q_abs, absorb(case, launches(library, case)))
