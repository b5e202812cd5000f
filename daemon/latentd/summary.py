"""The start-up summary: what is served, where, on what, with which memory, and how long it took."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from latentd.operations import ModelInfo
    from latentd.startup import StartupReport


def summary_lines(
    info: ModelInfo, startup: StartupReport, endpoints: Sequence[str], total_s: float
) -> Iterator[str]:
    """One line a subject; `total_s` is the time from the start of the process's work to READY."""
    yield (
        f"model: {info.name}, {info.layers} layers, {info.heads} heads, nope {info.nope_dim}, "
        f"v {info.v_dim}, vocabulary {info.vocab_size}, fingerprint {info.fingerprint[:16]}"
    )
    yield f"device: {info.device} ({startup.why}); {info.dtype}, numerics {info.numerics}"
    yield (
        f"cache: {startup.bytes_per_token} bytes a token; {startup.kv_pages} pages of "
        f"{info.page_size} tokens, {gib(startup.slab_bytes)}; {startup.full_pages} let all "
        f"{info.max_slots} slots reach {info.max_ctx} tokens"
    )
    yield f"weights: {gib(startup.weight_bytes)}; buffers: {gib(startup.buffer_bytes)}"
    buckets = " ".join(map(str, startup.buckets))
    if startup.graph_nodes:
        nodes = f"{min(startup.graph_nodes.values())} to {max(startup.graph_nodes.values())}"
        yield (
            f"buckets: {buckets}; graphs of {nodes} nodes take {gib(startup.graph_bytes)}, "
            f"captured in {startup.capture_s:.2f} s"
        )
    else:
        yield f"buckets: {buckets}; eager, no graphs"
    rows = f"{startup.prefill_rows} rows between two steps"
    if info.attend_only:
        yield "serving attend only: no prompts, no steps"
    else:
        yield f"prompts: {rows}, {startup.prefill_chunk} at a time while nobody decodes"
    for line in startup.selftest:
        yield f"self-test: {line}"
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in startup.phases.items())
    yield f"seconds: {phases}; all {total_s:.2f}"
    yield f"serving at {' and '.join(endpoints)}"


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
