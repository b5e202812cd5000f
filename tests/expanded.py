"""Expanded latent attention with the landings of the bf16 reference model, as an `Ops` of its own.

Keys and values are expanded from the cached rows by kv_b_proj for every query, as transformers
does: nothing is absorbed. Everything but attention is passed on to the wrapped operations, so two
runs differ in the attention alone. Written from the formulas; shares no code with the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from latentd_kernels.geometry import LATENT_DIM, PAGE_SIZE, ROPE_DIM

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.ops import AttentionWorkspace, MoeWorkspace, Ops, Rope, RouterParams

Choices = list["Tensor"]
"""Routed expert ids [rows, top_k] of one route call after another, on the host."""


def land(x: Tensor) -> Tensor:
    """Round to bf16 and come back to float32."""
    return x.to(torch.bfloat16).float()


class ExpandedOps:
    """`inner` with absorb, attend and expand replaced; the cached rows are `inner`'s."""

    def __init__(self, inner: Ops) -> None:
        self.inner = inner
        self.query = torch.empty(0)  # [rows, heads, nope + 64] float32, landed; set by absorb
        self.context: tuple[Tensor, int, float] | None = None  # slab, layer, scale; by attend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def append_absorb(
        self, kv: Tensor, norm_weight: Tensor, eps: float, rope: Rope | None, slab: Tensor,
        layer: int, q: Tensor, kv_b: Tensor, out: Tensor, rows: int, nope_dim: int,
    ) -> None:  # fmt: skip
        """Append by `inner`, keep the query."""
        self.inner.append(kv, norm_weight, eps, rope, slab, layer, rows)
        self.absorb(q, kv_b, rope, out, rows, nope_dim)

    def absorb(
        self, q: Tensor, kv_b: Tensor, rope: Rope | None, out: Tensor, rows: int, nope_dim: int
    ) -> None:
        """Keep the rotated query; absorb nothing."""
        query = q[:rows].float().view(rows, out.shape[1], nope_dim + ROPE_DIM)
        positions = self.inner.inputs.context_len[:rows] - 1
        turned = turn(query[:, :, nope_dim:], positions, rope)
        self.query = torch.cat([query[:, :, :nope_dim], land(turned)], dim=-1)

    def attend(
        self, q_abs: Tensor, slab: Tensor, layer: int, workspace: AttentionWorkspace,
        first_row: int, rows: int, softmax_scale: float, chunk: bool = False,
    ) -> None:  # fmt: skip
        """Keep what expand will need."""
        self.context = slab, layer, softmax_scale

    def expand(
        self, workspace: AttentionWorkspace, kv_b: Tensor, out: Tensor, first_row: int, rows: int,
        nope_dim: int,
    ) -> None:  # fmt: skip
        """Attention of each row over keys and values expanded from its cached rows."""
        assert self.context is not None
        slab, layer, scale = self.context
        inputs, heads = self.inner.inputs, self.query.shape[1]
        kv_rows = kv_b.float().view(heads, -1, LATENT_DIM)
        for row in range(first_row, first_row + rows):
            length = int(inputs.context_len[row])
            if length == 0:
                out[row].zero_()
                continue
            pages = inputs.block_table[int(inputs.slot_idx[row]), : -(-length // PAGE_SIZE)].long()
            cached = slab[pages, layer].flatten(0, 1)[:length].float()
            expanded = land(torch.einsum("hdl,tl->htd", kv_rows, cached[:, :LATENT_DIM]))
            rope_half = cached[None, :, LATENT_DIM:].expand(heads, -1, -1)
            keys = torch.cat([expanded[:, :, :nope_dim], rope_half], dim=-1)
            dots = torch.einsum("hd,htd->ht", self.query[row], keys)
            scores = land(land(dots) * scale)
            weights = land(torch.softmax(scores, dim=-1))
            out[row] = torch.einsum("ht,htd->hd", weights, expanded[:, :, nope_dim:]).flatten()


def turn(x: Tensor, positions: Tensor, rope: Rope | None) -> Tensor:
    """Rotate x [rows, heads, 64] by each row's position, in complex numbers and float32."""
    if rope is None:
        return x
    angles = positions[:, None].float() * rope.inv_freq[None]
    turns = torch.polar(torch.full_like(angles, rope.magnitude), angles)[:, None]
    shape = x.shape[:-1]
    pairs = x.reshape(*shape, -1, 2) if rope.interleaved else x.reshape(*shape, 2, -1).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    return turned.flatten(-2) if rope.interleaved else turned.mT.flatten(-2)


class Routing:
    """`inner` but for its norm_route, which a subclass replaces."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def moe(
        self, x: Tensor, norm_weight: Tensor, eps: float, normed: Tensor, router: Tensor,
        bias: Tensor | None, logits: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
        workspace: MoeWorkspace, rows: int,
    ) -> None:  # fmt: skip
        """norm_route, then the experts of `inner`."""
        self.norm_route(x, norm_weight, eps, normed, router, bias, logits, params, workspace, rows)
        self.inner.experts(normed, gate_up, down, params, workspace, rows)


class RecordRoutes(Routing):
    """`inner`, noting the routed experts of every call in `choices`."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.choices = Choices()

    def norm_route(
        self, x: Tensor, norm_weight: Tensor, eps: float, normed: Tensor, router: Tensor,
        bias: Tensor | None, logits: Tensor, params: RouterParams, workspace: MoeWorkspace,
        rows: int,
    ) -> None:  # fmt: skip
        """Choose as `inner` does and note the ids."""
        self.inner.norm_route(
            x, norm_weight, eps, normed, router, bias, logits, params, workspace, rows
        )
        self.choices.append(workspace.expert_ids[:rows, : params.top_k].cpu().clone())


class ForceRoutes(Routing):
    """`inner`, choosing the experts of an earlier run call by call; weights are its own.

    All other experts' logits become -inf, which a sigmoid router never chooses without its bias.
    """

    def __init__(self, inner: Any, choices: Choices) -> None:
        super().__init__(inner)
        self.choices = iter(choices)

    def norm_route(
        self, x: Tensor, norm_weight: Tensor, eps: float, normed: Tensor, router: Tensor,
        bias: Tensor | None, logits: Tensor, params: RouterParams, workspace: MoeWorkspace,
        rows: int,
    ) -> None:  # fmt: skip
        """Norm, and choose among the noted experts alone."""
        self.inner.norm(x, norm_weight, eps, normed, rows)
        self.inner.linear(normed, router, logits, rows)
        assert params.scoring == "sigmoid", "a softmax would renormalise over the chosen"
        ids = next(self.choices).long().to(logits.device)
        kept = torch.full_like(logits[:rows], -torch.inf)
        kept.scatter_(1, ids, logits[:rows].gather(1, ids))
        self.inner.route(kept, None, replace(params, num_groups=1, top_groups=1), workspace, rows)


def flips(a: Choices, b: Choices) -> int:
    """Calls and rows whose sets of experts differ."""
    pairs = zip(a, b, strict=True)
    return sum(int((x.sort(1).values != y.sort(1).values).any(1).sum()) for x, y in pairs)


def ulp_distance(actual: Tensor, expected: Tensor, at: Tensor | None = None) -> Tensor:
    """|actual - expected| in bf16 ULP of `at`, by default of the expected value itself."""
    exponents = torch.frexp(expected if at is None else at).exponent  # |x| in [2^(e-1), 2^e)
    return (actual - expected).abs() / torch.exp2((exponents - 8).float())
