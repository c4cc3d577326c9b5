"""Tables of measured figures, from the files in `benchmarks/results`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from pages.source import ROOT

DTYPES = ("fp32", "bf16")
RESULTS = ROOT / "benchmarks" / "results"
KINDS = {
    "first turn": "first turn",
    "second turn": "second turn",
    "change your answer": '"change your answer"',
    "agent": "agent",
}


def _results(name: str, of: str = "results") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))[of]
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, "|---" * len(head) + "|", *others]


def _drafter(name: str) -> str:
    return {"auto": "**auto, the default**", "none": "none"}.get(name, f"`{name}`").replace("|", "\\|")


def _rounded(value: float) -> str:
    """With two decimals, halves upwards as read."""
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def prompts() -> list[str]:
    """Time to the first token of `transformers`, and that of truedraft as a multiple of it."""
    return _table(
        ["model", "dtype", "prompt", "`transformers`", "no drafts", "`auto`", "rounds"],
        [
            [
                one["model"], one["dtype"], f"{one['prompt']:,}", f"{one['seconds']['transformers']:.3f} s",
                *(f"{one['ratios'][way]:.3f}" for way in ("no drafts", "auto")), str(len(one["rounds"]["auto"])),
            ]
            for one in sorted(_results("prompts"), key=lambda one: (one["model"], one["dtype"], one["prompt"]))
        ],
    )  # fmt: skip


def activations() -> list[str]:
    """Errors of products by how activations are rounded, over all layers and in those with the largest error."""
    found = _results("activations")
    rows = []
    for way in dict.fromkeys(way for one in found for way in one["errors"]["all"]):
        rows.append([way])
        for one in found:
            kinds = {kind: ways[way] for kind, ways in one["errors"].items() if way in ways}
            everywhere = len(kinds) == len(one["errors"])  # else some layers are too narrow for it
            worst = max(kinds, key=lambda kind: kinds[kind])
            rows[-1] += [f"{kinds['all']:.1e}", f"{kinds[worst]:.1e} (`{worst}`)"] if everywhere else ["", ""]
    head = [part for one in found for part in (one["model"], "its worst layers")]
    return _table(["activations", *head], [row for row in rows if row[0] != "fp32" and any(row[1:])])


def ties() -> list[str]:
    """How many texts in bf16 differ from `model.generate`, with near-ties kept or scored again, and what that costs."""
    return _table(
        [
            "checkpoint, bf16", "passes by", "texts", "near-ties among tokens", "differ per 1,000", "with `recheck`",
            "time", "with `recheck`",
        ],
        [
            [
                one["model"], one["runtime"].split(" (")[0], f"{one['texts']:,}", f"{one['near_ties']:.1%}",
                *(f"{one['differ_per_1000'][way]:.0f}" for way in ("keep", "recheck")),
                *(_rounded(one["times_of_model.generate"][way]) for way in ("keep", "recheck")),
            ]
            for one in _results("ties", "models")
        ],
    )  # fmt: skip


def ties_real(of: str = "ties_real") -> list[str]:
    """How many texts of instruct models in bf16 differ from `model.generate`, and how much faster they come."""
    return _table(
        [
            "checkpoint, bf16", "requests", "texts", "tokens at most", "near-ties", "differ", "with `recheck`",
            "times as fast", "with `recheck`",
        ],
        [
            [
                one["model"], one["kind"], str(one["texts"]), str(one["tokens"]), f"{one['near_ties']:.1%}",
                *(str(one["differ"][way]) for way in ("keep", "recheck")),
                *(f"{one['times_as_fast'][way]:.1f}" for way in ("keep", "recheck")),
            ]
            for one in _results(of)
        ],
    )  # fmt: skip


def equivalence() -> list[str]:
    """Shares of rows in batches with the text that they have alone; assisted generation of transformers beside them."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in _results("equivalence"):
        key = one["model"], one["dtype"], one["rule"], one["side"]
        groups.setdefault(key, []).append(one)
    rows = []
    for (model, dtype, rule, side), found in groups.items():
        found.sort(key=lambda one: one["batch"])
        prefixes = [one["generate"]["prefix"] for one in found if "generate" in one]
        passes = [one["tokens_per_pass"] for one in found if "tokens_per_pass" in one]
        rows.append(
            [
                model, dtype, rule, side if side.startswith("transformers") else f"`{side.replace('model=', '')}`",
                f"{found[0]['rows']} x {found[0]['tokens']}", _rates(found, "plain"), _rates(found, "generate"),
                f"{min(prefixes):.0%}", f"{min(passes):.2f}" if passes else "",
            ]
        )  # fmt: skip
    heading = ["checkpoint", "dtype", "rule", "drafts by", "rows x tokens", "plain decoding", "`model.generate`"]
    return _table([*heading, "least prefix", "tokens a pass"], rows)


def _rates(found: Sequence[dict[str, Any]], reference: str) -> str:
    """Shares of equal rows by size of the batch, one for all where they are equal."""
    rates = [f"{one[reference]['exact']:.0%}" for one in found if reference in one]
    rates += ["refused" for one in found if "refused" in one and reference == "generate"]
    return rates[0] if len({*rates}) == 1 and len(rates) > 2 else " / ".join(rates)


def heads() -> list[str]:
    """Speed-ups beside stretched targets: no drafts over `transformers`, and all others over no drafts."""
    rows = []
    for target in _results("heads", "targets"):
        texts: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
        for one in target["figures"]:
            texts.setdefault((one["workload"], one["temperature"]), {})[one["side"]] = one
        for (text, temperature), sides in texts.items():
            plain = sides["no drafts"]["speed_up"][0]
            found = [
                f"{name} {_rounded(one['against_no_drafts'])} ({one['mean_acceptance_length']:.1f})"
                if one["passes"]
                else f"{name} {_rounded(one['speed_up'][0] / plain) if one['speed_up'] else 'other text'}"
                for name, one in sides.items()
                if name not in ("transformers", "no drafts")
            ]
            rows.append(
                [target["size"], target["dtype"], text, f"{temperature:g}", _rounded(plain), ", ".join(found)]
            )  # fmt: skip
    columns = ["target", "dtype", "text", "temperature", "no drafts over `transformers`"]
    return _table([*columns, "over no drafts (tokens per pass)"], rows)


def stopping() -> list[str]:
    """Cost of a token by ways to end drafts, in passes of the draft model, and the gain over the best fixed length."""
    found = _results("stopping", "rows")
    rows = []
    for target, draft, mode in dict.fromkeys((one["target"], one["draft"], one["mode"]) for one in found):
        own = [one for one in found if (one["target"], one["mode"]) == (target, mode)]
        for ratio in dict.fromkeys(one["ratio"] for one in own if one["ratio"]):
            by: dict[str, list[tuple[float, str]]] = {}
            for one in own:
                if one["ratio"] in (None, ratio):
                    cost = (one["passes"] * ratio + one["steps"]) / one["tokens"]
                    given = next((f" ({one[k]:g})" for k in ("confidence", "threshold") if k in one), "")
                    given = given or (f" ({one['length']})" if one["way"] == "fixed" else "")
                    by.setdefault(one["way"], []).append((cost, given))
            least = {way: min(costs) for way, costs in by.items()}
            gains = [f"{least['fixed'][0] / least[way][0] - 1:+.1%}" for way in ("threshold", "by costs")]
            ways = ("fixed", "confidence", "threshold", "by costs", "cost control")
            costs = [f"{least[way][0]:.2f}{least[way][1]}" for way in ways]
            rows.append([f"`{target}` by `{draft}`, {mode}", str(ratio), *costs, *gains])
    ways = ["best fixed length", "best `confidence`", "best `threshold`", "threshold by costs", "cost control"]
    gains = ["best `threshold` over best fixed", "by costs over best fixed"]
    return _table(["models", "pass of the target", *ways, *gains], rows)


def shared_drafters(part: str) -> list[str]:
    """Tokens per pass of GliDe beside EAGLE, or what a draft model with exits gains of the layers that it reads."""
    found: dict[tuple[str, str], dict[bool, dict[str, Any]]] = {}
    for one in _results("shared_drafters"):
        if (one["drafter"] == "exits") == (part == "exits"):
            found.setdefault((one["drafter"], one["way"]), {})[one["sampled"]] = one
    if part == "exits":
        return _table(
            ["draft", "tokens per pass", "sampled", "tokens saved per 100 layers of the draft model", "sampled"],
            [
                [
                    way, *(_rounded(by[sampled]["mean_acceptance_length"]) for sampled in (False, True)),
                    *(f"{100 * by[sampled]['tokens_per_draft_layer']:.1f}" for sampled in (False, True)),
                ]
                for (_, way), by in found.items()
            ],
        )  # fmt: skip
    return _table(
        ["drafter", "weights", "draft", "tokens per pass", "sampled"],
        [
            [
                drafter.replace("-without-cross", " without cross-attention"), f"{by[False]['weights']:,}", way,
                *(_rounded(by[sampled]["mean_acceptance_length"]) for sampled in (False, True)),
            ]
            for (drafter, way), by in found.items()
        ],
    )  # fmt: skip


def trained_heads() -> list[str]:
    """Tokens per pass of heads of the same training, by kind of text, greedy and sampled."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in _results("trained_heads"):
        found.setdefault((one["method"], one["way"]), []).append(one)
    kinds = [("story", "stories"), ("python", "Python"), ("edit", "edits")]
    lines = []
    for (method, way), rows in sorted(found.items()):
        by = {(row["kind"], row["sampled"]): _rounded(row["mean_acceptance_length"]) for row in rows}
        cells = [f"{by[kind, False]}, {by[kind, True]}" for kind, _ in kinds]
        lines.append([f"`{method}`", f"{rows[0]['weights']:,}", str(rows[0]["steps"]), way, *cells])
    return _table(["drafter", "weights", "steps", "draft", *(text for _, text in kinds)], lines)


def head_passes() -> list[str]:
    """How many times as long drafts of GliDe take by passes in torch as by compiled ones."""
    return _table(
        ["`nano`", "dtype", "a draft", "a step of decoding"],
        [
            [
                one["size"].replace("as-is", "as it is").replace("B", " B"), one["dtype"],
                *(f"{one['ratios'][what]:.1f}x" for what in ("draft", "step")),
            ]
            for one in _results("head_passes")
        ],
    )  # fmt: skip


def draft_training() -> list[str]:
    """Tokens per pass of draft models of one shape by the losses that trained them."""
    ways = ("greedy", "seeded", "rejection")
    found: dict[str, dict[str, Any]] = json.loads((RESULTS / "draft_training.json").read_text("utf-8"))["losses"]
    rows = [
        [loss.replace(", ", ", then "), *(_rounded(one[way]) for way in ways), f"{one['overlap']:.3f}"]
        for loss, one in found.items()
    ]
    return _table(["loss", "greedy", "sampled, `seeded`", "sampled, `rejection`", "overlap"], rows)


def shapes() -> list[str]:
    """What replay predicts of draft models, and what decoding counts: tokens per pass, and the best number to draft."""
    file = json.loads((RESULTS / "shapes.json").read_text("utf-8"))
    by: dict[str, list[dict[str, Any]]] = {}
    for one in file["rows"]:
        by.setdefault(one["draft"], []).append(one)
    rows = []
    for draft, own in by.items():
        cells = [f"`{draft}`", f"{own[0]['layers']} x {own[0]['width']}"]
        cells += [f"{own[k - 1]['predicted']:.2f}, {own[k - 1]['measured']:.2f}" for k in (1, 4, 8)]
        for ratio in ("10", "50"):
            best = {side: min(own, key=lambda one: one[f"{side}_costs"][ratio]) for side in ("predicted", "measured")}
            costs = [f"{best[side][f'{side}_costs'][ratio]:.2f} ({best[side]['length']})" for side in best]
            cells.append(", ".join(costs))
        rows.append(cells)
    drafted = [f"drafting {k}" for k in (1, 4, 8)]
    return _table(["draft model", "shape", *drafted, "cost at 10", "cost at 50"], rows)


def views(part: str) -> list[str]:
    """What views cost, how often their drafts are accepted, and the speed of text that they draft."""
    found = _results("views", part)
    if part == "passes":
        specs = list(dict.fromkeys(one["view"] for one in found))
        behind = list(dict.fromkeys(one["behind"] for one in found))
        by = {(one["view"], one["behind"], one["dtype"]): one for one in found}
        rows = [
            [f"{n:,}", f"`{spec}`", *(f"{by[spec, n, d]['ratio']:.3f} ({by[spec, n, d]['floor']:.3f})" for d in DTYPES)]
            for n in behind for spec in specs if (spec, n, DTYPES[0]) in by
        ]  # fmt: skip
        return _table(["behind", "view", *DTYPES], rows)
    if part == "long":
        by = {(one["view"], one["dtype"]): one for one in found}
        rows = [
            [f"`{spec}`", *(_rounded(by[spec, dtype]["over_no_drafts"]) for dtype in DTYPES)]
            for spec in dict.fromkeys(one["view"] for one in found if one["view"])
        ]
        return _table(["view", *DTYPES], rows)
    if part == "acceptance":
        rows = [
            [
                f"`{one['view']}`" if one["view"] else "the whole model", f"{one['share']:.2f}",
                f"{one['mean_acceptance_length']:.2f}",
                *(["", ""] if one["loss"] is None else [f"{one['agreement']:.1%}", f"{one['loss']:.3f}"]),
            ]
            for one in found
        ]  # fmt: skip
        return _table(["view", "share of weights", "tokens per pass", "agreement alone", "loss alone"], rows)
    if part == "sparing":
        rows = [
            [
                f"`{one['view']}:layers={one['layers']}`", f"{one['similarity']:.4f}" if one["similarity"] else "",
                f"{one['skipped']:.1%}", f"{one['story']:.2f}", f"{one['edit']:.2f}", f"{one['agreement']:.1%}",
                f"{one['loss']:.3f}",
            ]
            for one in found
        ]  # fmt: skip
        return _table(
            [
                "view", "similarity", "feed-forwards skipped", "tokens per pass, stories", "edits", "agreement alone",
                "loss alone",
            ],
            rows,
        )  # fmt: skip
    if part == "neurons":
        rows = [
            [
                f"{one['kept']:.0%}", f"{one['share']:.2f}",
                *("" if one[text] is None else f"{one[text]:.2f}" for text in ("story", "edit")),
                f"{one['agreement']:.1%}", f"{one['perplexity']:.2f}",
            ]
            for one in found
        ]  # fmt: skip
        columns = ["neurons", "share of weights", "story", "edit", "agreement alone", "perplexity alone"]
        return _table(columns, rows)
    if part == "neuron-passes":
        by = {(one["group"], one["kept"], one["dtype"]): one for one in found}
        rows = [
            [str(n), f"{kept:.0%}", *(f"{by[n, kept, d]['ratio']:.3f} ({by[n, kept, d]['floor']:.3f})" for d in DTYPES)]
            for n, kept in dict.fromkeys((one["group"], one["kept"]) for one in found)
        ]
        return _table(["neurons of a group", "that run", *DTYPES], rows)
    if part == "lossy":
        rows = [
            [
                one["size"] or "as it is", "the whole model" if one["view"] == "no drafts" else f"`{one['view']}`",
                f"{one['perplexity']:.3f}", f"{one['agreement']:.1%}",
            ]
            for one in found
        ]  # fmt: skip
        return _table(["`nano`", "generating under", "perplexity", "agreement"], rows)
    sides = [side for side in dict.fromkeys(one["side"] for one in found) if side not in ("transformers", "no drafts")]
    rows = []
    for key in dict.fromkeys((one["size"], one["dtype"], one["workload"]) for one in found):
        by = {one["side"]: one for one in found if (one["size"], one["dtype"], one["workload"]) == key}
        rows.append([*key, *(_rounded(by[s]["against_no_drafts"]) if by[s]["passes"] else "" for s in sides)])
    return _table(["target", "dtype", "text", *map(_drafter, sides)], rows)


def experts(part: str) -> list[str]:
    """What passes over mixtures of experts and supernets read and cost, and the speed of drafting with less of them."""
    found = _results("experts", part)
    if part == "oracle":
        rows = [[f"`{one['draft']}`", _rounded(one["over_no_drafts"])] for one in found if one["draft"]]
        return _table(["draft", "over no drafts"], rows)
    if part == "views":
        rows = [[f"`{one['view']}`", f"{one['share']:.3f}", f"{one['ratio']:.3f}"] for one in found]
        return _table(["view", "share of bytes", "of a pass"], rows)
    rows = [
        [str(one["width"]), f"{one['union']:.1f}", f"{one['union_of_text']:.1f}", _rounded(one["ratio"])]
        for one in found
    ]
    return _table(["nodes", "experts, of measured curves", "experts, of a text", "of a pass of one node"], rows)


def specialists() -> list[str]:
    """Tokens per pass of two specialists by every way to use them, and what that costs."""
    made = json.loads((RESULTS / "specialists.json").read_text("utf-8"))
    found = {(one["way"], one["rule"], one["draft"]): one for one in made["results"]}
    sides = list(dict.fromkeys((rule, draft) for _, rule, draft in found))
    rows = []
    for way in dict.fromkeys(way for way, *_ in found):
        cells = [found.get((way, *side)) for side in sides]
        passes = next(one["draft_passes"] for one in cells if one is not None)
        named = _drafter(way) if "routing" in way or "|" in way else way
        rows.append([named, *("" if one is None else _by_language(one) for one in cells), _rounded(passes)])
    exact = sum(one["exact"] for one in made["results"])
    *lengths, timed = made["classified"]
    right, wrong = (", ".join(f"{one[key]:.1%}" for one in lengths) for key in ("right", "wrong"))
    return [
        f"Tokens per pass over {made['texts']} texts of {made['tokens']} tokens, half English, half German, in mixed "
        "batches (in brackets English and German alone), drafts in full. The target has "
        f"{made['target'] / 1e6:.1f} M parameters, draft models {made['draft_model'] / 1e6:.2f} M; sampled at "
        f"{made['temperature']:g}. Texts are those of `model.generate` in {exact} of {len(made['results'])} cells "
        "(`python benchmarks/specialists.py`).",
        "",
        *_table(["way", *(f"{draft}, {rule}" for rule, draft in sides), "draft models' passes per pass"], rows),
        "",
        f"From {made['examples']} captions of each language, of held-out captions cut to "
        f"{', '.join(str(one['tokens']) for one in lengths)} tokens {right} were clear and right, {wrong} wrong, the "
        f"others for `otherwise`. The votes of a prompt of {timed['tokens']} tokens took "
        f"{timed['seconds'] * 1e3:.1f} ms of one busy core.",
    ]


def _by_language(one: dict[str, Any]) -> str:
    en, de = (_rounded(one["tokens_per_pass"][language]) for language in ("en", "de"))
    return f"{_rounded(one['both'])} ({en}, {de})"


def replay(*drafters: str) -> list[str]:
    """Mean acceptance length on recorded outputs and, in brackets, nodes drafted per pass; of all drafters, or some."""
    found = {one["drafter"]: one for one in _results("replay")}
    return _table(
        ["drafter", *KINDS.values()],
        [[_drafter(name), *(_accepted(found[name], kind) for kind in KINDS)] for name in drafters or found],
    )


def _accepted(one: dict[str, Any], kind: str) -> str:
    return f"{one['mean_acceptance_length'][kind]:.2f} ({one['nodes_per_pass'][kind]})"


def recorded() -> list[str]:
    """Tokens per pass and per second of a random model made to emit recorded answers."""
    turns = ("first turn", "second turn")
    return _table(
        ["drafter", *(head for turn in turns for head in (f"{turn}: tokens per pass", "tok/s", "over no drafts"))],
        [
            [_drafter(one["drafter"]), *(cell for turn in turns for cell in _turn(one[turn]))]
            for one in _results("recorded")
        ],
    )


def _turn(one: dict[str, Any]) -> list[str]:
    spread = f" ({one['lowest']:.2f}-{one['highest']:.2f})" if "lowest" in one else ""
    over = f"{one['over_no_drafts']:.2f}{spread}"
    return [f"{one['mean_acceptance_length']:.2f}", str(one["tokens_per_second"]), over]


def peers(model: str, weights: str, of: str = "peers") -> list[str]:
    """Engines on one model, by mode and text: tokens per second, and those of truedraft as a multiple."""
    ways: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for one in _results(of):
        if (one["model"].replace(" ", ""), one["dtype"]) == (model, weights):
            ways.setdefault((one["engine"], one["mode"]), {})[one["text"]] = one
    texts = ("copy-heavy", "no repeats")
    return _table(
        ["engine", "mode", *(head for text in texts for head in (text, "truedraft"))],
        [[*way, *(cell for text in texts for cell in _speed(found.get(text)))] for way, found in ways.items()],
    )


def _speed(one: dict[str, Any] | None) -> tuple[str, str]:
    if one is None:
        return "", ""
    times = f"{one['truedraft_times']:.2f}x" if "truedraft_times" in one else ""
    return f"{one['tokens_per_second']} ({one['lowest']}-{one['highest']})", times


def passes() -> list[str]:
    """The seconds of a pass of one node, those of wider ones as multiples, and those of `transformers`."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in _results("runtime"):
        found.setdefault((row["model"], row["weights"]), {})[row["width"]] = row
    limits = {(one["model"], one["weights"]): one for one in _results("runtime", "limits")}
    widths = [width for width in next(iter(found.values())) if width > 1]
    rows = []
    for which, by_width in found.items():
        one, limit = by_width[1], limits[which]
        rows.append(
            [
                *which,
                f"{limit['bandwidth'] / 1e9:.0f} GB/s, {limit['rate'] / 1e9:,.0f} GFLOP/s",
                f"{one['seconds'] * 1e3:.1f} ms",
                f"{one['floor'] / one['seconds']:.0%}",
                *(f"{by_width[width]['seconds'] / one['seconds']:.2f}x" for width in widths),
                *(f"{by_width[width]['transformers'] / by_width[width]['seconds']:.1f}x" for width in (1, 8, 32)),
            ]
        )
    of = [f"width {width}" for width in widths]
    others = [f"`transformers` at {width}" for width in (1, 8, 32)]
    return _table(["model", "weights", "this machine", "width 1", "of its floor", *of, *others], rows)


def speeds() -> list[str]:
    """Tokens per second of every engine that was run with and without drafts, model by model."""
    plain, lookup = "plain", "prompt lookup, 10"
    ways = ((plain, "copy-heavy"), (lookup, "copy-heavy"), (lookup, "no repeats"))
    found: dict[tuple[str, str, str], dict[tuple[str, str], float]] = {}
    for one in _results("peers"):
        of_engine = found.setdefault((one["model"], one["dtype"], one["engine"]), {})
        of_engine[one["mode"], one["text"]] = one["tokens_per_second"]
    return _table(
        ["model", "weights", "engine", "plain", "prompt lookup of 10, copies", "prompt lookup of 10, no repeats"],
        [[*who, *(str(has[way]) for way in ways)] for who, has in found.items() if all(way in has for way in ways)],
    )


def real(model: str, of: str = "real") -> list[str]:
    """Tokens per second of requests to an instruct model, by kind and side, and the default over transformers: of whole
    calls, and after the first token.

    model: what its name in the file begins with. of: the file of results.
    """
    rows = [row for row in _results(of) if row["model"].startswith(model)]
    sides = list(dict.fromkeys(row["side"] for row in rows))
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["workload"], {})[row["side"]] = row
    table = []
    for kind, of in found.items():
        plain, default = of[sides[0]], of[sides[-1]]
        table.append([
            kind, *(f"{of[side]['tokens_per_second']:.1f}" for side in sides),
            f"**{default['tokens_per_second'] / plain['tokens_per_second']:.1f}**",
            f"{plain['time_per_output_token'] / default['time_per_output_token']:.1f}",
        ])  # fmt: skip
    head = [f"{rows[0]['model']}, {rows[0]['dtype']}", *sides, f"{sides[-1]} over {sides[0]}"]
    return _table([*head, "after the first token"], table)


def audited() -> list[str]:
    """Long audits of real models: tokens compared with the model's own forward, and with plain decoding."""
    table = []
    for run in _results("audited", "runs"):
        found = run["found"]
        table.append([
            f"{run['model']}, {run['dtype'].removeprefix('torch.')}{', int8' * (run['weights'] == 'int8')}",
            f"{run['tokens']:,}",
            *(f"{found.get(f'{kind} against the forward', 0):,}" for kind in ("equal", "near-ties", "unexplained")),
            f"{found.get('tokens compared with plain decoding', 0):,}",
            f"{found.get('batches other than plain decoding', 0)}",
        ])  # fmt: skip
    head = [
        "model",
        "tokens",
        "as the forward",
        "near-ties",
        "unexplained",
        "compared with no drafts",
        "batches that differ",
    ]
    return _table(head, table)


def never_slower() -> list[str]:
    """Drafters over no drafts by kind of request, in first and later calls."""
    runs = _results("never_slower", "runs")
    states = ("fresh", "stored", "warm")
    table = []
    for run in runs:
        kinds = list(dict.fromkeys(cell.partition(" ")[2] for cell in run["cells"]))
        for kind in kinds:
            cells = [run["cells"].get(f"{state} {kind}") for state in states]
            found = [cell for cell in cells if cell is not None]
            of_control = sum(cell["control"] for cell in found) / len(found)
            table.append(
                [
                    f"{run['model']}, {run['dtype']}", "default" if run["draft"] == "auto" else f"`{run['draft']}`",
                    kind, *("" if cell is None else f"{cell['drafts']:.2f}" for cell in cells),
                    f"{found[-1]['tokens_per_pass']:.2f}", f"{of_control:.2f}",
                ]
            )  # fmt: skip
    states_as = ["first call", "first, times stored", "later"]
    return _table(["model", "drafter", "request", *states_as, "tokens per pass, later", "none over none"], table)


def whole_calls() -> list[str]:
    """Calls of `generate` on the embedded model, compared with those of `transformers`."""
    return _table(
        [
            "prompt", "drafter", "passes for tokens", "mean acceptance length", "`transformers` tok/s",
            "truedraft tok/s", "speed-up", "identical",
        ],
        [
            [
                one["prompt"], _drafter(one["drafter"]), f"{one['passes']} for {one['tokens']}",
                f"{one['mean_acceptance_length']:.2f}", str(one["transformers_tokens_per_second"]),
                str(one["tokens_per_second"]), f"{one['speed_up']}x", "yes" if one["identical"] else "no",
            ]
            for one in _results("generate")
        ],
    )  # fmt: skip


def vocabularies() -> list[str]:
    """Draft models with another tokenizer: a row by pair of models and way of drafting."""
    of_way: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for one in _results("vocabularies"):
        of_way.setdefault((one["target"], one["draft"], one["way"]), {})[one["decoded"]] = one
    rows = []
    for (target, draft, way), found in of_way.items():
        greedy, ways = found["greedy"], ("greedy", "sampled, seeded", "sampled, rejection")
        exact = [one["exact"] for one in found.values() if one["exact"] is not None]
        rows.append(
            [
                f"{target} by {draft}", f"{greedy['shared']:,} of {greedy['of']:,}",
                way if way == "transformers" else f"`{way}`", "yes" if all(exact) else "no",
                *(_rounded(found[decoded]["tokens_per_pass"]) if decoded in found else "" for decoded in ways),
                _rounded(greedy["draft_passes"]), _rounded(greedy["draft_tokens"]),
            ]
        )  # fmt: skip
    head = ["model by draft model", "shared tokens", "way", "identical", "greedy", "`seeded`", "`rejection`"]
    return _table([*head, "draft passes per token", "draft tokens per token"], rows)


def staged() -> list[str]:
    """Tokens per pass of the target, passes of the draft model for a draft and for a token: greedily, and sampled."""
    figures: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for one in _results("staged", "rows"):
        pair = f"`{one['target']}` by `{one['draft']}`"
        name, _, how = one["way"].partition(", ")
        way = f"`{name}`" + (f", {how}" if how else "")
        figures.setdefault((pair, way, one["state"]), {})[one["rule"]] = one
    shown = {
        "tokens_per_pass": "tokens per pass", "draft_passes_per_draft": "draft passes per draft",
        "draft_passes_per_token": "per token",
    }  # fmt: skip
    return _table(
        [
            "target by draft model",
            "drafter",
            "state",
            *shown.values(),
            *(f"sampled: {name}" for name in shown.values()),
        ],
        [
            [*named, *(_rounded(by_rule[rule][key]) for rule in ("greedy", "seeded") for key in shown)]
            for named, by_rule in figures.items()
        ],
    )


def serve(part: str) -> list[str]:
    """A part of the server's benchmark, a row for each of its lines.

    part: latency, clients, prediction, gap or peer.
    """
    columns = {
        "latency": {
            "streams": "streams", "engine_first_ms": "engine alone: first token, ms", "engine_pass_ms": "pass, ms",
            "added_first_ms": "the server adds: first token, ms", "added_pass_ms": "per pass, ms",
        },
        "clients": {
            "text": "text", "clients": "clients", "tokens_per_second": "tokens/s", "without_drafts": "without drafts",
            "ratio": "ratio", "mean_acceptance_length": "mean acceptance length",
        },
        "prediction": {
            "model": "model", "clients": "clients", "tokens_per_second": "tokens/s",
            "without_drafts": "without drafts", "ratio": "ratio",
            "mean_acceptance_length": "mean acceptance length",
        },
        "gap": {
            "model": "model", "prompt_tokens": "prompt that arrives, tokens", "usual_gap_ms": "usual gap, ms",
            "longest_gap_ms": "longest gap, ms", "first_token_of_the_prompt_ms": "its first token, ms",
        },
        "peer": {"server": "server", "clients": "clients", "tokens_per_second": "tokens/s", "same_texts": "same texts"},
    }[part]  # fmt: skip
    shown = {True: "yes", False: "no"}
    rows = [
        [shown[v] if isinstance(v := one[key], bool) else str(v) for key in columns] for one in _results("serve", part)
    ]
    return _table(list(columns.values()), rows)
