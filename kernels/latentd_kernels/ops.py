"""The operations of a decode step, as one typed protocol that both backends implement.

`CudaOps` launches cubin kernels; `ReferenceOps` computes the same with torch, row by row. Every
operation writes into tensors that the caller owns and returns nothing, so a graph can hold it.
"act" below is bf16 (or float32 when the cpu backend runs with --dtype float32); an output's dtype
decides whether a value lands. `rows` counts batch rows; padding rows have slot_idx -1,
context_len 0, kv_row -1 and token -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.attend_rows import AttendRing
    from latentd_kernels.layer_weights import LayerWeights

Numerics = Literal["f32", "landed"]


@dataclass(frozen=True)
class StepInputs:
    """Static device buffers that `stage` fills and every other operation reads."""

    token_ids: Tensor  # [max_rows] int32, -1 on padding
    slot_idx: Tensor  # [max_rows] int32, -1 on padding
    last_token: Tensor  # [max_slots] int32, what `sample` chose last for each slot
    context_len: Tensor  # [max_rows] int32, tokens attended including the one appended now
    kv_row: Tensor  # [max_rows] int64, page * layers * 64 + offset; -1 skips the append
    temperature: Tensor  # [max_rows] float32, 0 = greedy
    top_k: Tensor  # [max_rows] int32, 0 = off
    top_p: Tensor  # [max_rows] float32, 1 = off
    min_p: Tensor  # [max_rows] float32, 0 = off
    seed: Tensor  # [max_rows] int64, the bits of an unsigned 64-bit seed
    split_start: Tensor  # [max_rows + 1] int32, prefix sum of splits, for the portable kernels
    row_plan: Tensor  # [max_rows, 8] int32, private to the backend (work_plan.py)
    work: Tensor  # [attend calls * MAX_CTAS, 12] int32, private to the backend
    block_table: Tensor  # [max_slots, max_pages] int32, -1 unmapped
    zero_pages: Tensor  # [max_zero_pages] int32, pages claimed by this step
    num_zero_pages: Tensor  # [1] int32


@dataclass(frozen=True)
class Rope:
    """Rotation of the rope half. Position p turns pair i by p * inv_freq[i] (f32 product)."""

    inv_freq: Tensor  # [32] float32, device
    magnitude: float  # multiplies cos and sin (YaRN attention factor; 1 for DeepSeek files)
    interleaved: bool  # pairs are (2i, 2i+1) if true, else (i, i+32)


@dataclass(frozen=True)
class AttentionWorkspace:
    """Partial results of `attend`, read by `expand`; what an item is, the backend decides.

    Portable kernels and cpu: item = split_start[row] + split - first. f32 mode on sm_90a: the nodes
    of work_plan.py, maxima exponents of two. landed mode on sm_90a: an item of partial_ml is a
    split of a row, one of partial_o a chain (attention_landed.py), as many for each row as the
    longest context has.
    """

    partial_o: Tensor  # [items, heads, 512] act in f32 mode, float32 in landed mode
    partial_ml: Tensor  # [items, heads, 2] float32: maximum (scaled score, natural log) and sum


@dataclass(frozen=True)
class RouterParams:
    """How a MoE layer picks experts, from the checkpoint's config."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int  # 1 = no group limit
    top_groups: int
    group_score: Literal["max", "top2"]  # V2 takes a group's maximum, V3 the sum of its best two
    normalize: bool  # divide the chosen weights by their sum (+ 1e-20)
    scaling: float  # multiplies the chosen weights
    num_shared: int  # shared experts, ids num_experts .. num_experts + num_shared - 1, weight 1


@dataclass(frozen=True)
class MoeWorkspace:
    """Choices and intermediate values of a MoE layer. choices = top_k + num_shared."""

    expert_ids: Tensor  # [max_rows, choices] int32, -1 on padding rows
    expert_weights: Tensor  # [max_rows, choices] float32
    hidden: Tensor  # [max_rows * choices, inner] act, silu(gate) * up
    parts: Tensor  # [max_rows, choices, hidden_size] float32, down projections (scratch before)
    plan: Tensor  # [*] int32, private to the backend (size: moe_plan_ints in moe_workspace.py)
    progress: Tensor  # [1 + experts + shared] int32, private, zero between operations
    words: Tensor  # [experts + shared] int64, likewise


class Ops(Protocol):
    """One decode step's operations; `numerics` is fixed when the backend is made."""

    @property
    def inputs(self) -> StepInputs:
        """The step's static inputs, as given when the backend was made."""

    def stage(self, rows: int, heads: int = 0, chunk: bool = False) -> None:
        """Take this step's ring entry: fill StepInputs (first `rows` rows; a token id of -1 with a
        slot is what the slot sampled last), apply block-table updates, compute split_start and what
        else attention over `heads` heads needs (0: the step attends nothing). With `chunk` the rows
        are consecutive tokens of one slot, and so must `attend` be told."""

    def zero_pages(self, slab: Tensor) -> None:
        """Zero the pages that this step claims. slab [pages, layers, 64, 576] act."""

    def embed(self, table: Tensor, token_ids: Tensor, out: Tensor, rows: int) -> None:
        """out[r] = table[token_ids[r]] (0 where the id is -1). table [vocab, hidden] act,
        out [>=rows, hidden] float32 (the residual stream)."""

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        rows: int,
        parts: Tensor | None = None,
        part_weights: Tensor | None = None,
    ) -> None:
        """RMSNorm: out = x * rsqrt(mean(x^2) + eps) * weight. x [rows, dim] float32 or act (row
        stride free), weight [dim] act, out act. With `parts` [rows, choices, dim] float32 and
        `part_weights` [rows, choices] float32, first x += sum_c part_weights[c] * parts[c], in
        order of c, stored back (x must be float32)."""

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        rows: int,
        accumulate: bool = False,
        parts: Tensor | None = None,
        part_weights: Tensor | None = None,
    ) -> None:
        """out[r] = weight @ x[r]. x [rows, k] act, weight [m, k] act, out [rows, m] act or
        float32, row strides free; `accumulate` adds to a float32 out. k a multiple of 32. With
        `parts`, where norms_in_product says so, `out` gets them too, before the product."""

    def norms_in_product(self, weight: Tensor, adder: Tensor, rows: int) -> bool:
        """Whether norm_linear takes the rows and `weight`, and linear takes parts beside `adder`:
        where it saves a node."""

    def norm_linear(
        self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, out: Tensor,
        parts: Tensor | None = None, part_weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        """norm and linear of one row, with the same bits: out[0] = weight @ norm(x[0]), with the
        parts added in what is normed; x stays as it is. out act."""

    def gated_linear(self, x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
        """out[r, i] = silu(weight[i] @ x[r]) * (weight[inner + i] @ x[r]). weight
        [2 * inner, k] act, out [rows, inner] act."""

    def append(
        self,
        kv: Tensor,
        norm_weight: Tensor,
        eps: float,
        rope: Rope | None,
        slab: Tensor,
        layer: int,
        rows: int,
    ) -> None:
        """Norm the latent, rotate the rope half (position context_len - 1), store both at
        kv_row of `layer`. kv [rows, 576] act (row stride free)."""

    def absorb(
        self,
        q: Tensor,
        kv_b: Tensor | LayerWeights,
        rope: Rope | None,
        out: Tensor,
        rows: int,
        nope_dim: int,
    ) -> None:
        """out[r, h] = [W_UK[h]^T q_nope | rotated q_rope]. q [rows, heads * (nope + 64)] act
        (row stride free), kv_b [heads * (nope + v), 512] act as in the checkpoint (or that of
        every layer: LayerWeights), out [rows, heads, 576] act."""

    def append_absorb(
        self, kv: Tensor, norm_weight: Tensor, eps: float, rope: Rope | None, slab: Tensor,
        layer: int, q: Tensor, kv_b: Tensor, out: Tensor, rows: int, nope_dim: int,
    ) -> None:  # fmt: skip
        """append, then absorb, which do not depend on each other."""

    def attend(
        self, q_abs: Tensor, slab: Tensor, layer: int, workspace: AttentionWorkspace,
        first_row: int, rows: int, softmax_scale: float, chunk: bool = False,
    ) -> None:  # fmt: skip
        """Partial attention of rows first_row .. first_row + rows of the step over their pages
        into the workspace from item 0. first_row is a multiple of MAX_CALL_ROWS, and rows is that
        or what is left of the step. q_abs [>=first_row + rows, heads, 576] act. Reads block_table
        and what `stage` derived from the lengths for that many heads and with the same `chunk`,
        which changes no bit of any row."""

    def expand(
        self, workspace: AttentionWorkspace, kv_b: Tensor | LayerWeights, out: Tensor,
        first_row: int, rows: int, nope_dim: int,
    ) -> None:  # fmt: skip
        """Combine the splits of each row in one fixed order (o_lat lands) and
        out[r, h] = W_UV[h] o_lat[h]. out [>=first_row + rows, heads * v] act."""

    def take_rows(self, ring: AttendRing, layers: int, rows: int) -> None:
        """Bring q and kv of this step's ring entry to the device, and fill the rows' entries of
        ring.table: of the layers that token_ids name. In front of `zero_pages`."""

    def store_rows(self, ring: AttendRing, slab: Tensor, rows: int) -> None:
        """Store ring.kv at kv_row (-1 skips a row), which counts the layer in."""

    def give_rows(self, ring: AttendRing, rows: int) -> None:
        """Hand ring.o to the host, in this step's ring entry; `publish` comes behind it."""

    def norm_route(
        self, x: Tensor, norm_weight: Tensor, eps: float, normed: Tensor, router: Tensor,
        bias: Tensor | None, logits: Tensor, params: RouterParams, workspace: MoeWorkspace,
        rows: int,
    ) -> None:  # fmt: skip
        """norm (without parts) of x float32 into `normed`, then the choice of experts from the
        float32 logits router @ normed[r]. router [experts, hidden] act, `bias` [experts] float32
        enters the choice, not the weights; `logits` [>=rows, experts] float32 is scratch. Ties go
        to the lower id; choices are in descending score order, then the shared experts. Rows
        whose slot_idx is -1 choose none."""

    def experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
        workspace: MoeWorkspace, rows: int,
    ) -> None:  # fmt: skip
        """workspace.parts[r, c] = down[e] (silu(gate[e] x[r]) * (up[e] x[r])) for every choice
        that norm_route left in the workspace; parts of padding rows are undefined. gate_up
        [experts + shared, 2 * inner, hidden] act, down [experts + shared, hidden, inner] act.
        Reads only chosen experts' weights."""

    def moe(
        self, x: Tensor, norm_weight: Tensor, eps: float, normed: Tensor, router: Tensor,
        bias: Tensor | None, logits: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
        workspace: MoeWorkspace, rows: int,
    ) -> None:  # fmt: skip
        """norm_route, then experts on what it normed; what is left in `normed` and `logits` is
        undefined."""

    def place_limits(self, count: int, step: int) -> None:
        """Give the first `count` slots of the limit entry of step number `step` the limits there,
        for all steps from now on; in front of a step's `stage`."""

    def sample(self, logits: Tensor, first_row: int, rows: int, limited: bool = True) -> None:
        """Choose one token a row from float32 logits [rows, vocab], with the sampling parameters
        of step rows first_row .. ; keep token and log-probability for `publish` (as output rows
        0 .. rows - 1), and the token as the slot's last one. With `limited` the limits of each
        row's slot are put into the logits first."""

    def score(
        self, logits: Tensor, first: int, rows: int, first_row: int, top: int, step: int
    ) -> None:
        """Of rows first .. of logits, behind the `sample` that made tokens of them (as its output
        rows first ..), the `top` likeliest ids and the log-probability of each row's target, into
        rows first_row .. of the score entry of step number `step`, which names the targets."""

    def publish(self, rows: int) -> None:
        """Write the first `rows` sampled tokens and log-probabilities to the ring entry's outputs,
        then its step number, and advance the step counter."""
