"""`truedraft train`: a drafter that has to learn, trained for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from truedraft import loading, registry
from truedraft.cli._options import Threads, check_seeds, use_threads
from truedraft.errors import Refused


def train(
    drafter: Annotated[str, Argument(metavar="DRAFTER", help="gad, or with knobs of its training: gad:k=8,layers=2.")],
    target: Annotated[str, Option(help="The model that it will draft for: a local folder, or a name on the hub.")],
    data: Annotated[Path, Option(help="Lines that the model is asked, plain or .gz; what follows a tab is ignored.")],
    out: Annotated[Path, Option(help="Folder of the checkpoint, and of what the model says to the lines.")],
    labels: Annotated[
        str, Option(help="target: learn what the model says to each line; given: what follows the tab.")
    ] = "target",
    minutes: Annotated[float, Option(help="How long to train, once the model has said its lines.")] = 30.0,
    every: Annotated[float, Option(help="Minutes between validations; each saves the checkpoint.")] = 5.0,
    lr: Annotated[float, Option(help="Learning rate at its highest.")] = 3e-3,
    batch: Annotated[int, Option(help="Tokens of a step, on the longer side of the lines, with padding.")] = 2048,
    threads: Threads = None,
    bf16: Annotated[bool, Option("--bf16", help="Products in bf16, on machines with units for it.")] = False,
    seed: Annotated[int, Option(help="Of the order of the lines, and of the fresh weights.")] = 0,
    resume: Annotated[bool, Option("--resume", help="Go on from the checkpoint in the folder.")] = False,
) -> None:
    """Train a drafter for a model on what the model says; use it as `--draft gad:model=FOLDER`.

    \f
    Raises Refused: a file, folder, model or drafter does not do; before any work.
    """
    if labels not in ("target", "given"):
        raise Refused(f"--labels {labels}: choose target or given")
    for option, value in (("--minutes", minutes), ("--every", every), ("--lr", lr), ("--batch", batch)):
        if not value > 0:
            raise Refused(f"{option} {value}: give a number above 0")
    check_seeds([seed])
    if out.exists() and not out.is_dir():
        raise Refused(f"--out {out} is no folder: name another")
    registry.check("drafters", registry.parsed(drafter)[0])
    loading.check(target, argument="--target")
    sources, answers = _lines(data, labels == "given")
    use_threads(threads)
    import torch

    from truedraft.cli._models import load
    from truedraft.languages import check_monolingual
    from truedraft.train.drafter import train_drafter
    from truedraft.train.loop import Plan

    torch.manual_seed(seed)
    learner = _learner(drafter)
    model, tokenizer = load(target, argument="--target")
    check_monolingual(tokenizer, "truedraft train")
    plan = Plan(minutes=minutes, lr=lr, every=every, bf16=bf16, seed=seed)
    train_drafter(learner, model, tokenizer, sources, out, plan, answers=answers, batch=batch, resume=resume)
    print(f"{out}: use it as --draft {learner.name}:model={out}")


def _learner(spec: str) -> Any:
    """The training of a drafter, from its name and its knobs."""
    name, knobs = registry.parsed(spec)
    learner = registry.method("drafters", name).learner
    if learner is None:
        learning = [n for n in registry.names("drafters") if registry.method("drafters", n).learner is not None]
        raise Refused(f"{name} has nothing to learn: train one of {', '.join(learning)}")
    return registry.built(learner, f"the training of {name}", spec, knobs)


def _lines(path: Path, given: bool) -> tuple[list[str], list[str] | None]:
    """Sources and, if wanted, their answers."""
    from truedraft.files import read_lines

    lines = [(i, line.split("\t", 1)) for i, line in enumerate(read_lines(path), 1) if line.strip()]
    if not lines:
        raise Refused(f"--data {path}: the file has no text")
    if not given:
        return [sides[0] for _, sides in lines], None
    for i, sides in lines:
        if len(sides) < 2:
            raise Refused(f"--data {path}: line {i} has no tab with an answer behind it, which --labels given needs")
    return [sides[0] for _, sides in lines], [sides[1] for _, sides in lines]
