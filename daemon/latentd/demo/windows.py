"""Windows of a token stream on the device: random ones to train on, all of them to score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from latentd.demo.network import Network


VALIDATION_CONTEXT = 1024


class Sampler:
    """Draws random windows of one token stream that lives on the device."""

    def __init__(self, text: bytes, device: torch.device, seed: int) -> None:
        self._stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [rows, context] int64."""
        device = self._stream.device
        last = len(self._stream) - context
        starts = torch.randint(last, (rows, 1), generator=self._generator, device=device)
        window = self._stream[starts + torch.arange(context + 1, device=device)].long()
        return window[:, :-1], window[:, 1:]


class Validation:
    """Scores a network on a held-out text, every byte once, in windows of one length."""

    def __init__(
        self, text: bytes, device: torch.device, context: int = VALIDATION_CONTEXT
    ) -> None:
        stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
        rows = (len(stream) - 1) // context
        self._inputs = stream[: rows * context].view(rows, context)
        self._targets = stream[1 : rows * context + 1].view(rows, context)

    @torch.no_grad()
    def losses(self, network: Network) -> Tensor:
        """Nats of every byte, [windows, context] on the CPU, dropout off, float32."""
        was_training = network.training
        network.eval()
        starts = range(0, len(self._inputs), 16)
        batches = [(self._inputs[i : i + 16], self._targets[i : i + 16]) for i in starts]
        losses = torch.cat([network(inputs, targets)[0].cpu() for inputs, targets in batches])
        network.train(was_training)
        return losses
