"""Times absorb, attend and expand of 24 layers in one graph, against torch with cuBLAS.

    python tests/bench/bench_attention.py [--heads 16,96,128] [--rows 1,8] [--parts]

One graph per (heads, rows) serves all contexts: lengths are device data. Every layer has its own
weights and its own slice of the slab; pages are drawn at random from a slab far larger than L2.
The rival gets a contiguous cache (it could not use pages) and a captured graph of its own per
shape: bmm with W_UK, q K^T, float32 softmax, P V, bmm with W_UV. Times are medians, microseconds a
layer; `floor` is the time to read cache and weights once at the bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from latentd_kernels import driver
from latentd_kernels.attention import AttentionLaunches, allocate_workspace
from latentd_kernels.geometry import LATENT_DIM, PAGE_SIZE, ROW_DIM, num_pages, num_splits
from latentd_kernels.library import Library
from latentd_kernels.ops import Numerics, Rope
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs

LAYERS = 24
NOPE = V_DIM = 128
SCALE = 0.1352337788  # DeepSeek-V3
CUDA = torch.device("cuda")
COPY_BYTES_PER_S = 4.2e12  # H200, bytes read and written of a large copy


@dataclass(frozen=True)
class Shape:
    heads: int
    rows: int
    max_ctx: int


class Bench:
    """Buffers of one shape, and the graph over them."""

    def __init__(self, shape: Shape, library: Library, slab: Tensor, numerics: Numerics) -> None:
        heads, rows = shape.heads, shape.rows
        self.shape, self.slab, self.library = shape, slab, library
        layout = RingLayout(max_rows=128, max_updates=1, max_zero_pages=1)
        self.inputs = allocate_inputs(layout, rows, num_pages(shape.max_ctx), CUDA)
        table = self.inputs.block_table
        table.copy_(torch.randperm(slab.shape[0], device=CUDA)[: table.numel()].view_as(table))
        self.inputs.slot_idx[:rows] = torch.arange(rows, device=CUDA)
        self.q = torch.randn(rows, heads * (NOPE + 64), device=CUDA).bfloat16()
        self.kv_b = torch.randn(LAYERS, heads * (NOPE + V_DIM), LATENT_DIM, device=CUDA)
        self.kv_b = self.kv_b.bfloat16() / 16
        self.q_abs = torch.empty(rows, heads, ROW_DIM, dtype=torch.bfloat16, device=CUDA)
        self.out = torch.empty(rows, heads * V_DIM, dtype=torch.bfloat16, device=CUDA)
        self.rope = Rope(torch.rand(32, device=CUDA), 1.0, True)
        self.workspace = allocate_workspace(rows, shape.max_ctx, heads, numerics, CUDA)
        self.stream = driver.create_stream()
        ring = StepRing(layout, torch.device("cpu"))
        self.ops = AttentionLaunches(library, self.inputs, ring, numerics, self.stream)

    def set_context(self, context: int) -> None:
        rows = self.shape.rows
        self.inputs.context_len[:rows] = context
        starts = torch.arange(rows + 1, device=CUDA) * num_splits(context)
        self.inputs.split_start[: rows + 1] = starts
        torch.cuda.synchronize()

    def layer(self, layer: int, parts: str) -> None:
        rows = self.shape.rows
        if "a" in parts:
            self.ops.absorb(self.q, self.kv_b[layer], self.rope, self.q_abs, rows, NOPE)
        if "t" in parts:
            self.ops.attend(self.q_abs, self.slab, layer, self.workspace, 0, rows, SCALE)
        if "e" in parts:
            self.ops.expand(self.workspace, self.kv_b[layer], self.out, 0, rows, NOPE)

    def capture(self, parts: str = "ate") -> driver.Graph:
        torch.cuda.synchronize()
        driver.begin_capture(self.stream)
        for layer in range(LAYERS):
            self.layer(layer, parts)
        return driver.end_capture(self.stream)

    def time(self, graph: driver.Graph) -> float:
        return median_us(lambda: graph.launch(self.stream), self.stream)


def median_us(launch: Callable[[], None], stream: int) -> float:
    """Median microseconds a layer of a launch that does all layers."""
    start, end = driver.Event(), driver.Event()

    def once() -> float:
        start.record(stream)
        launch()
        end.record(stream)
        end.synchronize()
        return end.elapsed_ms(start)

    slowest = max(once() for _ in range(2))
    times = sorted(once() for _ in range(int(min(50, max(5, 60 / slowest)))))
    return times[len(times) // 2] * 1e3 / LAYERS


def torch_us(bench: Bench, context: int) -> float:
    """The rival's time: the same bytes of memory, read as one contiguous cache a layer."""
    heads, rows = bench.shape.heads, bench.shape.rows
    size = rows * context * ROW_DIM
    cache = bench.slab.view(-1)
    q = bench.q.view(rows, heads, NOPE + 64)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def layer(i: int) -> Tensor:
        keys = cache[i * size : (i + 1) * size].view(rows, context, ROW_DIM)
        weights = bench.kv_b[i].view(heads, NOPE + V_DIM, LATENT_DIM)
        w_uk, w_uv = weights[:, :NOPE], weights[:, NOPE:]
        latent = torch.bmm(q[..., :NOPE].transpose(0, 1), w_uk).transpose(0, 1)
        query = torch.cat((latent, q[..., NOPE:]), dim=-1)
        scores = torch.bmm(query, keys.mT) * SCALE
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32).bfloat16()
        o_lat = torch.bmm(probs, keys[..., :LATENT_DIM])
        return torch.bmm(o_lat.transpose(0, 1), w_uv.mT).transpose(0, 1)

    with torch.cuda.stream(stream):
        for _ in range(2):
            layer(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(LAYERS):
            layer(i)
    with torch.cuda.stream(stream):
        return median_us(graph.replay, stream.cuda_stream)


def floor_us(shape: Shape, context: int) -> float:
    weights = shape.heads * (NOPE + V_DIM) * LATENT_DIM * 2
    return (shape.rows * context * ROW_DIM * 2 + weights) / COPY_BYTES_PER_S * 1e6


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=numbers, default=[16, 96, 128])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 16, 64])
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 8192, 32768])
    parser.add_argument("--numerics", choices=["f32", "landed"], default="f32")
    parser.add_argument("--parts", action="store_true", help="time the three kernels alone as well")
    parser.add_argument("--no-torch", action="store_true", help="leave the rival out")
    args = parser.parse_args()

    library = Library()
    pages = max(args.rows) * num_pages(max(args.contexts))
    slab = torch.empty(pages, LAYERS, PAGE_SIZE, ROW_DIM, dtype=torch.bfloat16, device=CUDA)
    for first in range(0, pages, 1024):
        slab[first : first + 1024].normal_()
    print(f"{torch.cuda.get_device_name()}, {args.numerics}, {LAYERS} layers, us a layer")
    print("heads rows context |  latentd   floor   torch  ratio | absorb attend expand")
    for heads in args.heads:
        for rows in args.rows:
            shape = Shape(heads, rows, max(args.contexts))
            bench = Bench(shape, library, slab, args.numerics)
            graph = bench.capture()
            parts = [bench.capture(part) for part in "ate"] if args.parts else []
            for context in args.contexts:
                bench.set_context(context)
                ours = bench.time(graph)
                rival = float("nan") if args.no_torch else torch_us(bench, context)
                line = (
                    f"{heads:5} {rows:4} {context:7} | {ours:8.2f} {floor_us(shape, context):7.2f}"
                )
                line += f" {rival:7.1f} {rival / ours:6.2f} |"
                line += "".join(f" {bench.time(part):6.2f}" for part in parts)
                print(line, flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
