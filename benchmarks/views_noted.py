"""The figures of views for the pages of the methods, from what `views.py` and `experts.py` have measured.

    python benchmarks/views_noted.py     # writes results/methods.json from results/views.json and results/experts.json

Nothing is measured here. Views that are combined with others are left out; a figure belongs to the method of its view.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from noted import figure, note
from truedraft import registry
from truedraft.card import method_name

RESULTS = Path(__file__).parent / "results"
VIEWS, EXPERTS = "python benchmarks/views.py", "python benchmarks/experts.py"
COUNTS = "counts"
Figures = dict[str, list[dict[str, Any]]]
Rows = list[dict[str, Any]]


def method_of(view: str) -> str:
    """The name of the method of a view by its name, presets included."""
    name = view.removeprefix("lossy/").partition(":")[0]
    return name if name in registry.names("views") else method_name(registry.load("views", name))


def spelled(view: str) -> str:
    """A view by its knobs alone, where its name is that of the method; else with its name."""
    name, _, knobs = view.removeprefix("lossy/").partition(":")
    return (knobs or "by default") if name in registry.names("views") else view.removeprefix("lossy/")


def alone(rows: Rows) -> Rows:
    """Those of one view, without the whole model and without views in combination."""
    return [row for row in rows if row["view"] not in ("", "no drafts") and "+" not in row["view"]]


def acceptance(found: dict[str, Any], made: Figures) -> None:
    stories = "nano, its own continuations of stories, greedy, drafts of 8 tokens in full"
    text = "nano, its own continuations of stories, the likeliest tokens of the view alone"
    command = f"{VIEWS} --parts acceptance"
    for row in alone(found["acceptance"]):
        name, what = method_of(row["view"]), spelled(row["view"])
        names = [(name, what)]
        if name == "skip-layers" and not row["view"].endswith(("a", "f")):  # whole layers, in the order of SLEB
            names.append(("sleb", f"{what.count(';') + 1} of 6 layers left out"))
        for name, what in names:
            length = round(row["mean_acceptance_length"], 2)
            made[name].append(figure(what, length, "tokens per pass", stories, COUNTS, command))
        for name, what in names if row["agreement"] is not None else ():
            share = round(100 * row["agreement"], 1)
            made[name].append(figure(what, share, "% of tokens as the whole model", text, COUNTS, command))


def sparing(found: dict[str, Any], made: Figures) -> None:
    command = f"{VIEWS} --parts sparing"
    for row in found["sparing"]:
        if row["view"] == "ffn-skipllm":
            what = f"{row['skipped']:.0%} of the feed-forwards skipped"
            for kind, text in (("story", "stories"), ("edit", "edits")):
                setting = f"nano, {text}, greedy, drafts of 8 tokens in full"
                made["ffn-skipllm"].append(
                    figure(what, round(row[kind], 2), "tokens per pass", setting, COUNTS, command)
                )


def neurons(found: dict[str, Any], made: Figures) -> None:
    command = f"{VIEWS} --parts neurons --texts FILE --predictors FOLDER"
    for row in alone(found["neurons"]):
        what = f"{row['kept']:.0%} of the neurons"
        for kind, text in (("story", "stories"), ("edit", "edits")):
            setting = f"nano, {text}, greedy, drafts of 8 tokens in full"
            made["deja-vu"].append(figure(what, round(row[kind], 2), "tokens per pass", setting, COUNTS, command))


def passes(found: dict[str, Any], made: Figures) -> None:
    machine = found["machine"]["machine"]
    for row in alone(found["passes"]):
        setting = f"random model of 0.1 B behind {row['behind']:,} positions, {row['dtype']}, one token"
        unit = "times the seconds of a whole pass"
        made[method_of(row["view"])].append(
            figure(spelled(row["view"]), round(row["ratio"], 2), unit, setting, machine, f"{VIEWS} --parts passes")
        )


def lossy(found: dict[str, Any], made: Figures) -> None:
    command = f"{VIEWS} --parts lossy --texts FILE"
    kinds = ("perplexity", "perplexity", 1, 2), ("% of tokens as the whole model", "agreement", 100, 1)
    for unit, key, times, digits in kinds:
        for row in alone(found["lossy"]):
            whole = next(one for one in found["lossy"] if one["view"] == "no drafts" and one["size"] == row["size"])
            target = f"nano stretched to {row['size'].replace('B', ' B')}" if row["size"] else "nano"
            setting = f"{target}, generating under it, {row['tokens']} tokens of stories"
            if key == "perplexity":
                setting += f"; the whole model {whole['perplexity']:.2f}"
            made[method_of(row["view"])].append(
                figure(spelled(row["view"]), round(times * row[key], digits), unit, setting, COUNTS, command)
            )


def experts(found: dict[str, Any], made: Figures) -> None:
    machine = found["machine"]["machine"]
    for row in alone(found["views"]):
        if method_of(row["view"]) == "fewer-experts":
            setting, unit = "random mixture, one token", "times the seconds of a whole pass"
            made["fewer-experts"].append(
                figure(spelled(row["view"]), round(row["ratio"], 2), unit, setting, machine, EXPERTS)
            )
    for row in found["oracle"]:
        if row["draft"].startswith("fewer-experts") and "+" not in row["draft"]:
            setting = "random mixture, every drafted token right (what a trained one reaches is not known)"
            value, unit = round(row["over_no_drafts"], 2), "times the speed without drafts"
            made["fewer-experts"].append(figure(spelled(row["draft"]), value, unit, setting, machine, EXPERTS))


def main() -> None:
    made: Figures = defaultdict(list)
    found = json.loads((RESULTS / "views.json").read_text("utf-8"))
    for part in (acceptance, sparing, neurons, passes, lossy):
        part(found, made)
    experts(json.loads((RESULTS / "experts.json").read_text("utf-8")), made)
    for name, figures in made.items():
        note("views", name, sorted(figures, key=lambda one: (one["unit"], one["setting"], one["command"])))


if __name__ == "__main__":
    main()
