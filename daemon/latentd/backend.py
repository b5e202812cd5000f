"""From options to a running engine: device, checkpoint, memory plan, weights, graphs, self-test."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from latentd import memory
from latentd.backend_device import choose_device
from latentd.backend_steps import CpuBackend, StepRunner
from latentd.buffers import StepBuffers
from latentd.checkpoint import inspect, load, tokenizer_hash
from latentd.engine import Engine
from latentd.model.config import ModelConfig
from latentd.model.forward import Model
from latentd.model.random_weights import random_weights
from latentd.operations import ModelInfo
from latentd.options import StartError
from latentd.pages import PagePool
from latentd.selftest import run_selftest
from latentd.slots import SlotTable
from latentd.startup import StartupReport
from latentd_kernels import ARITHMETIC_VERSION, driver
from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.backend_cuda import CudaBackend
    from latentd.memory import MemoryPlan
    from latentd.model.weights import Weights
    from latentd.options import EngineOptions
    from latentd_kernels.library import Library


def start_engine(options: EngineOptions, report: Callable[[str], None]) -> Engine:
    """Load the model and make the engine ready to serve; `report` gets a line a phase.

    Raises CheckpointError and StartError before any device work where that can be told, later
    StartError (driver, memory, self-test), ManifestError (cubins), DeviceFault.
    """
    startup = StartupReport(report, buckets=options.buckets)
    with startup.phase("checkpoint"):
        if options.weights == "random":
            config = ModelConfig.from_dir(options.model_dir)
        else:
            dtype = memory.act_dtype(options)
            config = inspect(options.model_dir, dtype, None, options.attend_only).config
        memory.check_limits(config, options.for_device("cuda"))  # the same for every device
    device, startup.why = choose_device(options)
    options = options.for_device(device.type)
    report(f"device: {device.type}, {startup.why}")
    start = _Start(options, config, device, startup, report)
    engine = start.engine()
    if options.selftest:
        with startup.phase("self-test"):
            startup.selftest = run_selftest(engine).require().lines
    if options.prefix_cache:  # not before the self-test, which computes the same again and again
        engine.cache_prefixes()
    return engine


class _Start:
    """One start: holds what the phases hand on."""

    def __init__(
        self,
        options: EngineOptions,
        config: ModelConfig,
        device: torch.device,
        startup: StartupReport,
        report: Callable[[str], None],
    ) -> None:
        self.options = options
        self.config = config
        self.device = device
        self.startup = startup
        self.report = report
        self.library: Library | None = None

    def engine(self) -> Engine:
        """Run the phases up to the captured graphs."""
        options, startup = self.options, self.startup
        if self.device.type == "cuda":
            with startup.phase("cubins"):
                from latentd_kernels.library import Library

                try:
                    self.library = Library()
                except driver.DriverError as error:  # for example a driver that is too old
                    raise StartError(f"the GPU cannot be used: {error}") from error
        startup.device = self._device_name()
        startup.prefill_chunk, startup.prefill_rows = options.prefill_chunk, options.prefill_rows
        plan = memory.plan(self.config, options, self.device, self._free_bytes())
        with startup.phase("weights"):
            weights = self._weights()
            model = Model(self.config, weights)
        if self.library is None:
            with startup.phase("buffers"):
                backend: CpuBackend | CudaBackend = CpuBackend(self._cpu_runner(model, plan))
        else:
            if options.kv_pages == "auto":
                plan = self._measured_plan(self.library, model, plan)
            backend = self._cuda_backend(self.library, model, plan)
            graphs, attend = backend.graphs, backend.attend_graphs
            startup.graph_nodes = graphs.num_nodes or attend.num_nodes
            startup.graph_bytes = graphs.num_bytes + attend.num_bytes
            startup.capture_s = graphs.capture_s + attend.capture_s
        self._note(plan)
        slots = SlotTable(options.max_slots, options.max_ctx, PagePool(plan.kv_pages))
        return Engine(
            self._info(weights),
            slots,
            backend,
            options.prefill_chunk,
            options.prefill_rows,
            startup,
        )

    def _weights(self) -> Weights:
        options, dtype = self.options, memory.act_dtype(self.options)
        if options.weights == "random":
            return random_weights(
                self.config, self.device, dtype, options.seed, options.attend_only
            )
        last_s = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            if now_s - last_s > 1.0 or done == total:
                last_s = now_s
                self.report(
                    f"weights: {done / 2**30:.2f} of {total / 2**30:.2f} GiB ({done / total:.0%})"
                )

        return load(
            options.model_dir, self.config, self.device, dtype, progress, options.attend_only
        )

    def _cpu_runner(self, model: Model, plan: MemoryPlan) -> StepRunner:
        from latentd_kernels.reference.ops import ReferenceOps

        buffers = StepBuffers.allocate(self.config, self.options, self.device, plan.kv_pages)
        ops = ReferenceOps(buffers.inputs, buffers.ring, self.options.numerics)
        return StepRunner(
            model, ops, buffers, lambda inputs: ReferenceOps(inputs, buffers.ring, ops.numerics)
        )

    def _cuda_backend(self, library: Library, model: Model, plan: MemoryPlan) -> CudaBackend:
        """Buffers, operations and graphs on the GPU, warmed up."""
        from latentd.backend_cuda import CudaBackend
        from latentd_kernels.cuda_ops import CudaOps

        options, startup = self.options, self.startup
        with startup.phase("buffers"):
            try:
                buffers = StepBuffers.allocate(self.config, options, self.device, plan.kv_pages)
            except torch.OutOfMemoryError as error:
                raise StartError(f"the planned buffers do not fit: {error}") from error
            torch.cuda.synchronize()
        stream = driver.create_stream()
        ops = CudaOps(library, buffers.inputs, buffers.ring, options.numerics, stream)
        runner = StepRunner(
            model, ops, buffers,
            lambda inputs: CudaOps(library, inputs, buffers.ring, options.numerics, stream),
        )  # fmt: skip
        backend = CudaBackend(runner, stream, lambda: library.num_launches, options.eager)
        with startup.phase("warm-up"):
            backend.warm(options.buckets, options.attend_only)
        if not options.eager:
            with startup.phase("capture"):
                backend.capture(options.buckets, options.attend_only)
        return backend

    def _measured_plan(self, library: Library, model: Model, guess: MemoryPlan) -> MemoryPlan:
        """Size the pool by what is left, after a trial capture on a minimal one."""
        graph_bytes = 0
        if not self.options.eager:
            backend = self._cuda_backend(library, model, replace(guess, kv_pages=1))
            graph_bytes = backend.graphs.num_bytes + backend.attend_graphs.num_bytes
            backend.close()
            del backend
            torch.cuda.empty_cache()
        free = driver.memory_info()[0] + guess.weight_bytes  # the weights are in already
        return memory.plan(self.config, self.options, self.device, free, graph_bytes)

    def _free_bytes(self) -> int:
        if self.device.type == "cuda":
            return driver.memory_info()[0]
        return memory.available_host_bytes()

    def _device_name(self) -> str:
        if self.library is None:
            return "cpu"
        return f"cuda ({self.library.device.name}, {self.library.arch})"

    def _note(self, plan: MemoryPlan) -> None:
        startup = self.startup
        startup.weight_bytes = plan.weight_bytes
        startup.buffer_bytes = plan.static_bytes + plan.workspace_bytes
        startup.bytes_per_token = plan.page_bytes // PAGE_SIZE
        startup.kv_pages = plan.kv_pages
        startup.full_pages = plan.full_pages
        startup.slab_bytes = plan.slab_bytes

    def _info(self, weights: Weights) -> ModelInfo:
        options, config = self.options, self.config
        arch = self.library.arch if self.library is not None else "cpu"
        identity = (
            repr(config), weights.content_hash, options.dtype, options.numerics,
            ARITHMETIC_VERSION, self.device.type, arch,
            *(["attend"] if options.attend_only else []),
        )  # fmt: skip
        return ModelInfo(
            name=options.name or options.model_dir.resolve().name,
            fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest(),
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            layers=config.num_layers,
            heads=config.num_heads,
            nope_dim=config.nope_dim,
            v_dim=config.v_dim,
            max_ctx=options.max_ctx,
            max_slots=options.max_slots,
            buckets=options.buckets,
            page_size=PAGE_SIZE,
            numerics=options.numerics,
            dtype=options.dtype,
            device=self.startup.device,
            attend_only=options.attend_only,
            tokenizer=tokenizer_hash(options.model_dir),
        )
