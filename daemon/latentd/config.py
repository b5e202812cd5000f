"""The settings of the daemon: one frozen dataclass.

The fields of `Config` are the one table of settings: the flags with their help (grouped by
subject), the names in TOML and in the environment, and every check come from it. Only the commands
read a Config; all other modules take plain arguments. `sources.load` fills it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from latentd import options
from latentd.options import EngineOptions, LifeOptions
from latentd.settings import ConfigError, Setting
from latentd.work import ServerOptions
from latentd_client.protocol import DEFAULT_ENDPOINT, MAX_FRAME_BYTES, MAX_FRAMES
from latentd_kernels.geometry import MAX_CTX


@dataclass(frozen=True)
class Config:
    """All settings, checked alone and together; None and "" stand for "not given"."""

    model: Annotated[
        Path | None,
        Setting("model", "checkpoint directory (config.json and safetensors)", "path"),
    ] = None
    name: Annotated[
        str, Setting("model", "name that clients are told; without it, that of the directory")
    ] = ""
    weights: Annotated[
        str, Setting("model", "where the weights come from", choices=("checkpoint", "random"))
    ] = "checkpoint"
    model_config: Annotated[
        Path | None,
        Setting(
            "model",
            "directory with the config.json of --weights random (LATENTD_MODEL_CONFIG; in the file "
            "model_config)",
            "path",
            flag="--config",
        ),
    ] = None
    seed: Annotated[
        int, Setting("model", "seed of --weights random", "int", low=0, high=2**63 - 1)
    ] = 0

    device: Annotated[
        str, Setting("engine", "backend; auto says what it chose", choices=("auto", "cuda", "cpu"))
    ] = "auto"
    dtype: Annotated[
        str,
        Setting(
            "engine",
            "arithmetic; float32 (cpu only) is the accuracy reference",
            choices=("bfloat16", "float32"),
        ),
    ] = "bfloat16"
    numerics: Annotated[
        str, Setting("engine", "rounding of the attention", choices=("f32", "landed"))
    ] = "f32"
    eager: Annotated[bool, Setting("engine", "run every step without CUDA graphs", "bool")] = False
    attend_only: Annotated[
        bool,
        Setting(
            "engine",
            "load kv_b_proj alone and serve attend only, for engines that run the rest",
            "bool",
        ),
    ] = False

    max_ctx: Annotated[
        int, Setting("memory", "longest context in tokens", "int", low=1, high=MAX_CTX)
    ] = 4096
    max_slots: Annotated[
        int, Setting("memory", "most sequences at a time", "int", low=1, high=128)
    ] = 64
    kv_pages: Annotated[
        int | Literal["auto"],
        Setting(
            "memory",
            "pages of 64 tokens in the pool: 0 lets every slot reach max_ctx, "
            "auto takes what the device has left",
            "pages",
            high=2**31 - 1,
        ),
    ] = 0
    prefill_chunk: Annotated[
        int,
        Setting(
            "memory",
            "most prompt rows of one launch; 0 takes "
            + ", ".join(f"{rows} on {device}" for device, rows in options.PREFILL_CHUNKS.items()),
            "int",
            high=options.MAX_PREFILL_CHUNK,
        ),
    ] = 0
    prefill_rows: Annotated[
        int,
        Setting(
            "memory",
            "most prompt rows between two steps, which wait for them; 0 takes "
            + ", ".join(f"{rows} on {device}" for device, rows in options.PREFILL_ROWS.items()),
            "int",
            high=options.MAX_PREFILL_CHUNK,
        ),
    ] = 0

    prefix_cache: Annotated[
        bool,
        Setting("memory", "keep full pages for prompts that begin in the same way", "bool"),
    ] = True

    endpoint: Annotated[str, Setting("server", "data socket", "endpoint")] = DEFAULT_ENDPOINT
    control_endpoint: Annotated[
        str, Setting("server", "control socket; without it, beside the data socket", "endpoint")
    ] = ""
    lease_s: Annotated[
        float,
        Setting("server", "how long a silent client keeps its slots", "float", low=1, high=86400),
    ] = 60.0
    grace_s: Annotated[
        float,
        Setting(
            "server", "how long lost slots and stored replies are kept", "float", low=0, high=86400
        ),
    ] = 60.0
    max_waiting: Annotated[
        int,
        Setting(
            "server",
            "requests for new slots that wait while slots or pages are lacking, the oldest first; "
            "steps of open slots wait then too; 0 refuses all of them at once",
            "int",
            high=1024,
        ),
    ] = 0
    spin_us: Annotated[
        int, Setting("server", "spin after a message before blocking", "int", high=100_000)
    ] = 200
    max_frame_bytes: Annotated[
        int, Setting("server", "largest frame of a message", "int", low=4096, high=1 << 30)
    ] = MAX_FRAME_BYTES
    max_frames: Annotated[
        int, Setting("server", "most frames in a message", "int", low=2, high=1024)
    ] = MAX_FRAMES

    drain_s: Annotated[
        float,
        Setting(
            "life cycle",
            "time that running work gets after SIGTERM",
            "float",
            high=3600,
            reloadable=True,
        ),
    ] = 30.0
    save: Annotated[
        Path | None,
        Setting(
            "life cycle",
            "where SIGTERM saves all slots and sessions before the daemon leaves; without it they "
            "are lost",
            "path",
            reloadable=True,
        ),
    ] = None
    restore: Annotated[
        Path | None,
        Setting(
            "life cycle",
            "snapshot to go on with, if there is one; it is deleted once it is restored",
            "path",
        ),
    ] = None
    log_level: Annotated[
        str,
        Setting(
            "life cycle",
            "least severe message that is logged",
            reloadable=True,
            choices=("debug", "info", "warning", "error"),
        ),
    ] = "info"

    def __post_init__(self) -> None:
        if self.weights == "random" and self.model_config is None:
            raise ConfigError("weights = 'random' needs --config DIR, a directory with config.json")
        if self.weights == "random" and self.model is not None:
            raise ConfigError(f"model = {self.model} and weights = 'random' exclude each other")
        if self.weights == "checkpoint" and self.model_config is not None:
            raise ConfigError(
                f"model_config = {self.model_config} needs weights = 'random'; a checkpoint is "
                "given by --model, a TOML file by --config-file"
            )
        if self.device == "cuda" and self.dtype == "float32":
            raise ConfigError("dtype = 'float32' needs device = 'cpu'; cuda runs in 'bfloat16'")

    def engine_options(self) -> EngineOptions:
        """What the engine is started with. Raises ConfigError when no model is named."""
        model_dir = self.model_config or self.model
        if model_dir is None:
            raise ConfigError("no model: give --model DIR, LATENTD_MODEL, or model in the file")
        return EngineOptions(model_dir, **self._shared(EngineOptions))

    def server_options(self) -> ServerOptions:
        """Where and how the server serves."""
        return ServerOptions(**self._shared(ServerOptions))

    def life_options(self) -> LifeOptions:
        """How the daemon ends and begins."""
        return LifeOptions(**self._shared(LifeOptions))

    def _shared(self, kind: type[EngineOptions | ServerOptions | LifeOptions]) -> dict[str, Any]:
        names = {item.name for item in fields(kind)} & SETTINGS.keys()
        return {name: getattr(self, name) for name in names}


SETTINGS: dict[str, Setting] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Config, include_extras=True).items()
}
"""The table: field and TOML key to its row, in the order of the help."""
