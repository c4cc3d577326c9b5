"""Training for policies of diffusion models, on what the model itself does behind given prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from truedraft.canvas.layout import Layout, layout_of
from truedraft.errors import Refused
from truedraft.train.certainty import CertaintyForcing
from truedraft.train.checkpoints import check_fresh, read_state
from truedraft.train.filters import FilterTraining
from truedraft.train.loop import Plan, announce


class Training(Protocol):
    """How a policy is trained; its knobs are the fields of its class. checkpoint: file name of what it writes."""

    checkpoint: ClassVar[str]

    def train(
        self, model: Any, tokenizer: Any, layout: Layout, prompts: Sequence[Sequence[int]], new: int, out: Path,
        plan: Plan, state: dict[str, Any] | None, report: Callable[[str], None],
    ) -> str:  # fmt: skip
        """Train in a folder, from a state on where one is given; returns how the result is used.

        prompts: token ids, each with room for a block of the model's context behind it. new: most tokens behind them.
        """


TRAININGS: dict[str, type[Any]] = {"dparallel": CertaintyForcing, "learn2pd": FilterTraining}  # by policy


def train_policy(
    training: Training, model: Any, tokenizer: Any, prompts: Sequence[str], out: Path, plan: Plan, *,
    new: int = 512, resume: bool = False, report: Callable[[str], None] = announce,
) -> str:  # fmt: skip
    """Train for a policy of a diffusion model; see `Training.train`.

    Args:
        out: folder of the result and its log.
        new: most new tokens behind a prompt.
        resume: continue the run in the folder from its last validation.

    Raises:
        Refused: it is no diffusion model, there is nothing to continue, or no prompt leaves room in its context.
    """
    layout = layout_of(model.config, tokenizer)
    if layout is None:
        raise Refused("--target: policies of diffusion models are trained for these, and this is none")
    if not resume:
        check_fresh(out, training.checkpoint)
    state = read_state(out) if resume else None
    if resume and state is None:
        raise Refused(f"--resume: {str(out)!r} has no run to continue: leave --resume out")
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    if context is not None:
        ids = [one for one in ids if len(one) + 2 * layout.block <= context]
        new = min(new, context - layout.block - max(map(len, ids), default=0))
    if not (ids := [one for one in ids if one]):
        raise Refused(f"--data: no prompt leaves room for a block of {layout.block} in the model's context")
    out.mkdir(parents=True, exist_ok=True)
    return training.train(model, tokenizer, layout, ids, new, out, plan, state, report)
