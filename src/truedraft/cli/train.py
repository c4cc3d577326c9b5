"""`truedraft train`: trains a learned drafter for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import signature
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from truedraft import loading, registry
from truedraft.cli._options import CANVASES, COLDEST, Threads, check_seeds, use_threads
from truedraft.errors import Refused
from truedraft.files import check_folder
from truedraft.targets import kinds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEVICES = ("auto", "cpu", "cuda")
LEARNING_RATE = 3e-3
SHARE = 0.1  # of --texts; published
WEIGHTS = ("reward", "accepted")  # of given responses, by what a line has
FINE_TUNING = {"dparallel": 3e-4}  # learning rates of policies for which a whole model is trained


def train(
    drafter: Annotated[str, Argument(metavar="DRAFTER", help="Its name, or with training knobs: gad:k=8,layers=2.")],
    target: Annotated[str, Option(help="The model that it will draft for: a local folder, or a name on the hub.")],
    data: Annotated[
        Path,
        Option(
            help='Prompts, a line each, plain or .gz; text after a tab is a response. Or .jsonl: {"prompt": ..., '
            '"response": ...}, the response optional; or what `truedraft serve --record` has kept.'
        ),
    ],
    out: Annotated[Path, Option(help="Folder of the checkpoint, its log and curves, and the model's responses.")],
    labels: Annotated[
        str,
        Option(
            help="target: train on the model's own responses; given: on those in the data, where a decoder's line "
            "without one is a text of its own."
        ),
    ] = "target",
    weights: Annotated[
        str,
        Option(
            help='Of the given responses, by which each is trained on more or less often: none; reward, the "reward" '
            "of its line; or accepted, the tokens per pass that were recorded."
        ),
    ] = "none",
    texts: Annotated[
        Path | None,
        Option(help="Texts to mix in, a line each, plain or .gz: all of their tokens are predicted, for decoders."),
    ] = None,
    text_share: Annotated[
        float | None, Option(help="The share of lines that is drawn from --texts; by default 0.1.")
    ] = None,
    temperature: Annotated[float, Option(help="Of the model's responses; 0 for its likeliest tokens.")] = 0.0,
    max_new_tokens: Annotated[int, Option(help="Tokens of a response, at most.")] = 512,
    max_length: Annotated[int, Option(help="Tokens of prompt and response, at most; 0: the model's context.")] = 0,
    chat: Annotated[bool, Option("--chat", help="Put prompts into the model's chat template.")] = False,
    minutes: Annotated[
        float, Option(help="Minutes of training, after the responses are generated; those before --resume count.")
    ] = 30.0,
    every: Annotated[float, Option(help="Minutes between validations; each saves the run.")] = 5.0,
    lr: Annotated[float | None, Option(help="Peak learning rate; 3e-3, and 3e-4 of a whole model's weights.")] = None,
    batch: Annotated[
        int, Option(help="Tokens per step, with padding; of an encoder-decoder those of the longer side.")
    ] = 2048,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    threads: Threads = None,
    bf16: Annotated[bool, Option("--bf16", help="Matrix products in bf16, on machines that support it.")] = False,
    seed: Annotated[int, Option(help="Seed of the order of the lines, the initial weights, and sampling.")] = 0,
    resume: Annotated[
        bool, Option("--resume", help="Continue the run in the folder from its last validation.")
    ] = False,
    start: Annotated[
        Path | None,
        Option("--from", help="Checkpoint to start from, kept until one is better on held-out lines."),
    ] = None,
) -> None:
    """Train a drafter for a model on the model's responses, a head or a draft model; use it as `--draft NAME:FOLDER`.
    Or, for a diffusion model, what a policy learns from the model's own decoding: learn2pd or dparallel.

    \f
    Raises Refused, before any work: a file, folder, model or drafter cannot be used.
    """
    rates = {"--minutes": minutes, "--every": every, "--lr": LEARNING_RATE if lr is None else lr}
    _check_numbers({**rates, "--batch": batch, "--max-new-tokens": max_new_tokens}, temperature, max_length)
    _check_choices(labels, weights, device)
    policy = _policy(drafter)
    _check_texts(text_share, texts, policy)
    _check_start(start, resume, policy)
    _check_weights(weights, labels, policy)
    check_seeds([seed])
    check_folder(out, f"--out {out}")
    if policy is None:
        registry.check("drafters", registry.parsed(drafter)[0])
    loading.check(target, argument="--target")
    numbers, sources, answers = lines_of(data, ids=policy is None)
    others = [] if texts is None else _texts(texts)
    often = [] if weights == "none" else weights_of(data, weights)
    use_threads(threads)
    import torch

    from truedraft.cli._models import load
    from truedraft.text.languages import check_monolingual
    from truedraft.train.drafter import train_drafter
    from truedraft.train.loop import Plan
    from truedraft.train.responses import Responding

    _check_device(device)
    torch.manual_seed(seed)
    plan = Plan(minutes=minutes, every=every, bf16=bf16, seed=seed)
    if policy is not None:
        from truedraft.train.canvases import train_policy

        plan.lr = lr or FINE_TUNING.get(policy, LEARNING_RATE)
        model, tokenizer = load(target, argument="--target", runs=CANVASES)
        print(train_policy(
            _training(policy, drafter), _placed(model, device), tokenizer, sources, out, plan, new=max_new_tokens,
            resume=resume,
        ))  # fmt: skip
        return
    learner = _learner(drafter)
    plan.lr = lr or learner.lr
    model, tokenizer = load(target, argument="--target")
    check_monolingual(tokenizer, "truedraft train")
    if others and kinds.reads_sources(model.config):
        raise Refused(f"--texts: {type(model).__name__} reads a source for every text: leave it out")
    if labels == "given" and None in answers and kinds.reads_sources(model.config):
        line = numbers[answers.index(None)]
        raise Refused(f"--data {data}: line {line} has no tab followed by an answer, which --labels given needs")
    train_drafter(
        learner, _placed(model, device), tokenizer, sources, out, plan,
        answers=answers if labels == "given" else None, weights=often,
        texts=others, share=text_share or SHARE, how=Responding(max_new_tokens, max_length, temperature, chat, seed),
        batch=batch, resume=resume, start=start,
    )  # fmt: skip
    print(f"{out}: use it as --draft {_draft(registry.parsed(drafter)[0], out)}")


def _check_choices(labels: str, weights: str, device: str) -> None:
    if labels not in ("target", "given"):
        raise Refused(f"--labels {labels}: choose target or given")
    if weights not in ("none", *WEIGHTS):
        raise Refused(f"--weights {weights}: choose none, {' or '.join(WEIGHTS)}")
    if device not in DEVICES:
        raise Refused(f"--device {device}: choose one of {', '.join(DEVICES)}")


def _check_numbers(positive: Mapping[str, float], temperature: float, max_length: int) -> None:
    for option, value in positive.items():
        if not 0 < value < inf:
            raise Refused(f"{option} {value}: give a number above 0")
    if temperature != 0 and not COLDEST <= temperature < inf:
        raise Refused(f"--temperature {temperature}: give 0, or a number from {COLDEST:g} on")
    if max_length != 0 and max_length < 2:
        raise Refused(f"--max-length {max_length}: give 0 for the model's context, or at least 2")


def _check_texts(share: float | None, texts: Path | None, policy: str | None) -> None:
    """Raises Refused where texts are not mixed in as the options say."""
    if share is not None and not 0 < share < 1:
        raise Refused(f"--text-share {share}: give a number above 0 and below 1")
    if share is not None and texts is None:
        raise Refused("--text-share: there are no --texts to draw from: give both, or neither")
    if texts is not None and policy is not None:
        raise Refused(f"--texts: {policy} learns from what the model decodes alone: leave it out")


def _check_start(start: Path | None, resume: bool, policy: str | None) -> None:
    if start is not None and resume:
        raise Refused(f"--from {start}: --resume goes on from the checkpoint in --out: give one of the two")
    if start is not None and policy is not None:
        raise Refused(f"--from {start}: {policy} is trained from its beginning: leave it out")


def _check_weights(weights: str, labels: str, policy: str | None) -> None:
    """Raises Refused where responses have no weights."""
    if weights != "none" and policy is not None:
        raise Refused(f"--weights {weights}: {policy} learns from what the model decodes alone: leave it out")
    if weights != "none" and labels != "given":
        raise Refused(f"--weights {weights}: the data has them of its own responses: give --labels given, or none")


def _policy(spec: str) -> str | None:
    """The policy of diffusion models that is named, also as lossy/NAME; None where it is none."""
    name = registry.parsed(spec)[0].removeprefix("lossy/")
    return name if name in registry.names("canvas.policies.lossy") else None


def _training(policy: str, spec: str) -> Any:
    """The training of a policy, from its knobs.

    Raises:
        Refused: it learns nothing, or has no such knob.
    """
    from truedraft.train.canvases import TRAININGS

    if policy not in TRAININGS:
        raise Refused(f"{policy} has nothing to learn: train one of {', '.join(TRAININGS)}")
    return registry.built(TRAININGS[policy], f"the training of {policy}", spec, registry.parsed(spec)[1])


def _method(name: str) -> tuple[str, Any]:
    """A drafter, or a view that drafts, also by the name of a preset: its own name, and its class."""
    kind = "views" if registry.is_view(name) else "drafters"
    name, _ = registry.presets(kind).get(name, (name, {}))
    return name, registry.method(kind, name)


def _draft(name: str, folder: Path) -> str:
    """The spec of a drafter with a checkpoint."""
    if "head" in signature(_method(name)[1]).parameters:
        return f"{name}:head={folder}"
    return f"{name}:model={folder}" if "=" in str(folder) else f"{name}:{folder}"


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: torch finds no GPU here; give cpu")


def _placed(model: PreTrainedModel, device: str) -> PreTrainedModel:
    return model if device == "auto" else model.to(device)  # type: ignore[arg-type]


def _learner(spec: str) -> Any:
    """The learner of a drafter, from its name and training knobs."""
    given, knobs = registry.parsed(spec)
    name, method = _method(given)
    learner = method.learner
    if learner is None:
        every = [(kind, name) for kind in ("drafters", "views") for name in registry.names(kind)]
        trainable = [name for kind, name in every if registry.method(kind, name).learner is not None]
        raise Refused(f"{name} has nothing to learn: train one of {', '.join(trainable)}")
    return registry.built(learner, f"the training of {name}", spec, knobs)


def _texts(path: Path) -> list[str]:
    """The lines of a file that are not empty."""
    from truedraft.files import read_lines

    if not (found := [line for line in read_lines(path) if line.strip()]):
        raise Refused(f"--texts {path}: the file has no text")
    return found


def lines_of(path: Path, ids: bool = False) -> tuple[list[int], list[Any], list[Any]]:
    """Numbers of lines, prompts, and the responses to them; None for a prompt without one.

    ids: whether lines may have token ids in the place of texts.
    """
    from truedraft.files import read_lines

    lines = [(i, line) for i, line in enumerate(read_lines(path), 1) if line.strip()]
    if not lines:
        raise Refused(f"--data {path}: the file has no text")
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        pairs = [_entry(path, i, line, ids) for i, line in lines]
    else:
        sides = [line.split("\t", 1) for _, line in lines]
        pairs = [(prompt, rest[0] if rest else None) for prompt, *rest in sides]
    return [i for i, _ in lines], [prompt for prompt, _ in pairs], [response for _, response in pairs]


def _entry(path: Path, number: int, line: str, ids: bool) -> tuple[Any, Any]:
    """Prompt and response of a line of JSON, as texts or as token ids."""
    try:
        entry = json.loads(line)
        if ids and "prompt_ids" in entry:
            sides = entry["prompt_ids"], entry["response_ids"]
            if all(side and all(type(token) is int and token >= 0 for token in side) for side in sides):
                return sides
        prompt, response = entry["prompt"], entry.get("response")
        if isinstance(prompt, str) and prompt.strip() and isinstance(response, str | None):
            return prompt, response
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise Refused(f'--data {path}: line {number} is not {{"prompt": TEXT}} with an optional "response": TEXT')


def weights_of(path: Path, kind: str) -> list[float]:
    """The weights of the lines of a file, as `lines_of` reads them: `reward`, a number that each has, or `accepted`,
    the tokens per pass with which its response was emitted.

    Raises:
        Refused: a line does not have it.
    """
    from truedraft.files import read_lines

    found = []
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            try:
                entry = json.loads(line)
                tokens = len(entry["response_ids"]) if kind == "accepted" else 0
                weight = entry["reward"] if kind == "reward" else tokens / (tokens - sum(entry["accepted"]))
                if type(weight) not in (int, float) or not 0 <= weight < inf:
                    raise ValueError
            except (ValueError, KeyError, TypeError, ZeroDivisionError):
                needs = '"reward": NUMBER, from 0 on' if kind == "reward" else "what `truedraft serve --record` keeps"
                raise Refused(f"--weights {kind}: line {number} of {path} does not have {needs}") from None
            found.append(float(weight))
    return found
