"""`truedraft calibrate`: fits a view to a model and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from truedraft import loading, registry
from truedraft.cli._options import Threads, use_threads
from truedraft.cli.train import lines_of
from truedraft.errors import Refused
from truedraft.files import check_file

PROMPTS = 1000  # of each file whose hidden states are read; published


def calibrate(
    view: Annotated[str, Argument(metavar="VIEW", help="Its name, or with knobs: sleb:share=0.25.")],
    target: Annotated[str, Option(help="The model that drafts for itself: a local folder, or a name on the hub.")],
    data: Annotated[
        list[Path],
        Option(
            help='Texts, a line each, plain or .gz; or .jsonl: {"prompt": ..., "response": ...}, response optional. '
            "Several times for texts of several subjects, each named by its file."
        ),
    ],
    out: Annotated[Path, Option(help="The file to write.")],
    limit: Annotated[int, Option(help="Texts of each file to measure on, at most.")] = 32,
    threads: Threads = None,
) -> None:
    """Find which layers of a model a view skips, on your texts; use the file as `--draft VIEW:file=OUT`.

    \f
    Raises Refused, before any work: a file or a model cannot be used, or the view has nothing to calibrate.
    """
    if limit < 1:
        raise Refused(f"--limit {limit}: give at least 1")
    check_file(out, f"--out {out}")
    registry.check("views", view)
    loading.check(target, argument="--target")
    if len({file.stem for file in data}) < len(data):
        raise Refused("two files of --data have one name: it names their subject, give each another")
    lines = {file.stem: lines_of(file)[1:] for file in data}
    use_threads(threads)
    from truedraft.calibrating import TextEvaluator
    from truedraft.cli._models import load
    from truedraft.files import write_whole
    from truedraft.runtime.identity import identity_of
    from truedraft.views._calibrated import CalibratedLayers

    chosen = registry.load("views", view)
    if not isinstance(chosen, CalibratedLayers):
        raise Refused(f"{chosen.name} has nothing to calibrate: `truedraft methods` lists views that need it")
    model, tokenizer = load(target, argument="--target")
    encoded: Any = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    subjects = {
        name: TextEvaluator(
            model,
            [encoded(f"{a}{b or ''}") for a, b in zip(prompts[:limit], responses, strict=False)],
            [encoded(prompt) for prompt in prompts[:PROMPTS]],
        )
        for name, (prompts, responses) in lines.items()
    }
    texts = [text for subject in subjects.values() for text in subject.texts]
    record = chosen.calibrate(TextEvaluator(model, texts, subjects=subjects), print)
    if not record["layers"]:
        raise Refused(f"{chosen.name}: {target} can spare no layers on these texts: draft by another view or drafter")
    record = {"view": chosen.name, **identity_of(model).record(), **record}
    write_whole(out, json.dumps(record, indent=2) + "\n")
    print(f"{out}: layers {record['layers']}; use it as --draft {chosen.name}:file={out}")
