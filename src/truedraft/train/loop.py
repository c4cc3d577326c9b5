"""The training loop, limited by time, of every model and drafter that the project trains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from truedraft.errors import Refused


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al. 2024), scaled to the size of an AdamW step of the same learning rate.

    Matrices of one shape are orthogonalised together. torch's own `Muon` always does it in bf16, which is slow on a
    CPU without units for it.

    Args:
        params: matrices, (m, n) each.
        lr: step size.
        momentum: fraction of the running mean that is kept.
        weight_decay: decoupled, times the step size.
        dtype: of the orthogonalisation.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.05,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault(p.shape, []).append(p)
            for shape, params in alike.items():
                updates = []
                for p in params:
                    assert p.grad is not None
                    memory = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    memory.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(memory, group["momentum"]))
                step = orthogonal(torch.stack(updates).to(self.dtype)).float()
                scale = group["lr"] * 0.2 * max(shape) ** 0.5
                for p, update in zip(params, step, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """(k, m, n) -> the nearest matrices with singular values near one, by five steps of Newton and Schulz."""
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


@dataclass
class Plan:
    """Duration and step sizes of a training run."""

    minutes: float = 60.0  # of wall time; the learning rate schedule follows it
    steps: int = 0  # limit that the schedule follows as well; 0 for time alone
    lr: float = 4e-3  # of matrices (Muon)
    rest: float = 0.25  # factor of lr for embeddings, norms and biases (AdamW)
    decay: float = 0.4  # fraction of the run in which the learning rate falls to zero
    warmup: int = 50  # steps in which it rises
    micro: int = 1  # batches whose gradients make one step
    every: float = 10.0  # minutes between validations and saves
    bf16: bool = False  # products in bf16, on machines with units for it
    seed: int = 0

    def fraction_done(self, minutes: float, steps: int) -> float:
        """The fraction of the run that is done."""
        return max(minutes / self.minutes, steps / self.steps if self.steps else 0.0)


def fit(
    model: torch.nn.Module,
    loss: Callable[[Any], torch.Tensor],
    batches: Iterator[Any],
    plan: Plan,
    *,
    validate: Callable[[], dict[str, float]],
    save: Callable[[], None],
    log: Path,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, float]:
    """Train until the time is over; the last validation is returned.

    Matrices are moved by Muon, embeddings, norms and biases by AdamW. Every `plan.every` minutes the model is
    validated and saved and a line of JSON is added to `log`.

    Args:
        model: the module; parameters without `requires_grad` are frozen.
        loss: a batch -> a scalar.
        batches: endless.
        validate: returns figures of the model, called in evaluation mode.
        save: writes the model.
        on_progress: called before every step with the fraction of the plan that is done.

    Raises:
        Refused: the loss is NaN.
    """
    torch.manual_seed(plan.seed)
    learning, optimizers = _optimizers(model, plan)
    device = learning[0].device.type
    log.parent.mkdir(parents=True, exist_ok=True)
    start, step, smooth, last = time.monotonic(), 0, 0.0, 0.0
    model.train()

    def report() -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            row = {"minutes": round(minutes, 1), "steps": step, "loss": round(smooth, 4), **validate()}
        model.train()
        save()
        with log.open("a") as file:
            print(json.dumps(row), file=file)
        print(row, flush=True)
        return row

    while (done := plan.fraction_done(minutes := (time.monotonic() - start) / 60, step)) < 1:
        pace = min(1.0, (step + 1) / plan.warmup, (1 - done) / plan.decay)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["most"] * pace
        if on_progress is not None:
            on_progress(done)
        mean = _gradients(loss, batches, plan, device)
        if mean != mean:
            raise Refused(f"the loss is not a number after {step} steps; lower the learning rate (lr={plan.lr})")
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        smooth = mean if step == 1 else 0.95 * smooth + 0.05 * mean
        if step % 50 == 0:
            print(f"{minutes:6.1f} min  step {step}  loss {smooth:.4f}", flush=True)
        if minutes - last >= plan.every:
            last = minutes
            report()
    return report()


def _gradients(loss: Callable[[Any], torch.Tensor], batches: Iterator[Any], plan: Plan, device: str) -> float:
    """Accumulate the gradients of a step's batches; their mean loss."""
    mean = 0.0
    for _ in range(plan.micro):
        with torch.autocast(device, torch.bfloat16, enabled=plan.bf16):
            value = loss(next(batches)) / plan.micro
        value.backward()
        mean += value.item()
    return mean


def _optimizers(model: torch.nn.Module, plan: Plan) -> tuple[list[torch.nn.Parameter], list[torch.optim.Optimizer]]:
    """The trained parameters and their optimizers, each group with its highest learning rate."""
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = [p for n, p in learning.items() if p.ndim == 2 and "embed" not in n and "shared" not in n]
    chosen = set(map(id, matrices))
    others = [p for p in learning.values() if id(p) not in chosen]
    optimizers = [
        Muon(matrices, plan.lr, dtype=torch.bfloat16 if plan.bf16 else torch.float32),
        torch.optim.AdamW(others, plan.lr * plan.rest, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["most"] = group["lr"]
    return [*learning.values()], optimizers
