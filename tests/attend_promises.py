"""What attention for clients promises: the bits of the daemon's own step. The rest of the model is
run here: by an engine whose operations send their attention elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

import scenarios
from latentd.backend_steps import CpuBackend
from latentd.operations import AttendDone, SamplingParams
from latentd_kernels import driver
from latentd_kernels.geometry import PAGE_SIZE
from latentd_kernels.reference.attention import rotate
from latentd_kernels.reference.ops import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from latentd.engine import Engine
    from latentd_kernels.ops import Rope

    class Attend(Protocol):
        """Attention of a layer for rows (slot of the caller, position)."""

        def __call__(
            self, layer: int, rows: Sequence[tuple[int, int]], q: Bits, latent: Bits
        ) -> Bits: ...


Bits: TypeAlias = "NDArray[Any]"


def bits(x: torch.Tensor) -> Bits:
    """bf16 as its bits, float32 as it is."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(np.uint16)
    return x.contiguous().numpy()


def tensor(x: Bits) -> torch.Tensor:
    """The other way."""
    if x.dtype == np.uint16:
        return torch.from_numpy(x.copy().view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


class OwnOps(ReferenceOps):
    """The reference operations, but for attention: its slab is never touched."""

    service: Attend

    def append_absorb(
        self, kv: torch.Tensor, norm_weight: torch.Tensor, eps: float, rope: Rope | None,
        slab: torch.Tensor, layer: int, q: torch.Tensor, kv_b: Any, out: torch.Tensor, rows: int,
        nope_dim: int,
    ) -> None:  # fmt: skip
        """Norm and rotate; what the service is sent."""
        act, weight = slab.dtype, norm_weight.float()
        self._layer = layer
        self._latent = torch.zeros(rows, 576, dtype=act)
        self._q = q[:rows].reshape(rows, out.shape[1], nope_dim + 64).to(act, copy=True)
        for row, length in enumerate(self.inputs.context_len[:rows].tolist()):
            x = kv[row].float()
            scale = torch.rsqrt(x[:512].square().mean() + eps)
            self._latent[row, :512] = x[:512] * scale * weight
            self._latent[row, 512:] = rotate(x[512:], length - 1, rope)
            turned = rotate(self._q[row, :, nope_dim:].float(), length - 1, rope)
            self._q[row, :, nope_dim:] = turned

    def attend(self, *args: Any, **kwargs: Any) -> None:
        """It happens elsewhere."""

    def expand(
        self, workspace: Any, kv_b: Any, out: torch.Tensor, first_row: int, rows: int, nope_dim: int
    ) -> None:
        """Have all of it done."""
        lengths, slots = self.inputs.context_len.tolist(), self.inputs.slot_idx.tolist()
        real = [row for row in range(first_row, first_row + rows) if slots[row] >= 0]
        places = [(slots[row], lengths[row] - 1) for row in real]
        o = self.service(self._layer, places, bits(self._q[real]), bits(self._latent[real]))
        out[real] = tensor(o).reshape(len(real), -1)


def send_attention(engine: Engine, service: Attend) -> Engine:
    """Have an engine on the cpu get its attention from a service."""
    assert isinstance(engine.backend, CpuBackend)
    runner = engine.backend.runner
    ops = OwnOps(runner.buffers.inputs, runner.buffers.ring, runner.ops.numerics)  # type: ignore[attr-defined]
    ops.service = service
    runner.ops = ops
    return engine


class EngineService:
    """A service over another engine's admission; slots are opened when they are first named."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seats: dict[int, tuple[int, int]] = {}

    def __call__(self, layer: int, rows: Sequence[tuple[int, int]], q: Bits, latent: Bits) -> Bits:
        seats = [(*self._seat(slot), pos) for slot, pos in rows]
        request = self.engine.admit_attend(layer, seats, q, latent)
        (done,) = run_all(self.engine)
        assert isinstance(done, AttendDone)
        assert done.request is request
        return done.o

    def _seat(self, slot: int) -> tuple[int, int]:
        if slot not in self.seats:
            request = self.engine.admit_open([], SamplingParams(), False)
            run_all(self.engine)
            self.seats[slot] = request.slot_id, request.epoch
        return self.seats[slot]


def run_all(engine: Engine) -> list[Any]:
    """Run until nothing is left to do."""
    events: list[Any] = []
    while engine.has_work:
        events += engine.run()
    return events


def random_rows(engine: Engine, count: int, seed: int) -> tuple[Bits, Bits]:
    """q and latents of `count` rows, of seeds from `seed` on, as the engine's dtype has them."""
    info = engine.info
    width = info.heads * (info.nope_dim + 64)
    drawn = np.stack(
        [
            np.random.default_rng(seed + row).standard_normal(width + 576, np.float32)
            for row in range(count)
        ]
    )
    q, latent = drawn[:, :width].reshape(count, info.heads, -1).copy(), drawn[:, width:].copy()
    if info.dtype == "float32":
        return q, latent
    return tuple((x.view(np.uint32) >> 16).astype(np.uint16) for x in (q, latent))  # type: ignore[return-value]


class Recorded(NamedTuple):
    """One layer's attention as an engine has done it: rows (slot, position), q, latents, o."""

    layer: int
    rows: list[tuple[int, int]]
    q: Bits
    latent: Bits
    o: Bits


class Recorder:
    """Looks into the steps of an eager engine: what a client would have sent, and what came out.
    The rotated part of q is that of the absorbed query, the latents are those in the slab."""

    def __init__(self, engine: Engine) -> None:
        backend: Any = engine.backend
        backend.eager = True
        self.records: list[Recorded] = []
        self._engine, self._buffers, self._ops = engine, backend.runner.buffers, backend.runner.ops
        self._stream = getattr(backend, "stream", None)
        self._attend, self._expand = self._ops.attend, self._ops.expand
        self._ops.attend, self._ops.expand = self._note_layer, self._note

    def stop(self) -> list[Recorded]:
        """What was recorded; the engine is as before."""
        self._ops.attend, self._ops.expand = self._attend, self._expand
        return self.records

    def _note_layer(self, q_abs: Any, slab: Any, layer: int, *args: Any, **kwargs: Any) -> None:
        self._layer = layer
        self._attend(q_abs, slab, layer, *args, **kwargs)

    def _note(
        self, workspace: Any, kv_b: Any, out: torch.Tensor, first: int, rows: int, nope_dim: int
    ) -> None:
        self._expand(workspace, kv_b, out, first, rows, nope_dim)
        if self._stream is not None:
            driver.synchronize(self._stream)
        inputs, acts = self._ops.inputs, self._buffers.acts
        lengths, slots = inputs.context_len.tolist(), inputs.slot_idx.tolist()
        real = [row for row in range(first, first + rows) if slots[row] >= 0]
        places = inputs.kv_row[real] + self._layer * PAGE_SIZE
        q = acts.q[real].reshape(len(real), -1, nope_dim + 64).clone()
        q[..., nope_dim:] = acts.q_abs[real][..., 512:]
        latent = self._buffers.slab.view(-1, 576)[places]
        rows_of = [(slots[row], lengths[row] - 1) for row in real]
        o = out[real].reshape(len(real), q.shape[1], -1)
        self.records.append(Recorded(self._layer, rows_of, *map(_host_bits, (q, latent, o))))


def replay(records: list[Recorded], service: EngineService) -> int:
    """Ask the service for the same, and check each bit; the number of rows."""
    count = 0
    for record in records:
        o = service(record.layer, record.rows, record.q, record.latent)
        assert o.shape == record.o.shape
        differing = np.flatnonzero((o != record.o).reshape(len(o), -1).any(1))
        where = [record.rows[row] for row in differing]
        assert not where, f"layer {record.layer}: rows {where} of {len(o)} differ"
        count += len(o)
    service.engine.slots.check()
    return count


def _host_bits(x: torch.Tensor) -> Bits:
    return bits(x.cpu()).copy()


def steps_recorded_in_one_engine_have_the_same_bits_in_another(
    own: Engine, service: Engine, lengths: Sequence[int], steps: int
) -> None:
    """Prompts run natively in both, then steps of all slots in one and their attention in the
    other, in one request a layer and row by row."""
    prompts = [scenarios.draw_tokens(length, length) for length in lengths]
    slots = [scenarios.open_slot(own, prompt) for prompt in prompts]
    recorder = Recorder(own)
    for _ in range(steps):
        scenarios.step(own, [(slot, None) for slot in slots])
    records = recorder.stop()
    alone = [
        Recorded(r.layer, [r.rows[i]], *(x[i : i + 1] for x in (r.q, r.latent, r.o)))
        for r in records for i in range(len(r.rows))
    ]  # fmt: skip
    assert len(records) == steps * own.info.layers
    for asked in (records, alone):
        sends = EngineService(service)
        opened = [scenarios.open_slot(service, prompt) for prompt in prompts]
        for slot, twin in zip(slots, opened, strict=True):
            sends.seats[slot.request.slot_id] = twin.request.slot_id, twin.request.epoch
        assert replay(asked, sends) == steps * own.info.layers * len(lengths)
        for twin in opened:
            scenarios.close(service, twin)
    for slot in slots:
        scenarios.close(own, slot)


def a_prompt_in_runs_has_the_bits_of_its_chunks(own: Engine, service: Engine, length: int) -> None:
    """`own` takes chunks of as many rows as `service` takes in a request."""
    recorder = Recorder(own)
    slot = scenarios.open_slot(own, scenarios.draw_tokens(length, 5))
    records = recorder.stop()
    sends = EngineService(service)
    assert replay(records, sends) == length * own.info.layers
    scenarios.close(own, slot)
    service.close(*sends.seats[slot.request.slot_id])


def daemons_of_both_kinds_have_the_same_bits(full: Engine, alone: Engine, positions: int) -> None:
    """One that serves the whole model and one that serves attention alone."""
    found: list[list[bytes]] = []
    for engine in (full, alone):
        service = EngineService(engine)
        found.append(
            [
                service(layer, [(0, pos)], *random_rows(engine, 1, 9 * pos + layer)).tobytes()
                for pos in range(positions)
                for layer in range(engine.info.layers)
            ]
        )
    assert found[0] == found[1]
