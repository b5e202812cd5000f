"""A checkpoint against its config, and its way to the device: checked by name, then streamed.

`inspect` decides, almost from the headers alone, whether the checkpoint can be served; `load` fills
weights that are allocated once, chunk by chunk from maps of the files, and hashes what it reads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from latentd.model.config import CheckpointError, ModelConfig
from latentd.model.destinations import KV_B, destinations
from latentd.model.weights import Weights, allocate
from latentd.shards import DTYPES, Entry, map_tensors, read_entries
from latentd.weight_stream import Job, fill

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CheckpointError", "CheckpointReport", "inspect", "load", "tokenizer_hash"]

TOKENIZER = "tokenizer.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint that can be served; `skipped` names what the forward does not use."""

    path: Path
    config: ModelConfig
    entries: dict[str, Entry]  # the tensors to load, by name
    skipped: tuple[str, ...]

    @property
    def bytes_total(self) -> int:
        """Bytes to read."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold them."""
        return tuple(sorted({entry.file for entry in self.entries.values()}))


def inspect(
    path: Path | str, dtype: torch.dtype = torch.bfloat16, config: ModelConfig | None = None,
    attend_only: bool = False,
) -> CheckpointReport:  # fmt: skip
    """Check the checkpoint in directory `path` for a run in `dtype`: config.json, then names,
    dtypes and shapes of all tensors from the headers. Allocates nothing on a device.

    The extra prediction layers behind the last one (MTP), stored rope frequencies and a stored copy
    of a tied head are skipped, with `attend_only` all but kv_b_proj. Raises CheckpointError naming
    the first tensor that is missing, unexpected, duplicated, misshapen or of a dtype that is not
    served, or the file that is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: not a directory; a checkpoint is a directory with config.json and "
            "safetensors files"
        )
    config = config or ModelConfig.from_dir(path)
    stored = read_entries(path)
    skipped = tuple(
        sorted(
            name for name in stored
            if _is_skipped(name, config) or (attend_only and not name.endswith(KV_B))
        )
    )  # fmt: skip
    entries = {name: entry for name, entry in stored.items() if name not in skipped}
    expected = destinations(config, allocate(config, torch.device("meta"), attend_only))
    for name, entry in entries.items():
        _check_dtype(entry, dtype)
        if name in expected and expected[name].shape != entry.shape:
            raise CheckpointError(
                f"{name}: shape {list(entry.shape)} in {entry.file.name}; "
                f"config.json asks for {list(expected[name].shape)}"
            )
    _refuse_names("missing", expected.keys() - entries.keys())
    _refuse_names("unexpected", entries.keys() - expected.keys())
    if HEAD in skipped and not attend_only:
        _check_tied_head(stored[HEAD], stored[EMBED])
    return CheckpointReport(path, config, entries, skipped)


def load(
    path: Path | str,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int, int], None] | None = None,
    attend_only: bool = False,
) -> Weights:
    """Inspect, allocate the weights on `device` and fill them; returns when all are there.

    Takes no host memory beside the weights themselves: the kernel may drop the maps' pages at any
    time, and a map is closed behind its file's last tensor. `dtype` is that of the run (float32 on
    the cpu only): it decides which files are accepted. `progress` gets bytes done and bytes in all
    after every chunk. Raises CheckpointError.
    """
    report = inspect(path, dtype, config, attend_only)
    weights = allocate(config, device, attend_only)
    places = destinations(config, weights)
    jobs = [Job(entry, places[name].view) for name, entry in report.entries.items()]
    digests = fill(jobs, device, progress or (lambda done, total: None))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # strided places are filled by kernels behind the copies
    content = hashlib.sha256(repr(config).encode())
    for name in sorted(report.entries):
        entry = report.entries[name]
        content.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
        content.update(b"".join(digests[name]))
    return Weights(weights.embed, weights.layers, weights.norm, weights.head, content.hexdigest())


def _is_skipped(name: str, config: ModelConfig) -> bool:
    if name == HEAD:
        return config.tie_word_embeddings
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or len(parts) < 3 or not parts[2].isdecimal():
        return False
    behind = int(parts[2]) - config.num_layers
    return 0 <= behind < max(1, config.mtp_layers) or name.endswith(".rotary_emb.inv_freq")


def _check_dtype(entry: Entry, dtype: torch.dtype) -> None:
    """A run in float32 takes every float exactly. One in bfloat16 takes bf16 matrices; vectors
    and the router may be wider where each of their values is a bf16 number (biases stay f32)."""
    small = len(entry.shape) == 1 or entry.name.endswith(".mlp.gate.weight")
    if entry.dtype == "BF16" or (dtype is torch.float32 and entry.dtype in DTYPES):
        return
    if not small or entry.dtype not in DTYPES:
        raise CheckpointError(
            f"{entry.name}: dtype {entry.dtype} in {entry.file.name}; supported: BF16"
            " (F16 and F32 with --device cpu --dtype float32)"
        )
    if entry.name.endswith(".e_score_correction_bias"):
        return
    values = map_tensors(entry.file, [entry.name])[entry.name]
    if not torch.equal(values.to(torch.bfloat16).to(torch.float32), values.to(torch.float32)):
        raise CheckpointError(
            f"{entry.name}: dtype {entry.dtype} with values that BF16 cannot hold; supported: BF16"
        )


def _check_tied_head(head: Entry, embed: Entry) -> None:
    """Some files hold a tied head once more; one with other values belongs to another config."""
    if (head.dtype, head.shape) == (embed.dtype, embed.shape):
        a, b = (map_tensors(e.file, [e.name])[e.name].view(torch.uint8) for e in (head, embed))
        if torch.equal(a, b):
            return
    raise CheckpointError(
        f"{HEAD}: not the same as {EMBED}, to which tie_word_embeddings in config.json ties it"
    )


def _refuse_names(what: str, names: set[str]) -> None:
    if names:
        first, more = min(names), len(names) - 1
        raise CheckpointError(f"{first}: {what}" + (f" (and {more} more)" if more else ""))


def tokenizer_hash(folder: Path) -> str:
    """The sha256 of a checkpoint's tokenizer.json, in hex: clients may ask whether theirs is the
    same. Empty if there is none, or none that can be read; the daemon itself has no use for it."""
    path = folder / TOKENIZER
    try:
        if path.is_file():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        pass
    return ""
