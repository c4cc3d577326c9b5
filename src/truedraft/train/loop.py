"""The training loop, limited by time, of every model and drafter that the project trains."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from truedraft.drafters._learned import Metrics, ParameterGroups, split_parameters
from truedraft.errors import Refused, why
from truedraft.files import read_lines, write_whole
from truedraft.runtime.processors import processor


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


@dataclass
class Run:
    """A training run: all that decides how it goes on.

    module: its weights are moved. learning, optimizers: the trained parameters, and what moves them.
    steps, minutes, loss: done so far; the loss is smoothed.
    rows: the figures of all validations, as they are logged.
    """

    module: torch.nn.Module
    learning: list[torch.nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    steps: int = 0
    minutes: float = 0.0
    loss: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Everything but the rows, as tensors, numbers, lists and dictionaries."""
        return {
            "module": self.module.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "steps": self.steps, "minutes": self.minutes, "loss": self.loss, "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Set everything to an earlier state; peak learning rates remain those of the plan.

        Raises:
            Refused: it is the state of another module.
        """
        try:
            self.module.load_state_dict(state["module"])
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                most = [group["most"] for group in optimizer.param_groups]
                optimizer.load_state_dict(kept)
                for group, lr in zip(optimizer.param_groups, most, strict=True):
                    group["most"] = lr
        except (KeyError, ValueError, RuntimeError) as e:
            raise Refused(
                f"--resume: the state of the run is that of another module: {' '.join(why(e).split())}"
            ) from e
        self.steps, self.minutes, self.loss = state["steps"], state["minutes"], state["loss"]
        torch.set_rng_state(state["cpu"])
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])


def check_bf16(plan: Plan, device: torch.device) -> None:
    """Raises Refused where products are to be in bf16 and the device has no units for it."""
    if not plan.bf16:
        return
    flags = processor()
    if device.type == "cuda":
        units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        units = not flags or bool(flags & {"amx_bf16", "avx512_bf16"})
    if not units:
        raise Refused("--bf16: this machine has no units for products in bf16, which would be slower: leave it out")


def announce(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def fit(
    model: torch.nn.Module,
    loss: Callable[[Any], torch.Tensor],
    batches: Iterator[Any],
    plan: Plan,
    *,
    validate: Callable[[], Metrics],
    save: Callable[[Run], None],
    log: Path,
    groups: ParameterGroups | None = None,
    state: dict[str, Any] | None = None,
    begun: Metrics | None = None,
    on_progress: Callable[[float], None] | None = None,
    report: Callable[[str], None] = announce,
) -> Run:
    """Train until the time is over.

    Every `plan.every` minutes, and at the end, the model is validated and saved, and its figures are written to `log`
    as a line of JSON.

    Args:
        model: the module; parameters without `requires_grad` are frozen.
        loss: a batch -> a scalar.
        batches: endless.
        validate: returns figures of the model, called in evaluation mode; random numbers that it draws do not count.
        save: writes the model, and the run's state where it is to be continued.
        groups: parameters that Muon moves, and those that AdamW moves; by default matrices, and the others.
        state: of the run that is continued. With batches from its place on, and the same plan, the weights are those
            of a run that was not interrupted.
        begun: figures before the first step, which the log begins with.
        on_progress: called before every step with the fraction of the plan that is done.
        report: called with lines of text.

    Raises:
        Refused: the loss is NaN or infinite.
    """
    torch.manual_seed(plan.seed)
    run = _begun(model, plan, split_parameters(model) if groups is None else groups)
    if state is not None:
        run.restore(state)
        run.rows = [json.loads(line) for line in read_lines(log)] if log.exists() else []
    if begun is not None:
        run.rows = [{"minutes": 0.0, "steps": 0, **begun}]
    device = run.learning[0].device.type
    log.parent.mkdir(parents=True, exist_ok=True)
    start, last = time.monotonic() - 60 * run.minutes, run.minutes
    model.train()
    while (done := plan.fraction_done(run.minutes, run.steps)) < 1:
        pace = min(1.0, (run.steps + 1) / plan.warmup, (1 - done) / plan.decay)
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["most"] * pace
        if on_progress is not None:
            on_progress(done)
        mean = _gradients(loss, batches, plan, device)
        if not math.isfinite(mean):
            raise Refused(f"the loss is not a number after {run.steps} steps; lower the learning rate (lr={plan.lr})")
        torch.nn.utils.clip_grad_norm_(run.learning, 1.0)
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        run.steps += 1
        run.loss = mean if run.steps == 1 else 0.95 * run.loss + 0.05 * mean
        run.minutes = (time.monotonic() - start) / 60
        if run.steps % 50 == 0:
            report(f"{run.minutes:6.1f} min  step {run.steps}  loss {run.loss:.4f}")
        if run.minutes - last >= plan.every and plan.fraction_done(run.minutes, run.steps) < 1:
            last = run.minutes
            _validated(run, validate, save, log, report)
    _validated(run, validate, save, log, report)
    return run


def _begun(model: torch.nn.Module, plan: Plan, groups: ParameterGroups) -> Run:
    """A run at its first step; every group of its optimizers has its highest learning rate, `most`."""
    matrices, others = groups
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, plan.lr, dtype=torch.bfloat16 if plan.bf16 else torch.float32))
    if others:
        optimizers.append(torch.optim.AdamW(others, plan.lr * plan.rest, betas=(0.9, 0.98), weight_decay=0.0))
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["most"] = group["lr"]
    return Run(model, [*matrices, *others], optimizers)


def _validated(
    run: Run, validate: Callable[[], Metrics], save: Callable[[Run], None], log: Path, report: Callable[[str], None]
) -> None:
    run.module.eval()
    with torch.no_grad(), torch.random.fork_rng():
        figures = validate()
    run.module.train()
    row = {"minutes": round(run.minutes, 2), "steps": run.steps, "loss": round(run.loss, 4), **figures}
    run.rows.append(row)
    report(", ".join(f"{name} {value}" for name, value in row.items()))
    save(run)
    write_whole(log, "".join(f"{json.dumps(row)}\n" for row in run.rows))


def _gradients(loss: Callable[[Any], torch.Tensor], batches: Iterator[Any], plan: Plan, device: str) -> float:
    """Accumulate the gradients of a step's batches; their mean loss."""
    mean = 0.0
    for _ in range(plan.micro):
        with torch.autocast(device, torch.bfloat16, enabled=plan.bf16):
            value = loss(next(batches)) / plan.micro
        if value.requires_grad:  # else the batch has no token to predict
            value.backward()
        mean += value.item()
    return mean
