"""The settings of the daemon: one frozen dataclass.

The fields of `Config` are the one table of settings: the flags with their help (grouped by
subject), the names in TOML and in the environment, every check, what a reload changes,
docs/settings.md and the example systemd/latentd.toml come from it. Only the commands read a Config;
all other modules take plain arguments. `sources.read` fills it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from latentd.accounts import ids
from latentd.options import (
    MAX_PREFILL_CHUNK,
    MAX_SLOTS,
    PREFILL_CHUNKS,
    PREFILL_ROWS,
    AccessOptions,
    EngineOptions,
    LifeOptions,
    ServerOptions,
)
from latentd.settings import ConfigError, Setting, rows, setting, told
from latentd.settings_rules import RULES, Contradiction
from latentd_client.protocol import DEFAULT_ENDPOINT, MAX_FRAME_BYTES, MAX_FRAMES
from latentd_kernels.geometry import MAX_CTX


def _by_device(counts: dict[str, int]) -> str:
    return "0 takes " + ", ".join(f"{count} on {device}" for device, count in counts.items())


@dataclass(frozen=True)
class Config:
    """All settings, checked alone and together; None and "" stand for "not given"."""

    model: Path | None = setting(
        "model", None, "checkpoint directory (config.json and safetensors)", "path"
    )
    name: str = setting(
        "model", "", "name that clients are told; without it, that of the directory"
    )
    weights: str = setting(
        "model", "checkpoint", "where the weights come from", choices=("checkpoint", "random")
    )
    model_config: Path | None = setting(
        "model", None, "directory with the config.json of --weights random (LATENTD_MODEL_CONFIG; "
        "in the file model_config)", "path", own_flag="--config",
    )  # fmt: skip
    seed: int = setting("model", 0, "seed of --weights random", "int", high=2**63 - 1)

    device: str = setting(
        "engine", "auto", "backend; auto says what it chose", choices=("auto", "cuda", "cpu")
    )
    dtype: str = setting(
        "engine", "bfloat16", "arithmetic; float32 (cpu only) is the accuracy reference",
        choices=("bfloat16", "float32"),
    )  # fmt: skip
    numerics: str = setting("engine", "f32", "rounding of the attention", choices=("f32", "landed"))
    eager: bool = setting("engine", False, "run every step without CUDA graphs", "bool")
    attend_only: bool = setting(
        "engine", False, "load kv_b_proj alone and serve attend only, for engines that run the "
        "rest", "bool",
    )  # fmt: skip

    max_ctx: int = setting("memory", 4096, "longest context in tokens", "int", low=1, high=MAX_CTX)
    max_slots: int = setting("memory", 64, "most sequences at a time", "int", low=1, high=MAX_SLOTS)
    kv_pages: int | Literal["auto"] = setting(
        "memory", 0, "pages of 64 tokens in the pool: 0 lets every slot reach max_ctx, auto takes "
        "what the device has left", "pages", high=2**31 - 1,
    )  # fmt: skip
    prefill_chunk: int = setting(
        "memory", 0, f"most prompt rows of one launch; {_by_device(PREFILL_CHUNKS)}", "int",
        high=MAX_PREFILL_CHUNK,
    )  # fmt: skip
    prefill_rows: int = setting(
        "memory", 0, "most prompt rows between two steps, which wait for them; "
        + _by_device(PREFILL_ROWS), "int", high=MAX_PREFILL_CHUNK,
    )  # fmt: skip
    prefix_cache: bool = setting(
        "memory", True, "keep full pages for prompts that begin in the same way", "bool"
    )

    endpoint: str = setting("server", DEFAULT_ENDPOINT, "data socket", "endpoint")
    control_endpoint: str = setting(
        "server", "", "control socket; without it, beside the data socket", "endpoint"
    )
    lease_s: float = setting(
        "server", 60.0, "how long a silent client keeps its slots", "float", low=1, high=86400
    )
    grace_s: float = setting(
        "server", 60.0, "how long lost slots and stored replies are kept", "float", high=86400
    )
    max_waiting: int = setting(
        "server", 0, "requests for new slots that wait while slots or pages are lacking, the "
        "oldest first; steps of open slots wait then too; 0 refuses all of them at once", "int",
        high=1024,
    )  # fmt: skip
    session_slots: int = setting(
        "server", 0, "most slots of a session, those included that its requests wait for; 0: all",
        "int", high=MAX_SLOTS,
    )  # fmt: skip
    spin_us: int = setting(
        "server", 200, "spin after a message before blocking", "int", high=100_000
    )
    max_frame_bytes: int = setting(
        "server", MAX_FRAME_BYTES, "largest frame of a message", "int", low=4096, high=1 << 30
    )
    max_frames: int = setting(
        "server", MAX_FRAMES, "most frames in a message", "int", low=2, high=1024
    )

    allow_users: str = setting(
        "access", "", "who may connect on ipc, beside allow_groups; without both lists all whom "
        "the socket's directory lets through", "users", reloadable=True,
    )  # fmt: skip
    allow_groups: str = setting(
        "access", "", "whose members may connect on ipc", "groups", reloadable=True
    )
    admin_users: str = setting(
        "access", "", "who may drain on ipc, beside root and the daemon's own user", "users",
        reloadable=True,
    )  # fmt: skip
    curve_key: Path | None = setting(
        "access", None, "key pair of the daemon (`latentd keygen`): tcp is encrypted, and may be "
        "served to other machines", "path",
    )  # fmt: skip
    curve_clients: Path | None = setting(
        "access", None, "file of the public keys that may connect over tcp, a line each, a name "
        "behind it", "path", reloadable=True,
    )  # fmt: skip
    curve_admins: Path | None = setting(
        "access", None, "the same of those that may connect and drain", "path", reloadable=True
    )

    drain_s: float = setting(
        "life cycle", 30.0, "time that running work gets after SIGTERM", "float", high=3600,
        reloadable=True,
    )  # fmt: skip
    save: Path | None = setting(
        "life cycle", None, "where SIGTERM saves all slots and sessions before the daemon leaves; "
        "without it they are lost", "path", reloadable=True,
    )  # fmt: skip
    restore: Path | None = setting(
        "life cycle", None, "snapshot to go on with, if there is one; it is deleted once it is "
        "restored", "path",
    )  # fmt: skip
    log_level: str = setting(
        "life cycle", "info", "least severe message that is logged", reloadable=True,
        choices=("debug", "info", "warning", "error"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        for rule in RULES:
            if rule.is_broken(self):
                raise Contradiction(rule)

    def engine_options(self) -> EngineOptions:
        """What the engine is started with. Raises ConfigError when no model is named."""
        model_dir = self.model_config or self.model
        if model_dir is None:
            raise ConfigError("no model: give --model DIR, LATENTD_MODEL, or model in the file")
        return EngineOptions(model_dir, **self._shared(EngineOptions))

    def server_options(self) -> ServerOptions:
        """Where and how the server serves."""
        return ServerOptions(**self._shared(ServerOptions), access=self.access_options())

    def life_options(self) -> LifeOptions:
        """How the daemon ends and begins, and for whom."""
        return LifeOptions(**self._shared(LifeOptions), access=self.access_options())

    def access_options(self) -> AccessOptions:
        """Who may connect and who may drain."""
        return AccessOptions(
            self._ids("allow_users"), self._ids("allow_groups"), self._ids("admin_users"),
            self.curve_key, self.curve_clients, self.curve_admins, self.save,
        )  # fmt: skip

    def _ids(self, name: str) -> frozenset[int]:
        """Those of a setting that lists accounts: they were there when it was checked."""
        kind, text = SETTINGS[name].kind, getattr(self, name)
        found = ids(kind, text)
        if found is None:
            raise ConfigError(f"{name} = {told(text)}: one of these {kind} is not there any more")
        return found

    def _shared(self, kind: type[EngineOptions | ServerOptions | LifeOptions]) -> dict[str, Any]:
        names = {item.name for item in fields(kind)} & SETTINGS.keys()
        return {name: getattr(self, name) for name in names}


SETTINGS: Final[dict[str, Setting]] = rows(fields(Config))
"""The table: field and TOML key to its row, in the order of the help."""
GROUPS: Final = tuple(dict.fromkeys(row.group for row in SETTINGS.values()))
"""The subjects, in the same order."""
RELOADABLE: Final = tuple(name for name, row in SETTINGS.items() if row.reloadable)
"""What a reload changes; all else needs a restart."""
