"""Which device serves, and why; there is no silent fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from latentd.options import StartError
from latentd_kernels import driver, manifest

if TYPE_CHECKING:
    from latentd.options import EngineOptions


def choose_device(options: EngineOptions) -> tuple[torch.device, str]:
    """The device and the reason for it. Raises StartError when the asked one cannot be had."""
    if options.device == "cpu":
        return torch.device("cpu"), "asked for"
    reason = "dtype float32 runs on the cpu only" if options.dtype == "float32" else cuda_refusal()
    if reason is None:
        return torch.device("cuda", 0), "asked for" if options.device == "cuda" else "a GPU is here"
    if options.device == "cuda":
        raise StartError(f"device cuda cannot be used: {reason}")
    return torch.device("cpu"), reason


def cuda_refusal() -> str | None:
    """Why no GPU can be used; None when one can."""
    if driver.device_count() == 0:
        return "no NVIDIA GPU or no driver"
    if not torch.cuda.is_available():
        return "this torch is built without CUDA"
    if not any(manifest.CUBIN_DIR.glob(f"*/{manifest.FILE_NAME}")):
        return f"no cubins in {manifest.CUBIN_DIR} (python -m latentd_kernels.build makes them)"
    return None
