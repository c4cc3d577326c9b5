"""`truedraft calibrate`: fits a view to a model and texts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from truedraft import loading, registry
from truedraft.cli._options import Threads, use_threads
from truedraft.cli._progress import progressing
from truedraft.cli.train import lines_of
from truedraft.errors import Refused
from truedraft.files import check_file

if TYPE_CHECKING:
    from truedraft.views._calibrated import CalibratedLayers, Evaluator

INTERRUPTED = 130
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
    minutes: Annotated[float, Option(help="Minutes to search, at most; then the best so far is kept.")] = 10.0,
    threads: Threads = None,
) -> int:
    """Find which layers of a model a view skips, on your texts; use the file as `--draft VIEW:file=OUT`. After Ctrl-C
    the best so far is kept.

    \f
    Returns the exit code: 0, or 130 after Ctrl-C. Raises Refused, before any work, where a file or a model cannot be
    used, or the view has nothing to calibrate; and later where nothing is found.
    """
    if limit < 1:
        raise Refused(f"--limit {limit}: give at least 1")
    if not 0 < minutes < inf:
        raise Refused(f"--minutes {minutes:g}: give a number above 0")
    check_file(out, f"--out {out}")
    registry.check("views", view)
    loading.check(target, argument="--target")
    if len({file.stem for file in data}) < len(data):
        raise Refused("two files of --data have one name: it names their subject, give each another")
    lines = {file.stem: lines_of(file)[1:] for file in data}
    use_threads(threads)
    from truedraft.cli._models import load
    from truedraft.files import write_whole
    from truedraft.runtime.identity import identity_of
    from truedraft.views._calibrated import CalibratedLayers

    chosen = registry.load("views", view)
    if not isinstance(chosen, CalibratedLayers):
        raise Refused(f"{chosen.name} has nothing to calibrate: `truedraft methods` lists views that need it")
    model, tokenizer = load(target, argument="--target")
    found, interrupted = _searched(chosen, _evaluator(model, tokenizer, lines, limit), minutes)
    if found is None and interrupted:
        print("interrupted before anything was found: nothing is written", file=sys.stderr)
        return INTERRUPTED
    if found is None or not found["layers"]:
        raise Refused(f"{chosen.name}: {target} can spare no layers on these texts: draft by another view or drafter")
    record = {"view": chosen.name, **identity_of(model).record(), **found}
    write_whole(out, json.dumps(record, indent=2) + "\n")
    print(f"{out}: layers {record['layers']}; use it as --draft {chosen.name}:file={out}")
    return INTERRUPTED if interrupted else 0


def _evaluator(model: Any, tokenizer: Any, lines: Mapping[str, tuple[Any, Any]], limit: int) -> Evaluator:
    """Measures views of a model on texts, all of them and by subject.

    lines: prompts and responses of each subject.
    """
    from truedraft.calibrating import TextEvaluator

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
    return TextEvaluator(model, texts, subjects=subjects)


def _searched(view: CalibratedLayers, evaluator: Evaluator, minutes: float) -> tuple[dict[str, Any] | None, bool]:
    """The best record that a calibration finds in this time, None for none; and whether Ctrl-C ended it.

    Raises:
        Refused: nothing can be found, or was in this time, with the reason.
    """
    record, start = None, time.monotonic()
    with progressing(view.name) as show:
        try:
            for step in view.steps(evaluator):
                record, passed = step.record or record, (time.monotonic() - start) / (60 * minutes)
                if step.text:
                    print(step.text, flush=True)
                show(view.name, min(max(step.share, passed), 1.0))
                if passed >= 1 and step.share < 1:
                    if record is None:
                        more = "give more --minutes, or fewer texts with --limit"
                        raise Refused(f"{view.name} found nothing in {minutes:g} minutes: {more}")
                    print(f"{minutes:g} minutes are over: the best that was found is kept", file=sys.stderr)
                    return record, False
        except KeyboardInterrupt:
            if record is not None:
                print("interrupted: the best that was found is kept", file=sys.stderr)
            return record, True
    return record, False
