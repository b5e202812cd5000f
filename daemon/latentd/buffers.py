"""The static buffers of a step, allocated once.

Captured graphs hold the buffers' addresses, so nothing here is ever replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from latentd import memory
from latentd.model.activations import Activations
from latentd.options import StartError
from latentd_kernels.attention_workspace import allocate_workspace
from latentd_kernels.geometry import PAGE_SIZE, ROW_DIM, num_pages
from latentd_kernels.limits import LimitRing
from latentd_kernels.staging import StepRing, allocate_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from latentd.model.config import ModelConfig
    from latentd.options import EngineOptions
    from latentd_kernels.attend_rows import AttendRing
    from latentd_kernels.ops import AttentionWorkspace, StepInputs


@dataclass(frozen=True)
class StepBuffers:
    """Everything a step reads and writes beside the weights."""

    ring: StepRing
    inputs: StepInputs
    slab: Tensor  # [pages, layers, 64, 576] act, zero at start
    acts: Activations
    workspace: AttentionWorkspace
    attend: AttendRing
    logits_host: Tensor  # [vocab] float32, pinned on cuda: one row on its way to the host

    @classmethod
    def allocate(
        cls, config: ModelConfig, options: EngineOptions, device: torch.device, kv_pages: int
    ) -> StepBuffers:
        """All buffers on `device`. On the cpu the slab takes memory only where it is written."""
        layout = memory.step_layout(options)
        act = memory.act_dtype(options)
        limits = LimitRing(config.vocab_size, options.max_slots, layout.entries, device)
        return cls(
            ring=StepRing(layout, device, limits),
            inputs=allocate_inputs(layout, options.max_slots, num_pages(options.max_ctx), device),
            slab=allocate_slab(config, kv_pages, device, act),
            acts=Activations.allocate(config, *memory.activation_rows(options), device, act),
            workspace=allocate_workspace(
                memory.workspace_rows(options),
                options.max_ctx,
                config.num_heads,
                options.numerics,
                device,
                act,
            ),
            attend=memory.attend_ring(config, options, device),
            logits_host=torch.zeros(config.vocab_size, pin_memory=device.type == "cuda"),
        )


def allocate_slab(
    config: ModelConfig, kv_pages: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The zeroed page pool [pages, layers, 64, 576]. Raises StartError when the host cannot even
    map it (the plan does not limit a pool that is committed lazily)."""
    shape = (kv_pages, config.num_layers, PAGE_SIZE, ROW_DIM)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        bits = np.zeros(shape, np.int16 if dtype.itemsize == 2 else np.int32)  # lazily committed
    except MemoryError as error:
        raise StartError(f"a pool of {kv_pages} pages: {error}; lower kv_pages") from None
    return torch.from_numpy(bits).view(dtype)
