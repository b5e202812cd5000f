"""The static buffers between the operations of a step; a captured graph holds their addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from latentd_kernels.geometry import ROW_DIM
from latentd_kernels.moe_workspace import allocate_moe_workspace

if TYPE_CHECKING:
    from torch import Tensor

    from latentd.model.config import ModelConfig
    from latentd_kernels.ops import MoeWorkspace


@dataclass(frozen=True)
class Activations:
    """Buffers of at least `max_rows` rows ("act" is bf16, or float32 in --dtype float32).

    `q`, `kv` and `q_a` may be columns of `qkv_a`: their row stride is not their width.
    """

    residual: Tensor  # [max_rows, hidden] float32
    normed: Tensor  # [max_rows, hidden] act
    qkv_a: Tensor  # [max_rows, q_lora_rank or heads * (nope + 64), then 576] act
    q_a: Tensor | None  # [max_rows, q_lora_rank] act, columns of qkv_a
    q_a_normed: Tensor | None  # [max_rows, q_lora_rank] act
    q: Tensor  # [max_rows, heads * (nope + 64)] act
    kv: Tensor  # [max_rows, 576] act, columns of qkv_a
    q_abs: Tensor  # [max_rows, heads, 576] act
    o: Tensor  # [max_rows, heads * v] act
    inner: Tensor | None  # [max_rows, intermediate_size] act, of the dense layers
    router_logits: Tensor | None  # [max_rows, experts] float32
    moe: MoeWorkspace | None
    logits: Tensor  # [max_logit_rows, vocab] float32

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        max_rows: int,
        max_logit_rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Activations:
        """Zeroed buffers for steps of up to `max_rows` rows, of which `max_logit_rows` can have
        logits. `dtype` is that of "act"."""

        def act(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def wide(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        rank = config.q_lora_rank
        q_width = rank or config.q_dim
        qkv_a = act(max_rows, config.qkv_a_dim)
        experts, moe = config.moe.num_experts if config.moe else 0, None
        if config.moe:
            moe = allocate_moe_workspace(
                max_rows, config.moe.choices, config.moe.stacked, config.moe.inner,
                config.hidden_size, dtype, device,
            )  # fmt: skip
        return cls(
            residual=wide(max_rows, config.hidden_size),
            normed=act(max_rows, config.hidden_size),
            qkv_a=qkv_a,
            q_a=qkv_a[:, :q_width] if rank else None,
            q_a_normed=act(max_rows, rank) if rank else None,
            q=act(max_rows, config.q_dim) if rank else qkv_a[:, :q_width],
            kv=qkv_a[:, q_width:],
            q_abs=act(max_rows, config.num_heads, ROW_DIM),
            o=act(max_rows, config.o_dim),
            inner=act(max_rows, config.dense_inner) if config.dense_inner else None,
            router_logits=wide(max_rows, experts) if experts else None,
            moe=moe,
            logits=wide(max_logit_rows, config.vocab_size),
        )

    @classmethod
    def bytes_for(
        cls, config: ModelConfig, max_rows: int, max_logit_rows: int, dtype: torch.dtype
    ) -> int:
        """Bytes that `allocate` would take; allocates nothing."""
        acts = cls.allocate(config, max_rows, max_logit_rows, torch.device("meta"), dtype)
        buffers = [*vars(acts).values(), *(vars(acts.moe).values() if acts.moe else ())]
        owners = {id(b.untyped_storage()): b for b in buffers if isinstance(b, torch.Tensor)}
        return sum(b.untyped_storage().nbytes() for b in owners.values())
