"""What the attention launches refuse, before any kernel runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from attention_case import LAYOUT, make_case
from latentd_kernels import attention_workspace
from latentd_kernels.attention import AttentionLaunches, expand_form
from latentd_kernels.attention_workspace import (
    allocate_workspace,
    device_items,
    workspace_bytes,
    workspace_items,
)
from latentd_kernels.geometry import MAX_CTX, MAX_SPLITS, num_splits
from latentd_kernels.staging import StepRing

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.library import Library

CPU = torch.device("cpu")


def launches() -> AttentionLaunches:
    """Launches without a library: anything that gets as far as a launch is an AttributeError."""
    case = make_case((5,), 1)
    no_library = cast("Library", cast(Any, None))
    return AttentionLaunches(no_library, case.inputs, StepRing(LAYOUT, CPU), "f32", 0)


def attend(slab: Tensor, layer: int, heads: int = 4, rows: int = 1) -> None:
    workspace = allocate_workspace(1, 64, 4, "f32", CPU)
    q_abs = torch.zeros(1, heads, 576, dtype=torch.bfloat16)
    launches().attend(q_abs, slab, layer, workspace, 0, rows, 0.1)


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_outside_the_page_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=f"layer {layer} of a slab that has layers 0 to 2"):
        attend(torch.zeros(2, 3, 64, 576, dtype=torch.bfloat16), layer)


def test_a_page_stride_with_gaps_is_refused() -> None:
    slab = torch.zeros(2, 4, 64, 576, dtype=torch.bfloat16)[:, :3]
    with pytest.raises(ValueError, match="slab strides"):
        attend(slab, 0)


def test_a_slab_off_16_bytes_is_refused() -> None:
    size = 3 * 64 * 576
    slab = torch.zeros(size + 1, dtype=torch.bfloat16)[1:].view(1, 3, 64, 576)
    with pytest.raises(ValueError, match="slab address"):
        attend(slab, 0)


def test_another_page_size_is_refused() -> None:
    with pytest.raises(ValueError, match="slab shape"):
        attend(torch.zeros(2, 3, 32, 576, dtype=torch.bfloat16), 0)


@pytest.mark.parametrize("heads", [0, 129])
def test_a_head_count_without_kernel_is_refused(heads: int) -> None:
    with pytest.raises(ValueError, match=f"{heads} attention heads"):
        attend(torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16), 0, heads=heads)


@pytest.mark.parametrize("rows", [0, 129])
def test_a_row_count_beyond_one_call_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows"):
        attend(torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16), 0, rows=rows)


def test_head_widths_without_kernel_are_refused() -> None:
    kv_b = torch.zeros(4 * (128 + 256), 512, dtype=torch.bfloat16)
    q = torch.zeros(1, 4 * 192, dtype=torch.bfloat16)
    out = torch.zeros(1, 4, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="128/256: there are kernels for 128/128 and 192/256"):
        launches().absorb(q, kv_b, None, out, 1, 128)


def test_rows_that_16_byte_words_cannot_read_are_refused() -> None:
    kv = torch.zeros(2, 577, dtype=torch.bfloat16)[:, :576]
    slab = torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="kv: rows of stride 577"):
        launches().append(kv, torch.ones(512), 1e-6, None, slab, 0, 2)


def test_the_workspace_holds_every_context_up_to_its_limit() -> None:
    for max_ctx in (1, 64, 1000, 1024, 1025, 4096, 4160, 65536, MAX_CTX):
        items = workspace_items(1, max_ctx)
        lengths = {max_ctx, *(pages * 64 for pages in range(1, max_ctx // 64 + 1, 7))}
        assert max(num_splits(length) for length in lengths) <= items <= MAX_SPLITS


def test_workspace_bytes_are_those_of_the_allocation() -> None:
    for numerics in ("f32", "landed"):
        workspace = allocate_workspace(3, 4096, 20, numerics, CPU)
        size = workspace.partial_o.nbytes + workspace.partial_ml.nbytes
        assert workspace_bytes(3, 4096, 20, numerics, CPU) == size


@pytest.mark.parametrize(("heads", "splits"), [(16, 2), (63, 2), (64, 4), (128, 4)])
def test_the_landed_chain_of_sm_90a_gets_room_for_chains_and_for_splits(
    heads: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_workspace, "has_hopper_kernels", lambda device: True)
    for max_ctx in (64, 1000, 4160, 65_536):
        items = device_items(5, max_ctx, heads, "landed", torch.device("cuda"))
        most = workspace_items(1, max_ctx)
        assert items == (5 * -(-most // splits), 5 * most)


def test_expand_takes_more_rows_a_cta_only_when_the_ctas_do_not_fit_at_once() -> None:
    assert expand_form(rows=1, heads=16, v_dim=128, sm_count=132) == (256, 1)
    assert expand_form(rows=16, heads=16, v_dim=128, sm_count=132) == (512, 2)
    assert expand_form(rows=64, heads=96, v_dim=128, sm_count=132) == (512, 16)
