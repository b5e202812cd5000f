"""One layer's attention for a client that runs the rest of the model: the calls of `Ops`, eager or
captured. The step's rows name the layer, so that the calls are the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from latentd_kernels.attend_rows import AttendRing, one_layer
from latentd_kernels.layer_weights import LayerWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from latentd.model.config import ModelConfig
    from latentd_kernels.ops import AttentionWorkspace, Ops, StepInputs


@dataclass(frozen=True)
class AttendModel:
    """What attention needs of a model: its config and the kv_b_proj of every layer."""

    config: ModelConfig
    kv_b: LayerWeights

    @classmethod
    def of(cls, config: ModelConfig, kv_b: tuple[Tensor, ...]) -> AttendModel:
        """Of weights [heads * (nope + v), 512] as in the checkpoint."""
        addresses = [weight.data_ptr() for weight in kv_b]
        table = torch.tensor(addresses, dtype=torch.int64, device=kv_b[0].device)
        return cls(config, LayerWeights(kv_b, table))


class AttendStep:
    """The calls, over buffers that the caller owns."""

    def __init__(
        self, model: AttendModel, ops: Ops, of_inputs: Callable[[StepInputs], Ops],
        ring: AttendRing, workspace: AttentionWorkspace, slab: Tensor,
    ) -> None:  # fmt: skip
        """`of_inputs` makes operations like `ops` over other inputs. slab [pages, layers, 64, 576]
        act."""
        self._model = model
        self._ops = ops
        self._layer_ops = of_inputs(replace(ops.inputs, block_table=ring.table))
        self._ring = ring
        self._workspace = workspace
        self._slab = slab

    def run(self, rows: int) -> None:
        """A whole step of `rows` rows of one layer, stage to publish: store each row's latent,
        attend, hand o to the host."""
        ops, ring, config = self._ops, self._ring, self._model.config
        pages, kv_b, nope = one_layer(self._slab), self._model.kv_b, config.nope_dim
        ops.stage(rows, config.num_heads)
        ops.take_rows(ring, config.num_layers, rows)
        ops.zero_pages(self._slab)
        ops.store_rows(ring, pages, rows)
        ops.absorb(ring.q, kv_b, None, ring.q_abs, rows, nope)
        self._layer_ops.attend(ring.q_abs, pages, 0, self._workspace, 0, rows, config.softmax_scale)
        ops.expand(self._workspace, kv_b, ring.o, 0, rows, nope)
        ops.give_rows(ring, rows)
        ops.publish(0)
