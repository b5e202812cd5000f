"""Digests of what the kernels compute from fixed inputs, by processor: the golden bits.

`python tests/golden_bits.py` records those of this machine's processors under the present
ARITHMETIC_VERSION; records of another version are dropped. Inputs are integers times powers of two,
so that they are the same bits everywhere; no torch generator is trusted.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

import reference_models
from attention_case import LAYOUT, absorb, attend_and_expand, make_case, place_pages
from harness import Harness
from latentd.model.weights import allocate, tensors
from latentd_kernels import ARITHMETIC_VERSION
from latentd_kernels.driver import device_count
from latentd_kernels.staging import StepRing

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_kernels.attention import AttentionLaunches
    from latentd_kernels.ops import Numerics, Ops
    from latentd_kernels.reference.attention import ReferenceAttention
    from latentd_kernels.staging import EntryViews

RECORD: Final = Path(__file__).parent / "golden" / "bits.json"
LENGTHS: Final = (1, 64, 129, 1000, 2500, 4200, 8300)  # one, two and four pages a split
BOTH: Final[tuple[Numerics, ...]] = ("f32", "landed")
CPU = torch.device("cpu")


def processor(device: torch.device) -> str:
    """What decides the bits of a device: the architecture of the cubins, or of the host with the
    torch whose products the reference uses."""
    if device.type == "cuda":
        from launching import library

        return library().arch
    wanted = ("vendor_id", "cpu family", "model", "model name")
    first = Path("/proc/cpuinfo").read_text(encoding="ascii").split("\n\n", 1)[0]
    lines = [line.split(":", 1) for line in first.splitlines() if ":" in line]
    facts = {name.strip(): value.strip() for name, value in lines}
    found = [facts.get(name, "?") for name in wanted]
    capability = torch.backends.cpu.get_cpu_capability()
    return " ".join([*found, capability, f"torch {torch.__version__}"])


def digests(device: torch.device) -> dict[str, str]:
    """The digest of every case on a device."""
    torch.set_num_threads(1)
    if device.type == "cuda":  # kernels and torch share one stream that is not the legacy one
        from launching import stream

        torch.cuda.set_stream(stream())
    found = {}
    for heads, widths in attention_shapes(device):
        for numerics in BOTH:
            name = f"attention, {heads} heads {widths[0]}/{widths[1]}, {numerics}"
            found[name] = attention(device, heads, widths, numerics)
    for case in reference_models.CASES:
        for numerics in BOTH:
            found[f"steps of {case}, {numerics}"] = steps(device, case, numerics)
    if device.type == "cuda":
        for features, k in ((8, 256), (576, 2048), (3072, 1536), (20000, 512)):
            found[f"linear, {features} x {k}"] = linear(features, k)
    return found


def attention_shapes(device: torch.device) -> list[tuple[int, tuple[int, int]]]:
    """Head counts with (nope, v): each form of the kernels; fewer on the cpu, which has one."""
    few = [(3, (128, 128)), (20, (192, 256))]
    return few if device.type == "cpu" else [*few, (16, (128, 128)), (128, (128, 128))]


def attention(device: torch.device, heads: int, widths: tuple[int, int], numerics: Numerics) -> str:
    """absorb, attend and expand of one batch."""
    case = make_case(LENGTHS, heads, widths, device)
    for seed, content in enumerate(case.contents):
        fill(content, 2.0**-5, seed)
    fill(case.q, 2.0**-5, 100)
    fill(case.kv_b, 2.0**-9, 101)
    place_pages(case, range(case.slab.shape[0]))
    ring = StepRing(LAYOUT, CPU)  # attention reads nothing of it
    ops: AttentionLaunches | ReferenceAttention
    if device.type == "cpu":
        from latentd_kernels.reference.attention import ReferenceAttention

        ops = ReferenceAttention(case.inputs, ring, numerics)
    else:
        from latentd_kernels.attention import AttentionLaunches
        from launching import library

        stream = torch.cuda.current_stream().cuda_stream
        ops = AttentionLaunches(library(), case.inputs, ring, numerics, stream)
    q_abs = absorb(case, ops)
    return digest(q_abs, attend_and_expand(case, ops, numerics, q_abs))


class Sampled(Harness):
    """A harness whose rows are sampled from their whole distribution."""

    def _stage(self, runs: list[tuple[int, list[int]]], bucket: int) -> EntryViews:
        entry = super()._stage(runs, bucket)
        entry.temperature[:], entry.top_p[:], entry.seed[:] = 0.8, 0.95, 11
        return entry


def steps(device: torch.device, case: str, numerics: Numerics) -> str:
    """A prompt and some steps of a whole model, down to the sampled tokens."""
    config = reference_models.config_of(case)
    weights = allocate(config, device)
    for seed, tensor in enumerate(tensors(weights)):
        if tensor.dim() == 1:
            fill(tensor, 2.0**-7, seed)
            tensor += 1
        else:
            fill(tensor, 2.0 ** round(math.log2(tensor.shape[-1] ** -0.5 / 25)), seed)
    fill(weights.embed, 2.0**-5, 1000)
    if device.type == "cuda":
        torch.cuda.synchronize()
    harness = Sampled(config, weights, device, numerics=numerics, max_ctx=192, max_slots=2)
    prompt = np.random.default_rng(7).integers(0, config.vocab_size, 100).tolist()
    rows = [harness.prompt(0, prompt[:70]), harness.prompt(1, prompt[70:])]
    for token in (3, 4, 5):
        rows += harness.step([(0, token), (1, token + 1)], rows=4)
    assert all(row.logits.isfinite().all() for row in rows)
    drawn = torch.tensor([[row.token, row.logprob] for row in rows], dtype=torch.float64)
    return digest(*[row.logits for row in rows], drawn, harness.slab)


def linear(features: int, k: int) -> str:
    """The products of one matrix, plain and gated, in every form that row counts choose."""
    from launching import CUDA, make_ops

    ops: Ops = make_ops()
    weight = torch.empty(features, k, dtype=torch.bfloat16, device=CUDA)
    x = torch.empty(128, k, dtype=torch.bfloat16, device=CUDA)
    fill(weight, 2.0**-9, 1)
    fill(x, 2.0**-5, 2)
    found = []
    for rows in (1, 40, 128):
        plain = torch.empty(rows, features, device=CUDA)
        gated = torch.empty(rows, features // 2, dtype=torch.bfloat16, device=CUDA)
        ops.linear(x, weight, plain, rows)
        ops.gated_linear(x, weight, gated, rows)
        found += [plain, gated]
    return digest(*found)


def fill(tensor: torch.Tensor, unit: float, seed: int) -> None:
    """bf16 numbers of all eight bits and eight exponents, about 40 units in the root mean square.
    Sums of their products are rounded, so that every order of adding has bits of its own."""
    shape, random = tuple(tensor.shape), np.random.default_rng(seed)
    drawn = random.integers(128, 256, shape) * random.choice((-unit, unit), shape)
    tensor.copy_(torch.from_numpy(np.ldexp(drawn, random.integers(-8, 0, shape))))


def digest(*values: torch.Tensor) -> str:
    """sha256 over the bytes of tensors, shortened."""
    total = hashlib.sha256()
    for value in values:
        total.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def recorded() -> dict[str, Any]:
    """The record: `arithmetic_version`, and digests by processor and case."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def record(note: Callable[[str], None] = print) -> None:
    """Record the digests of this machine's processors."""
    old = recorded() if RECORD.exists() else {}
    kept = old["processors"] if old.get("arithmetic_version") == ARITHMETIC_VERSION else {}
    devices = [CPU, torch.device("cuda")] if device_count() else [CPU]
    for device in devices:
        kept[processor(device)] = digests(device)
        note(f"recorded {processor(device)}")
    body = {"arithmetic_version": ARITHMETIC_VERSION, "processors": kept}
    RECORD.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
