"""One step of the model as calls of `Ops`: the same functions on both backends, eager or captured.

Everything is written into buffers that the caller owns; nothing is allocated and nothing is read
back. A row's result depends on that row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd.model.config import LATENT_NORM_EPS
from latentd.model.weights import DenseWeights
from latentd_kernels.attention_shapes import MAX_CALL_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from latentd.model.activations import Activations
    from latentd.model.config import ModelConfig
    from latentd.model.weights import AttentionWeights, MoeWeights, Weights
    from latentd_kernels.ops import AttentionWorkspace, MoeWorkspace, Ops

ATTENTION_ROWS = MAX_CALL_ROWS
"""Most rows whose partial results share the attention workspace; longer chunks go in turns."""


class Model:
    """A config, its weights on a device, and the rotation's frequencies beside them."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.rope = config.rope.to_ops(weights.embed.device)
        self.softmax_scale = config.softmax_scale


def decode_step(
    ops: Ops, model: Model, acts: Activations, workspace: AttentionWorkspace, slab: Tensor,
    rows: int,
) -> None:  # fmt: skip
    """A whole step of `rows` rows, stage to publish: append each row's token, sample the next.

    Leaves the logits in acts.logits[:rows]. slab [pages, layers, 64, 576] act.
    """
    pending = _layers(ops, model, acts, workspace, slab, rows, chunk=False)
    _head(ops, model, acts, pending, 0, rows)
    ops.sample(acts.logits, 0, rows)
    ops.publish(rows)


def prompt_chunk(
    ops: Ops, model: Model, acts: Activations, workspace: AttentionWorkspace, slab: Tensor,
    rows: int, last: bool, prompt_top: int | None = None, step: int = 0,
) -> None:  # fmt: skip
    """A run of `rows` consecutive prompt tokens of one slot, all appended before any attends.

    With `last` the final row's logits come to acts.logits[:1] and its token is published;
    otherwise the step publishes no token. With `prompt_top` the other rows, or without `last` all,
    are scored (see `Ops.score`), as many at a time as there is room for logits.
    """
    pending = _layers(ops, model, acts, workspace, slab, rows, chunk=True)
    if prompt_top is not None:
        scored = rows - last
        for first in range(0, scored, acts.logits.shape[0]):
            count = min(acts.logits.shape[0], scored - first)
            _head(ops, model, acts, pending, first, count)
            ops.sample(acts.logits, first, count, limited=False)
            ops.score(acts.logits, 0, count, first, prompt_top, step)
    if last:
        _head(ops, model, acts, pending, rows - 1, 1)
        ops.sample(acts.logits, rows - 1, 1)
    ops.publish(1 if last else 0)


def _layers(
    ops: Ops, model: Model, acts: Activations, workspace: AttentionWorkspace, slab: Tensor,
    rows: int, chunk: bool,
) -> MoeWorkspace | None:  # fmt: skip
    """Stage, embed and run all layers. Returns the expert outputs that the next norm must add."""
    eps = model.config.rms_norm_eps
    ops.stage(rows, model.config.num_heads, chunk)
    ops.zero_pages(slab)
    ops.embed(model.weights.embed, ops.inputs.token_ids, acts.residual, rows)
    pending: MoeWorkspace | None = None
    for index, layer in enumerate(model.weights.layers):
        _attention(ops, model, acts, workspace, slab, index, rows, chunk, pending)
        if isinstance(layer.mlp, DenseWeights):
            pending = None
            ops.norm(acts.residual, layer.mlp_norm, eps, acts.normed, rows)
            assert acts.inner is not None
            ops.gated_linear(acts.normed, layer.mlp.gate_up, acts.inner, rows)
            ops.linear(acts.inner, layer.mlp.down, acts.residual, rows, accumulate=True)
        else:
            pending = _moe(ops, model, acts, layer.mlp_norm, layer.mlp, rows)
    return pending


def _norm(
    ops: Ops, x: Tensor, weight: Tensor, eps: float, out: Tensor, rows: int,
    pending: MoeWorkspace | None, first: int = 0,
) -> None:  # fmt: skip
    """Norm `rows` rows, adding the pending expert outputs of rows first .. to x before."""
    if pending is None:
        ops.norm(x, weight, eps, out, rows)
    else:
        parts, part_weights = pending.parts[first:], pending.expert_weights[first:]
        ops.norm(x, weight, eps, out, rows, parts, part_weights)


def _attention(
    ops: Ops, model: Model, acts: Activations, workspace: AttentionWorkspace, slab: Tensor,
    index: int, rows: int, chunk: bool, pending: MoeWorkspace | None,
) -> None:  # fmt: skip
    """Norm, attention and its projections; adds to the residual stream, which gets the pending
    expert outputs too: in front of the norm, or with the last product."""
    weights: AttentionWeights = model.weights.layers[index].attention
    nope, rope, eps = model.config.nope_dim, model.rope, model.config.rms_norm_eps
    late: tuple[Tensor, ...] = ()
    if ops.norms_in_product(weights.qkv_a, weights.o, rows):
        late = () if pending is None else (pending.parts, pending.expert_weights)
        ops.norm_linear(acts.residual, weights.norm, eps, weights.qkv_a, acts.qkv_a, *late)
    else:
        _norm(ops, acts.residual, weights.norm, eps, acts.normed, rows, pending)
        ops.linear(acts.normed, weights.qkv_a, acts.qkv_a, rows)
    if weights.q_norm is not None and weights.q_b is not None:
        assert acts.q_a is not None
        assert acts.q_a_normed is not None
        ops.norm(acts.q_a, weights.q_norm, LATENT_NORM_EPS, acts.q_a_normed, rows)
        ops.linear(acts.q_a_normed, weights.q_b, acts.q, rows)
    ops.append_absorb(
        acts.kv, weights.kv_norm, LATENT_NORM_EPS, rope, slab, index, acts.q, weights.kv_b,
        acts.q_abs, rows, nope,
    )  # fmt: skip
    for first in range(0, rows, ATTENTION_ROWS):
        count = min(ATTENTION_ROWS, rows - first)
        ops.attend(acts.q_abs, slab, index, workspace, first, count, model.softmax_scale, chunk)
        ops.expand(workspace, weights.kv_b, acts.o, first, count, nope)
    ops.linear(acts.o, weights.o, acts.residual, rows, True, *late)


def _moe(
    ops: Ops, model: Model, acts: Activations, norm: Tensor, weights: MoeWeights, rows: int
) -> MoeWorkspace:
    """Norm, route and run the chosen experts; their outputs stay in the workspace, unsummed."""
    assert acts.moe is not None
    assert acts.router_logits is not None
    assert model.config.moe is not None
    router, eps = model.config.moe.router, model.config.rms_norm_eps
    ops.moe(
        acts.residual, norm, eps, acts.normed, weights.router, weights.bias, acts.router_logits,
        weights.gate_up, weights.down, router, acts.moe, rows,
    )  # fmt: skip
    return acts.moe


def _head(
    ops: Ops, model: Model, acts: Activations, pending: MoeWorkspace | None, first: int, rows: int
) -> None:
    """Final norm and logits of rows first .. first + rows, into acts.logits[:rows]."""
    x, eps, weight = acts.residual[first:], model.config.rms_norm_eps, model.weights.norm
    _norm(ops, x, weight, eps, acts.normed, rows, pending, first)
    ops.linear(acts.normed, model.weights.head, acts.logits, rows)
