"""The settings of the daemon: one frozen dataclass, from defaults, TOML, environment and flags.

The fields of `Config` are the one table of settings: the flags with their help (grouped by
subject), the names in TOML and in the environment, and every check come from it. Only the commands
read a Config; all other modules take plain arguments.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from latentd.settings import ConfigError, Setting
from latentd_kernels.geometry import MAX_CTX

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Config:
    """All settings, checked alone and together; None and "" stand for "not given"."""

    model: Annotated[
        Path | None,
        Setting("model", "checkpoint directory (config.json and safetensors)", "path"),
    ] = None
    weights: Annotated[
        str, Setting("model", "where the weights come from", choices=("checkpoint", "random"))
    ] = "checkpoint"
    model_config: Annotated[
        Path | None,
        Setting(
            "model", "directory with the config.json of --weights random", "path", flag="--config"
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
        int, Setting("memory", "most prompt rows run between two steps", "int", low=1, high=8192)
    ] = 512

    endpoint: Annotated[str, Setting("server", "data socket", "endpoint")] = (
        "ipc:///run/latentd/latentd.sock"
    )
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
    spin_us: Annotated[
        int, Setting("server", "spin after a message before blocking", "int", high=100_000)
    ] = 200
    max_frame_bytes: Annotated[
        int, Setting("server", "largest frame of a message", "int", low=4096, high=1 << 30)
    ] = 16 << 20
    max_frames: Annotated[
        int, Setting("server", "most frames in a message", "int", low=2, high=1024)
    ] = 16

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


SETTINGS: dict[str, Setting] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Config, include_extras=True).items()
}
"""The table: field and TOML key to its row, in the order of the help."""


def flag_of(name: str) -> str:
    """The command line flag of a setting."""
    return SETTINGS[name].flag or "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return "LATENTD_" + name.upper()


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str] = os.environ,
    config_file: str | None = None,
) -> Config:
    """Defaults, then the TOML file, then the environment, then flags; a later source wins.

    `flags` holds only the flags that were given, by field name. Without `config_file`,
    LATENTD_CONFIG names the TOML file, if any. Raises ConfigError for anything wrong anywhere,
    also for a value that a later source overrides.
    """
    values: dict[str, Any] = {}
    path = config_file or environ.get("LATENTD_CONFIG")
    if path:
        values.update(_from_toml(path))
    for name, row in SETTINGS.items():
        text = environ.get(variable_of(name))
        if text is not None:
            values[name] = row.check(name, row.parse(text), f"environment {variable_of(name)}")
    for name, given in flags.items():
        row = SETTINGS[name]
        value = row.parse(given) if isinstance(given, str) else given
        values[name] = row.check(name, value, f"flag {flag_of(name)}")
    return Config(**values)


def _from_toml(path: str) -> dict[str, object]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    for key, value in table.items():
        if key not in SETTINGS:
            known = ", ".join(sorted(SETTINGS))
            raise ConfigError(f"unknown key {key} = {value!r} in {path}; known keys: {known}")
    return {name: SETTINGS[name].check(name, value, path) for name, value in table.items()}
