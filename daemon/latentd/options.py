"""What the engine, the server and the daemon are started with; plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from latentd_client import protocol

if TYPE_CHECKING:
    from pathlib import Path

BUCKETS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
"""Row counts that decode steps are captured for."""
MAX_SLOTS: Final = BUCKETS[-1]
MAX_PREFILL_CHUNK: Final = 512
"""Most prompt rows of one launch: what the expert kernels take."""
PREFILL_CHUNKS: Final = {"cuda": 512, "cpu": 32}
"""Prompt rows of one launch, by device, where nobody says."""
PREFILL_ROWS: Final = {"cuda": 128, "cpu": 32}
"""The same while other slots decode, which wait for them between two steps."""


class StartError(Exception):
    """The engine cannot be started as asked; the text names what, the value and the limit."""


class SelftestFailed(StartError):
    """The self-test found two results that must be the same bits and are not."""


@dataclass(frozen=True)
class EngineOptions:
    """Everything that `start_engine` needs. `kv_pages`: 0 lets every slot reach max_ctx, "auto"
    takes what the device has left, else a number. `prefill_chunk` and `prefill_rows`: 0 leaves them
    to the device.
    `seed` is that of random weights, for which `model_dir` needs a config.json only. `name` is what
    clients are told; without it the name of the directory."""

    model_dir: Path
    name: str = ""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    seed: int = 0
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    numerics: Literal["f32", "landed"] = "f32"
    max_ctx: int = 4096
    max_slots: int = 64
    kv_pages: int | Literal["auto"] = 0
    prefill_chunk: int = 0
    prefill_rows: int = 0
    prefix_cache: bool = True
    eager: bool = False
    attend_only: bool = False  # load kv_b_proj alone and serve attention for other engines
    selftest: bool = True  # compare results before serving; only tests leave it out

    def for_device(self, device_type: str) -> EngineOptions:
        """The same with what depends on the device ("cuda" or "cpu") decided."""
        chunk = self.prefill_chunk or PREFILL_CHUNKS[device_type]
        rows = min(chunk, self.prefill_rows or PREFILL_ROWS[device_type])
        return replace(self, prefill_chunk=chunk, prefill_rows=rows)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Row counts of decode steps: the usual ones below max_slots, then max_slots."""
        return (*(size for size in BUCKETS if size < self.max_slots), self.max_slots)

    @property
    def max_rows(self) -> int:
        """Most rows of one launch."""
        return max(self.max_slots, self.prefill_chunk)


@dataclass(frozen=True)
class AccessOptions:
    """Ids of users and groups, on ipc: those of `allow_users` and `allow_groups` may connect (all,
    if both are empty), `admin_users` may drain too. Over tcp `curve_key` is the file of the
    daemon's key pair, and `curve_clients` and `curve_admins` are files of public keys, a line each
    with a name behind it. Who is an admin through these lists may have a snapshot saved beside
    `save`, nowhere else. A reload may change all but `curve_key`."""

    allow_users: frozenset[int] = frozenset()
    allow_groups: frozenset[int] = frozenset()
    admin_users: frozenset[int] = frozenset()
    curve_key: Path | None = None
    curve_clients: Path | None = None
    curve_admins: Path | None = None
    save: Path | None = None


@dataclass(frozen=True)
class ServerOptions:
    """Where and how the daemon serves. Without `control_endpoint` the control socket is beside the
    data socket (`protocol.control_endpoint`). `credits` is the most a stream may be granted ahead,
    `session_credits` all streams of a session together; `max_waiting` the most requests for new
    slots that wait for room (0: nothing waits); `session_slots` the most slots of a session (0:
    all); `spin_us` the time the engine thread polls after a message before it blocks; `drain_s` the
    time that running work gets when the control socket is asked to drain without naming one;
    `access` who may connect and drain."""

    endpoint: str = protocol.DEFAULT_ENDPOINT
    control_endpoint: str = ""
    lease_s: float = 60.0
    grace_s: float = 60.0
    spin_us: int = 200
    max_frame_bytes: int = protocol.MAX_FRAME_BYTES
    max_frames: int = protocol.MAX_FRAMES
    credits: int = 1024
    session_credits: int = 65536
    max_waiting: int = 0
    session_slots: int = 0
    drain_s: float = 30.0
    access: AccessOptions = field(default_factory=AccessOptions)

    @property
    def shared_credits(self) -> int:
        """The most that all streams of a session may be granted ahead: at least what one may."""
        return max(self.credits, self.session_credits)


@dataclass(frozen=True)
class LifeOptions:
    """How the daemon ends and begins, and for whom: the time that running work gets, where slots
    are saved, and where the last ones are. A reload may change all but `restore`; those settings
    that it has found changed and cannot change are `waiting` for a restart, by name."""

    drain_s: float = 30.0
    save: Path | None = None
    restore: Path | None = None
    access: AccessOptions = field(default_factory=AccessOptions)
    waiting: tuple[str, ...] = ()
