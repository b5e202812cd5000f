"""Writes a trained network as a Hugging Face checkpoint: one bf16 safetensors file and its config.

Names follow the published DeepSeek-V3 files: one tensor per expert, the router bias in float32.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from latentd.demo.architecture import CONFIG, EXPERT_WIDTH, EXPERTS

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from latentd.demo.network import Network


def round_weights(network: Network) -> None:
    """Round every parameter and the router biases, in place, to what bf16 can hold."""
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.copy_(tensor.bfloat16().to(tensor.dtype))


def published(network: Network) -> dict[str, Tensor]:
    """The network's tensors on the CPU under their published names, bf16 but for the biases."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        keep = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        value = tensor.detach().cpu().to(keep)
        if ".experts." not in name:
            tensors[name] = value.contiguous()
            continue
        prefix, projection = name.split(".experts.")
        axis = 1 if projection.startswith("down_proj") else 0
        for expert, part in enumerate(value.split(EXPERT_WIDTH, axis)):
            place = f"experts.{expert}" if expert < EXPERTS else "shared_experts"
            tensors[f"{prefix}.{place}.{projection}"] = part.contiguous()
    return tensors


def save(network: Network, folder: Path) -> int:
    """Write model.safetensors, config.json and generation_config.json; return the weights' bytes.

    Each file appears under its name only when it is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": CONFIG["bos_token_id"], "eos_token_id": CONFIG["eos_token_id"]}
    for name, content in (("config.json", CONFIG), ("generation_config.json", generation)):
        partial = folder / f"{name}.partial"
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / name)
    partial = folder / "model.safetensors.partial"
    save_file(published(network), partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # save_file leaves it to the owner alone
    partial.replace(folder / "model.safetensors")
    return (folder / "model.safetensors").stat().st_size
