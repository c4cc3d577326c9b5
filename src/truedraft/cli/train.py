"""`truedraft train`: trains a learned drafter for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from truedraft import loading, registry
from truedraft.cli._options import Threads, check_seeds, use_threads
from truedraft.errors import Refused


def train(
    drafter: Annotated[str, Argument(metavar="DRAFTER", help="gad, or with training knobs: gad:k=8,layers=2.")],
    target: Annotated[str, Option(help="The model that it will draft for: a local folder, or a name on the hub.")],
    data: Annotated[Path, Option(help="Lines, the model's inputs, plain or .gz; text after a tab is ignored.")],
    out: Annotated[Path, Option(help="Folder of the checkpoint, and of the model's outputs for the lines.")],
    labels: Annotated[
        str, Option(help="target: train on the model's output for each line; given: on the text after the tab.")
    ] = "target",
    minutes: Annotated[float, Option(help="Minutes of training, after the model's outputs are generated.")] = 30.0,
    every: Annotated[float, Option(help="Minutes between validations; each saves the checkpoint.")] = 5.0,
    lr: Annotated[float, Option(help="Peak learning rate.")] = 3e-3,
    batch: Annotated[int, Option(help="Tokens per step, of the longer side of the lines, with padding.")] = 2048,
    threads: Threads = None,
    bf16: Annotated[bool, Option("--bf16", help="Matrix products in bf16, on machines that support it.")] = False,
    seed: Annotated[int, Option(help="Seed of the order of the lines and of the initial weights.")] = 0,
    resume: Annotated[bool, Option("--resume", help="Continue from the checkpoint in the folder.")] = False,
) -> None:
    """Train a drafter for a model on the model's outputs; use it as `--draft gad:model=FOLDER`.

    \f
    Raises Refused, before any work: a file, folder, model or drafter cannot be used.
    """
    if labels not in ("target", "given"):
        raise Refused(f"--labels {labels}: choose target or given")
    for option, value in (("--minutes", minutes), ("--every", every), ("--lr", lr), ("--batch", batch)):
        if not value > 0:
            raise Refused(f"{option} {value}: give a number above 0")
    check_seeds([seed])
    if out.exists() and not out.is_dir():
        raise Refused(f"--out {out} is not a folder: name another")
    registry.check("drafters", registry.parsed(drafter)[0])
    loading.check(target, argument="--target")
    sources, answers = _lines(data, labels == "given")
    use_threads(threads)
    import torch

    from truedraft.cli._models import load
    from truedraft.text.languages import check_monolingual
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
    """The learner of a drafter, from its name and training knobs."""
    name, knobs = registry.parsed(spec)
    learner = registry.method("drafters", name).learner
    if learner is None:
        trainable = [n for n in registry.names("drafters") if registry.method("drafters", n).learner is not None]
        raise Refused(f"{name} has nothing to learn: train one of {', '.join(trainable)}")
    return registry.built(learner, f"the training of {name}", spec, knobs)


def _lines(path: Path, given: bool) -> tuple[list[str], list[str] | None]:
    """Sources and, if `given`, their answers."""
    from truedraft.files import read_lines

    lines = [(i, line.split("\t", 1)) for i, line in enumerate(read_lines(path), 1) if line.strip()]
    if not lines:
        raise Refused(f"--data {path}: the file has no text")
    if not given:
        return [sides[0] for _, sides in lines], None
    for i, sides in lines:
        if len(sides) < 2:
            raise Refused(f"--data {path}: line {i} has no tab followed by an answer, which --labels given needs")
    return [sides[0] for _, sides in lines], [sides[1] for _, sides in lines]
