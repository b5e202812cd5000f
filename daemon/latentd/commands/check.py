"""`latentd check`: reads a checkpoint's headers and prints the memory plan; serves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd.commands.parsing import (
    EXIT_CONFIG,
    Parser,
    add_command,
    add_settings,
    read_config,
    require_daemon,
)
from latentd.summary import gib
from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from latentd.memory import MemoryPlan
    from latentd.model.config import ModelConfig


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "check", "read a checkpoint, print the memory plan, serve nothing",
        run, EXIT_CONFIG,
    )  # fmt: skip
    add_settings(parser, ("model", "engine", "memory"))


def run(args: argparse.Namespace) -> int:
    """Print what the checkpoint holds and what serving it would take."""
    options = read_config(args).engine_options()
    require_daemon("check")
    import torch  # and what needs it; this command is refused without it

    from latentd.backend_device import choose_device
    from latentd.checkpoint import inspect
    from latentd.memory import available_host_bytes, plan
    from latentd.model.config import ModelConfig
    from latentd.options import StartError

    config = ModelConfig.from_dir(options.model_dir)
    print("\n".join(describe(options.name or options.model_dir.resolve().name, config)))
    if options.weights == "checkpoint":
        dtype = getattr(torch, options.dtype)
        report = inspect(options.model_dir, dtype, config, options.attend_only)
        skipped = f", {len(report.skipped)} not used" if report.skipped else ""
        print(
            f"checkpoint  {len(report.files)} files, {len(report.entries)} tensors, "
            f"{gib(report.bytes_total)}{skipped}"
        )
    try:
        device, _ = choose_device(options)
    except StartError:  # the GPU that was asked for is elsewhere: a plan without its free memory
        device, free_bytes = torch.device("cuda"), None
    else:
        has_cuda = device.type == "cuda"
        free_bytes = torch.cuda.mem_get_info()[0] if has_cuda else available_host_bytes()
    options = options.for_device(device.type)
    print("\n".join(table(plan(config, options, device, free_bytes), device.type)))
    return 0


def describe(name: str, config: ModelConfig) -> Iterator[str]:
    """The model's shape."""
    routed = "no experts" if config.moe is None else f"{sum(config.moe_layers)} with experts"
    yield (
        f"model       {name} ({config.model_type}), {config.num_layers} layers, {routed}, "
        f"vocabulary {config.vocab_size}"
    )
    yield (
        f"attention   {config.num_heads} heads, nope {config.nope_dim}, v {config.v_dim}; "
        f"a token takes {config.geometry.bytes_per_token} bytes of cache in bf16"
    )


def table(plan: MemoryPlan, device: str) -> Iterator[str]:
    """The memory plan, line by line."""
    yield f"on {device}:"
    for label, count in (
        ("weights", plan.weight_bytes),
        ("buffers", plan.static_bytes),
        ("workspace", plan.workspace_bytes),
        ("graphs", plan.graph_bytes),
        ("pool", plan.slab_bytes),
        ("total", plan.total_bytes),
    ):
        yield f"  {label:10}{gib(count):>12}"
    yield (
        f"  {plan.kv_pages} pages of {PAGE_SIZE} tokens ({plan.full_pages} let every slot reach "
        "max_ctx); graphs are a guess until they are captured"
    )
    if plan.free_bytes is not None:
        yield f"  free now  {gib(plan.free_bytes):>12}"
