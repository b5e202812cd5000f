"""One training run of the demo model: optimizer, schedule, expert balance, the best checkpoint.

Knows neither where the text came from nor where the weights go.
"""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latentd.demo import corpus, export
from latentd.demo.network import Network
from latentd.demo.windows import Sampler, Validation

WARMUP = 0.02  # share of the run
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
BIAS_STEP = 0.005  # of the router biases, times the schedule: quick at first, at rest at the end


@dataclass(frozen=True)
class Options:
    """What a run depends on; written into its report. `seconds` includes compiling."""

    seconds: float = 290.0
    steps: int = 1_000_000
    tokens: int = 65536
    context: int = 1024
    long_context: int = 2048
    long_every: int = 4
    learning_rate: float = 2e-3
    dropout: float = 0.2
    evaluate_s: float = 12.0
    seed: int = 1
    compile: bool = True


def schedule(progress: float) -> float:
    """Learning-rate factor at `progress` (0 to 1) of the run: linear warm-up, then cosine to 0."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))


def balance(network: Network, loads: Tensor, speed: float) -> None:
    """Push the router biases by `speed` towards equal load. loads [moe_layers, experts]."""
    biases = [b for name, b in network.named_buffers() if name.endswith("correction_bias")]
    for bias, load in zip(biases, loads, strict=True):
        bias += speed * torch.sign(load.mean() - load)


class Trainer:
    """One training run; `run` leaves the best network seen, rounded to bf16, in `network`."""

    def __init__(self, options: Options, text: corpus.Corpus, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        self.options, self.device = options, device
        self.network = Network(options.dropout).to(device)
        self.sampler = Sampler(text.train, device, options.seed)
        self.validations = {k: Validation(v, device) for k, v in text.held_out.items()}
        self.forward = (
            torch.compile(self.network, dynamic=False) if options.compile else self.network
        )
        decayed = [p for p in self.network.parameters() if p.dim() > 1]
        plain = [p for p in self.network.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda"
        )
        self.history: list[dict[str, float]] = []

    def gradients(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of one batch; mean loss and expert loads, on the device."""
        o = self.options
        context = o.long_context if step % o.long_every == o.long_every - 1 else o.context
        inputs, targets = self.sampler.draw(o.tokens // context, context)
        with torch.autocast(self.device.type, torch.bfloat16):
            losses, loads = self.forward(inputs, targets)
        loss: Tensor = losses.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), loads.detach()

    def step(self, step: int, progress: float) -> Tensor:
        """One update; the training loss, on the device."""
        factor = schedule(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * factor
        loss, loads = self.gradients(step)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        balance(self.network, loads, BIAS_STEP * factor)
        return loss

    def evaluate(self) -> dict[str, float]:
        """Validation loss in nats per byte, by text and over all bytes."""
        losses = {k: v.losses(self.network) for k, v in self.validations.items()}
        scores = {k: v.mean().item() for k, v in losses.items()}
        return {**scores, "all": torch.cat([v.flatten() for v in losses.values()]).mean().item()}

    def run(self) -> dict[str, object]:
        """Train, restore the best checkpoint, round it; the report's figures."""
        o = self.options
        begun = time.monotonic()
        for shape in (0, o.long_every - 1):  # compile both shapes before the schedule starts
            self.gradients(shape)
        self.optimizer.zero_grad(set_to_none=True)
        best, best_weights, best_step = math.inf, copy.deepcopy(self.network.state_dict()), 0
        start = last = time.monotonic()
        available_s = max(1.0, o.seconds - (start - begun))
        step, progress, smoothed = 0, 0.0, torch.zeros((), device=self.device)
        while progress < 1.0:
            loss = self.step(step, progress)
            smoothed = torch.lerp(smoothed, loss, 0.02) if step else loss
            step += 1
            if step % 16 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()  # the clock below must see the device, not the queue
            now = time.monotonic()
            progress = max(step / o.steps, (now - start) / available_s)
            if now - last < o.evaluate_s and progress < 1.0:
                continue
            last = now
            scores = self.evaluate()
            entry = {"seconds": round(now - start, 1), "step": step, "train": smoothed.item()}
            self.history.append({**entry, **scores})
            print(json.dumps({k: round(v, 4) for k, v in self.history[-1].items()}), flush=True)
            if scores["all"] < best:
                best, best_step = scores["all"], step
                best_weights = copy.deepcopy(self.network.state_dict())
        seconds = time.monotonic() - start
        self.network.load_state_dict(best_weights)
        export.round_weights(self.network)
        return {
            "validation_nats_per_byte_before_rounding": best,
            "validation_nats_per_byte": self.evaluate(),
            "best_step": best_step,
            "steps": step,
            "bytes_seen": step * o.tokens,
            "train_seconds": round(seconds, 1),
        }
