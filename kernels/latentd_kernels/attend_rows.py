"""Rows of attention that a client brings itself: their way to the device and back.

They lie in host memory, in as many entries as the step ring has; the device picks one by its step
counter, so that a graph can hold the launches (csrc/attend_rows.cu).
"""

from __future__ import annotations

from ctypes import c_int32, c_int64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from latentd_kernels.geometry import PAGE_SIZE, ROPE_DIM, ROW_DIM
from latentd_kernels.launcher import Launcher

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument

_THREADS: Final = 256


@dataclass(frozen=True)
class AttendRing:
    """What goes in and out, in host memory, and its copies on the device. The slab and its tables
    are seen as those of a model of one layer, whose pages are the layers of the true pages."""

    host_q: Tensor  # [entries, max_rows, heads * (nope + 64)] act
    host_kv: Tensor  # [entries, max_rows, 576] act
    host_o: Tensor  # [entries, max_rows, heads * v] act
    q: Tensor  # [max_rows, heads * (nope + 64)] act, device
    kv: Tensor  # [max_rows, 576] act, device
    q_abs: Tensor  # [max_rows, heads, 576] act, device
    o: Tensor  # [max_rows, heads * v] act, device
    table: Tensor  # [max_slots, max_pages] int32, device: page * layers + layer of the rows' slots

    @classmethod
    def allocate(
        cls, entries: int, max_rows: int, heads: int, nope_dim: int, v_dim: int,
        table: tuple[int, int], device: torch.device, dtype: torch.dtype,
    ) -> AttendRing:  # fmt: skip
        """Zeroed. On cuda the host bytes are pinned and mapped. `table` is the shape of the block
        table."""
        cuda, q_dim, o_dim = device.type == "cuda", heads * (nope_dim + ROPE_DIM), heads * v_dim

        def host(width: int) -> Tensor:
            shape = (entries, max_rows, width)
            where = device if device.type == "meta" else None
            return torch.zeros(shape, dtype=dtype, pin_memory=cuda, device=where)

        def act(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            host(q_dim), host(ROW_DIM), host(o_dim), act(max_rows, q_dim), act(max_rows, ROW_DIM),
            act(max_rows, heads, ROW_DIM), act(max_rows, o_dim),
            torch.full(table, -1, dtype=torch.int32, device=device),
        )  # fmt: skip

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return sum(int(t.nbytes) for t in (self.q, self.kv, self.q_abs, self.o, self.table))


def one_layer(slab: Tensor) -> Tensor:
    """A slab as one of a single layer: page p of layer l is page p * layers + l."""
    pages, layers = slab.shape[:2]
    return slab.view(pages * layers, 1, PAGE_SIZE, ROW_DIM)


class AttendRowLaunches(Launcher):
    """take_rows, store_rows and give_rows."""

    def take_rows(self, ring: AttendRing, layers: int, rows: int) -> None:
        """See `Ops.take_rows`."""
        inputs, entries = self.inputs, ring.host_q.shape[0]
        args: list[Argument] = [
            ring.host_q, ring.host_kv, self.ring.step_counter, c_int64(entries),
            c_int64(ring.q.numel() // 8), c_int64(ring.kv.numel() // 8), ring.q, ring.kv,
            c_int32(ring.q.shape[1] // 8), c_int32(ROW_DIM // 8), inputs.token_ids, inputs.slot_idx,
            inputs.context_len, inputs.block_table, ring.table, c_int32(layers),
            c_int32(inputs.block_table.shape[1]),
        ]  # fmt: skip
        self.library.launch("take_rows", (rows, 4, 1), _THREADS, args, stream=self.stream)

    def store_rows(self, ring: AttendRing, slab: Tensor, rows: int) -> None:
        """See `Ops.store_rows`."""
        args: list[Argument] = [ring.kv, self.inputs.kv_row, slab]
        self.library.launch("store_rows", (rows, 1, 1), ROW_DIM // 8, args, stream=self.stream)

    def give_rows(self, ring: AttendRing, rows: int) -> None:
        """See `Ops.give_rows`."""
        args: list[Argument] = [
            ring.o, ring.host_o, self.ring.step_counter, c_int64(ring.host_o.shape[0]),
            c_int64(ring.o.numel() // 8), c_int32(ring.o.shape[1] // 8),
        ]  # fmt: skip
        self.library.launch("give_rows", (rows, 2, 1), _THREADS, args, stream=self.stream)
