"""Which model's shapes are measured: a published geometry by name, or a directory's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from latentd.model import published
from latentd.model.config import ModelConfig
from latentd.options import StartError

if TYPE_CHECKING:
    from typing import Any

PRESETS: Final = {
    "v2-lite": published.DEEPSEEK_V2_LITE,
    "v2": published.DEEPSEEK_V2,
    "v3": published.DEEPSEEK_V3,
    "kimi-k2": published.KIMI_K2,
    "moonlight": published.MOONLIGHT,
    "glm": published.GLM_4_7_FLASH,
}
"""Published geometries; what is quantised there is bfloat16 here."""


def preset_values(name: str) -> dict[str, Any]:
    """The config.json of a preset, as serve and check read it. Raises StartError."""
    try:
        return published.unquantised(PRESETS[name])
    except KeyError:
        known = ", ".join(PRESETS)
        raise StartError(f"config {name!r} is no directory and none of {known}") from None


def read_config(name: str) -> ModelConfig:
    """The config of a preset or of a directory. Raises CheckpointError or StartError."""
    if name not in PRESETS and Path(name).exists():
        return ModelConfig.from_dir(name)
    return ModelConfig.from_dict(preset_values(name))


def write_config(folder: Path, name: str, layers: int | None) -> None:
    """Put the config.json of a preset or of a directory into `folder`, cut to `layers` layers.
    Raises CheckpointError or StartError."""
    read_config(name)  # what is no config is refused by name
    if name in PRESETS:
        values = preset_values(name)
    else:
        path = Path(name)
        values = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    if layers is not None:
        values = values | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(values))
