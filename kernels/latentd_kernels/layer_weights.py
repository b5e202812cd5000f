"""A weight of every layer, for graphs that serve all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """A weight of every layer. An operation that is given it takes the one of the layer that
    `inputs.token_ids[0]` names."""

    tensors: tuple[Tensor, ...]
    addresses: Tensor  # [layers] int64, where they are, on the device
