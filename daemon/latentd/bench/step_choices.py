"""Which experts a step reads: its launches once more, eagerly, with the choices noted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from latentd_kernels.ops import MoeWorkspace

if TYPE_CHECKING:
    from torch import Tensor

    from latentd.bench.step import Steps
    from latentd_kernels.ops import Ops


class ChoiceRecorder:
    """The operations of a step, which notes what each MoE layer has chosen. It passes all else on
    as it is: `Ops` by delegation."""

    def __init__(self, ops: Ops, stream: int) -> None:
        self._ops = ops
        self._stream = torch.cuda.ExternalStream(stream)  # type: ignore[no-untyped-call]
        self.chosen: list[Tensor] = []  # a layer each, [rows, choices] int32, device

    def __getattr__(self, name: str) -> Any:
        """Every other operation."""
        return getattr(self._ops, name)

    def moe(self, *args: Any) -> None:
        """Run the layer, then keep its choices, which lie in the workspace."""
        self._ops.moe(*args)
        (workspace,) = (arg for arg in args if isinstance(arg, MoeWorkspace))
        rows: int = args[-1]
        with torch.cuda.stream(self._stream):
            self.chosen.append(workspace.expert_ids[:rows].clone())


def count_visits(steps: Steps) -> int:
    """The experts that the step in place reads, summed over its layers, each counted once."""
    backend, runner = steps.backend, steps.backend.runner
    recorder = ChoiceRecorder(runner.ops, backend.stream)
    runner.ops, backend.eager = cast("Ops", recorder), True
    try:
        steps.once()
    finally:
        runner.ops, backend.eager = recorder._ops, False
    torch.cuda.synchronize()
    return sum(int(torch.unique(ids[ids >= 0]).numel()) for ids in recorder.chosen)
