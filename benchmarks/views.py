"""The target drafting for itself: what passes under views cost, how often drafts are accepted, and the speed of text.

    python benchmarks/views.py [--parts passes acceptance sparing long lossy text] [--json FILE] [--svg PICTURE]

passes: a random Llama of 0.1 B parameters behind 256 positions, and behind 16,384 and 65,536 of random keys: a pass of
width 1 under a view over one of the whole model, beside the share of bytes that it reads, of weights and of keys and
values; medians of ratios within rounds.
acceptance: `nano`, whose layers all add something: drafts of 8 tokens without more and more of what a calibration by
`sleb` finds redundant, by fewer layers for each further token, and in fewer bits; and the loss and the agreement of the
view alone, which is the lossy model.
sparing: `nano` by `ffn-skipllm`, calibrated on its own stories to skip several shares of all feed-forwards: the
threshold, the share, the quality of the view alone, and the tokens per pass of its drafts.
long: the same model behind a prompt of 16,384 tokens, wired so that every draft is right: what views save at best.
lossy: `nano`, as it is and stretched to passes of 0.1 B, generating under views: the perplexity of the second halves of
texts, the agreement with the whole model there, and the speed over it. It needs a file of stories (--texts).
neurons: the same of `deja-vu`, with predictors that were trained for `nano` (--predictors), and its tokens per pass on
stories and edits, drafts of 8 tokens.
neuron-passes: as passes, of neurons that untrained predictors choose, singly or by sixteen.
text: `nano` stretched to passes of 0.1 B and 0.5 B. Its further layers add nothing, so that bits are measured there and
skipped layers are not: those would be free.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import truedraft
from peers import VOCABULARY, successors, wired
from truedraft import registry
from truedraft.bench.compare import compare
from truedraft.bench.lossy import approximations, qualities
from truedraft.bench.plots import Panel, picture
from truedraft.bench.sides import transformers_side, truedraft_side
from truedraft.bench.sizes import SIZES
from truedraft.bench.stretched import stretched
from truedraft.bench.workloads import Item, Workload, embedded
from truedraft.calibrating import TextEvaluator
from truedraft.drafters._learned import save_learnt
from truedraft.drafters.self_._drafter import SelfDrafter
from truedraft.drafters.self_._neurons import Training
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.runtime.rounded_entries import CHUNK
from truedraft.targets.hosting import hosted
from truedraft.tree import DraftTree, Prompt
from truedraft.views._base import Rounded, Selection, View

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
BEHIND, DEPTH = 256, 8
PASSES = (
    "skip-layers:share=0.25", "skip-layers:share=0.5", "skip-layers:layers=1-10a", "skip-layers:layers=1-10f",
    "skip-layers:layers=4-7f", "ffn-skipllm:layers=3-7,similarity=0.01,share=0.33",
    "ffn-skipllm:layers=3-7,similarity=1.0,share=0.0",
)  # fmt: skip
KEPT = (0.5, 0.25)  # of the neurons
BITS = ("int8-self", "int4-self")
ENTRIES = (
    "window-kv", "sparse-to-dense", "int8-kv", "int4-kv", "int8-self", "window-kv+int8-self", "int8-self+int8-kv",
    "quantspec",
)  # fmt: skip
LONG = (16384, 65536)
SHARES = (0.05, 0.1, 1 / 6, 0.25, 1 / 3)  # of feed-forwards
SPARING = tuple(f"ffn-skipllm:layers=1-3,similarity={similarity}" for similarity in (0.9932, 0.9912, 0.9871, 0.981))
LAYERS = (
    "skip-layers:layers=3f", "skip-layers:layers=3", "skip-layers:layers=3;4", "early-exit", "skipdecode", *SPARING,
    *BITS,
)  # fmt: skip
CACHE = (
    *BITS, "int8-kv", "int4-kv", "quantspec", "window-kv:recent=124", "window-kv:recent=508",
    "sparse-to-dense:entries=128,recent=124",
)  # fmt: skip
TEXT, CHARACTERS = 1600, 6  # tokens of a text for lossy views, and more characters than a token has
DRAFTS = (*BITS, "int8-self+suffix", "int4-self+suffix", "auto")


def view_of(spec: str) -> View:
    """The view of a spec, "" for the whole model."""
    return registry.load("drafters", spec).view if spec else View()


def share_of_bytes(target: Any, view: View, kept: float, behind: int) -> float:
    """Bytes of weights and of keys and values that a pass reads under a view, over those of the whole model.

    kept: bytes of keys and values of a position.
    """
    entries = view.reduction(len(target.layer_types)).entries
    read: float = behind
    if isinstance(entries, Selection):
        read = min(entries.kept + entries.recent, behind)
    elif isinstance(entries, Rounded):
        rounds = max(behind - entries.recent, 0) // CHUNK * CHUNK
        read = behind - rounds + rounds * entries.bits / (8 * target.dtype.itemsize)
    return (target.share(view) * target.weight_bytes + read * kept) / (target.weight_bytes + behind * kept)


def llama(positions: int) -> LlamaForCausalLM:
    """A random Llama of 0.1 B parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, tie_word_embeddings=False, initializer_range=0.01, max_position_embeddings=positions,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def passes(dtype: str, behind: int, specs: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Seconds of passes of width 1, whole and under views, in turns, behind so many positions of random keys."""
    target: Any = hosted(llama(behind + 64).to(getattr(torch, DTYPES[dtype])))
    target.reserve(1, behind + 64)
    target.prefill([Prompt(torch.tensor([5]))])
    for layer in target.cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    target.cache.lengths[0] = behind
    views = {spec: view_of(spec) for spec in specs}
    taken: dict[str, list[float]] = {spec: [] for spec in ("", *views)}
    for _ in range(rounds):
        for spec in taken:
            for turn in range(DEPTH):  # as a draft makes them, one after another
                start = time.perf_counter()
                target.score([DraftTree.chain(7)], views.get(spec))
                taken[spec] += [time.perf_counter() - start][: turn > 0]
    kept = 2 * sum(layer.keys[0].numel() for layer in target.cache.layers) * target.dtype.itemsize / (behind + 64)
    return [
        {
            "dtype": dtype, "behind": behind, "view": spec, "share": target.share(view), "seconds": median(taken[spec]),
            "floor": share_of_bytes(target, view, kept, behind),
            "ratio": median(own / whole for own, whole in zip(taken[spec], taken[""], strict=True)),
        }
        for spec, view in views.items()
    ]  # fmt: skip


def behind_texts(dtype: str, length: int, tokens: int) -> list[dict[str, Any]]:
    """Speed behind long prompts, these left out, of a model wired as in peers.py: all that views draft is right.

    Raises ValueError where another text is generated.
    """
    model = wired(llama(length + 512)).to(getattr(torch, DTYPES[dtype]))
    cycle = successors()["no repeats"][0]
    ids = torch.tensor([[cycle[i % len(cycle)] for i in range(length + tokens)]])
    rows: list[dict[str, Any]] = []
    for spec in (None, *ENTRIES):
        fast = truedraft.accelerate(model, draft=spec)
        given = ids[:, :length]
        out = fast.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
        if not out.equal(ids):
            raise ValueError("the text differs from the expected one")
        report = fast.report()
        spent = report.seconds["all"] - report.seconds["prefill"] - report.seconds["measure"]
        rows.append({"dtype": dtype, "behind": length, "view": spec or "", "seconds": spent / tokens})
    return [{**row, "over_no_drafts": rows[0]["seconds"] / row["seconds"]} for row in rows]


def prompts(tokenizer: Any, name: str) -> list[Any]:
    """The token ids of the embedded prompts of a name, (1, n) each."""
    items = next(load_.items for load_ in embedded() if load_.name == name)
    return [tokenizer(item.text, return_tensors="pt", return_token_type_ids=False)["input_ids"] for item in items]


def own_stories(model: Any, tokenizer: Any, tokens: int) -> TextEvaluator:
    """On a model's own continuations of stories."""
    encoded = prompts(tokenizer, "story")
    return TextEvaluator(
        model, [model.generate(ids, max_new_tokens=tokens, do_sample=False)[0].tolist() for ids in encoded]
    )


def accepted(model: Any, view: View, encoded: Sequence[Any], tokens: int) -> float:
    """Tokens per pass of drafts by a view."""
    fast = truedraft.accelerate(model, draft=SelfDrafter(view, nodes=DEPTH, depth=DEPTH), control="fixed")
    emitted = made = 0
    for ids in encoded:
        fast.generate(ids, max_new_tokens=tokens, do_sample=False)
        emitted, made = emitted + fast.report().tokens, made + fast.report().row_passes
    return emitted / made


def sparing(tokens: int) -> list[dict[str, Any]]:
    """`ffn-skipllm` by the share of feed-forwards that it is calibrated to skip, beside the same half of one layer."""
    model, tokenizer = load("nano", "float32")
    evaluator = own_stories(model, tokenizer, tokens)
    views: list[Any] = []
    for share in SHARES:
        found = registry.load("views", f"ffn-skipllm:share={share}").calibrate(evaluator)
        knobs = ",".join(f"{name}={found[name]}" for name in ("layers", "similarity", "share"))
        views.append(registry.load("views", f"ffn-skipllm:{knobs}"))
    views += [view_of(f"skip-layers:layers={layers}") for layers in ("3f", "2-3f")]
    static = [len(view.reduction(evaluator.layers).feed_forward) / evaluator.layers for view in views]
    return [
        {
            "view": view.name, "layers": view.layers, "similarity": getattr(view, "similarity", None),
            "skipped": skipped or view.share,
            "share": evaluator.target.share(view), "loss": evaluator.loss(view), "agreement": evaluator.agreement(view),
            **{name: accepted(model, view, prompts(tokenizer, name), tokens) for name in ("story", "edit")},
        }
        for view, skipped in zip(views, static, strict=True)
    ]  # fmt: skip


def acceptance(tokens: int) -> list[dict[str, Any]]:
    """Of drafts of `nano` by its layers that are left, and the quality of these alone."""
    model, tokenizer = load("nano", "float32")
    encoded = prompts(tokenizer, "story")
    evaluator = own_stories(model, tokenizer, tokens)
    d3: Any = registry.load("views", "d3")
    order = d3.calibrate(evaluator)["layers"].split(";")  # that of `sleb`
    found = [";".join(sorted(order[:n])) for n in (1, 2, 3)]
    halves = [f"skip-layers:layers={found[0]}{half}" for half in "af"]
    falling = [f"d3:layers={';'.join(order)},alpha={alpha}" for alpha in (0.95, 0.9)]
    falling += [f"skipdecode:most={most},least={least}" for most, least in ((1.0, 0.75), (0.9, 0.5), (0.75, 0.25))]
    specs = ["", *halves, *(f"skip-layers:layers={layers}" for layers in found), *falling, *BITS]
    rows = []
    for spec in specs:
        view = view_of(spec)
        levels = [view.at(depth) for depth in range(DEPTH)]
        alone = levels[1:] == levels[:-1]  # else it is another model at every depth of a draft
        rows.append(
            {
                "view": spec, "share": sum(map(evaluator.target.share, levels)) / DEPTH,
                "mean_acceptance_length": accepted(model, view, encoded, tokens),
                "loss": evaluator.loss(view) if alone else None,
                "agreement": evaluator.agreement(view) if alone else None,
            }
        )  # fmt: skip
    return rows


def lossy(size: str, specs: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The quality and the speed of views that the model generates under, behind texts and in their second halves.

    size: of `nano`, "" for its own, whose layers all add something.
    """
    model: Any
    model, tokenizer = load("nano", "float32")
    if size:
        layers, hidden = SIZES["nano"][size]
        model = stretched(model, layers=layers, hidden=hidden)
    ids = tokenizer(args.texts.read_text("utf-8")[: args.limit * TEXT * CHARACTERS].lower())["input_ids"]
    texts = [tokenizer.decode(ids[at : at + TEXT]) for at in range(0, args.limit * TEXT, TEXT)]
    chosen = Workload("texts", tuple(map(Item, texts)), args.tokens)
    ways = approximations(model, tokenizer, [f"lossy/{spec}" for spec in specs], ["none"], "cost")
    found = {one.side: one for one in qualities(ways, tokenizer, chosen, None, print)}
    sides = [truedraft_side(name, fast) for name, fast in ways.items()]
    rows = compare(sides, chosen, tokenizer, model.device, 1, args.rounds)
    return [
        {
            "size": size, "view": row.side, "perplexity": found[row.side].perplexity, "tokens": found[row.side].tokens,
            "agreement": found[row.side].agreement, "behind": found[row.side].behind,
            "tokens_per_second": row.tokens_per_second, "over_whole": row.against_no_drafts,
        }
        for row in rows
    ]  # fmt: skip


def neurons(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Text of `nano` under `deja-vu` and of drafts by it."""
    specs = [f"deja-vu:{args.predictors},kept={kept}" for kept in (0.75, *KEPT)]
    model, tokenizer = load("nano", "float32")
    target, rows = hosted(model), lossy("", specs, args)
    for spec, row in zip(specs, rows[1:], strict=True):
        row |= {"kept": view_of(spec).kept, "share": target.share(view_of(spec)), "view": "deja-vu"}  # type: ignore[attr-defined]
        fast = truedraft.accelerate(model, draft=f"{spec},depth={DEPTH},nodes={DEPTH}", control="fixed")
        for load_ in (one for one in embedded() if one.name in ("story", "edit")):
            emitted = made = 0
            for item in load_.items:
                ids = tokenizer(item.text, return_tensors="pt", return_token_type_ids=False)["input_ids"]
                fast.generate(ids, max_new_tokens=args.tokens, do_sample=False)
                emitted, made = emitted + fast.report().tokens, made + fast.report().row_passes
            row[load_.name] = emitted / made
    rows[0] |= {"kept": 1.0, "share": 1.0, "story": None, "edit": None}
    return rows


def neuron_passes(dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Passes of width 1 in which predictors of rank 64, untrained, choose neurons."""
    rows = []
    for group in (1, 16):
        with tempfile.TemporaryDirectory() as folder:
            model, learner = llama(BEHIND + 64).to(getattr(torch, DTYPES[dtype])), Training(group=group)
            learner.begin(model)
            save_learnt(Path(folder), learner.name, learner.module, model, learner.config())
            found = passes(dtype, BEHIND, [f"deja-vu:{folder},kept={kept}" for kept in KEPT], rounds)
        rows += [{**row, "view": "deja-vu", "group": group, "kept": k} for k, row in zip(KEPT, found, strict=True)]
    return rows


def drawn(rows: list[dict[str, Any]]) -> str:
    """Acceptance, agreement and loss by the share of layers skipped."""
    whole = [
        row for row in rows if not row["view"] or (row["view"].startswith("skip-layers") and row["view"][-1].isdigit())
    ]
    layers = [row["view"].count(";") + bool(row["view"]) for row in whole]
    panels = [
        Panel(title, [("sleb's order", [row[name] for row in whole])], list(map(str, layers)))
        for title, name in (
            (f"tokens per pass, drafts of {DEPTH}", "mean_acceptance_length"),
            ("agreement of the view alone", "agreement"), ("loss of the view alone, nats a token", "loss"),
        )
    ]  # fmt: skip
    return picture(panels, "layers skipped, of nano's six")


def text(size: str, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Speed beside no drafts."""
    small, tokenizer = load("nano", DTYPES[dtype])
    layers, hidden = SIZES["nano"][size]
    model = stretched(small, layers=layers, hidden=hidden)
    fasts = {spec: truedraft.accelerate(model, tokenizer, draft=spec) for spec in DRAFTS}
    rows: list[dict[str, Any]] = []
    for load_ in embedded():
        chosen = Workload(load_.name, load_.items[: args.limit], args.tokens)
        sides = [transformers_side("transformers", model)]
        sides.append(truedraft_side("no drafts", truedraft.accelerate(model, tokenizer, draft=None)))
        sides += [truedraft_side(spec, fast) for spec, fast in fasts.items()]
        found = compare(sides, chosen, tokenizer, model.device, 1, args.rounds, 0.0, 0)
        rows += [{"size": size, "dtype": dtype, **vars(row)} for row in found]
    return rows


def shown(console: Console, title: str, rows: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    table = Table(title=title)
    for name in names:
        table.add_column(name)
    for row in rows:
        table.add_row(*(f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name]) for name in names))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["passes", "acceptance", "sparing", "long", "text"])
    parser.add_argument("--texts", type=Path, help="of the parts lossy and neurons: a file of stories")
    parser.add_argument("--predictors", type=Path, help="of the part neurons: a folder of `truedraft train deja-vu`")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES["nano"]))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--machine", default=platform.processor(), help="a description of this machine, for --json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="draw the acceptance by layers skipped")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    console, found = Console(width=150), dict[str, list[dict[str, Any]]]()
    if "passes" in args.parts:
        found["passes"] = [
            row
            for behind, specs, rounds in ((BEHIND, (*PASSES, *BITS), 5), *((long, ENTRIES, 2) for long in LONG))
            for dtype in args.dtypes
            for row in passes(dtype, behind, specs, rounds * args.rounds)
        ]
        shown(console, "Passes", found["passes"], ("dtype", "behind", "view", "floor", "ratio", "seconds"))
    if "acceptance" in args.parts:
        found["acceptance"] = acceptance(args.tokens)
        names = ("view", "share", "mean_acceptance_length", "loss", "agreement")
        shown(console, "nano", found["acceptance"], names)
        if args.svg:
            write_whole(args.svg, drawn(found["acceptance"]))
    if "sparing" in args.parts:
        found["sparing"] = sparing(args.tokens)
        names = ("view", "layers", "similarity", "skipped", "share", "agreement", "loss", "story", "edit")
        shown(console, "ffn-skipllm", found["sparing"], names)
    if "long" in args.parts:
        found["long"] = [row for dtype in args.dtypes for row in behind_texts(dtype, LONG[0], args.tokens)]
        shown(console, "Behind long prompts", found["long"], ("dtype", "behind", "view", "over_no_drafts", "seconds"))
    if "lossy" in args.parts:
        found["lossy"] = [row for size, specs in (("", LAYERS), ("0.1B", CACHE)) for row in lossy(size, specs, args)]
        names = ("size", "view", "perplexity", "agreement", "tokens", "behind", "over_whole")
        shown(console, "Lossy", found["lossy"], names)
    if "neurons" in args.parts:
        found["neurons"] = neurons(args)
        shown(console, "Neurons", found["neurons"], ("kept", "share", "perplexity", "agreement", "story", "edit"))
    if "neuron-passes" in args.parts:
        found["neuron-passes"] = [row for dtype in args.dtypes for row in neuron_passes(dtype, 5 * args.rounds)]
        names = ("dtype", "group", "kept", "floor", "ratio", "seconds")
        shown(console, "Passes over neurons", found["neuron-passes"], names)
    if "text" in args.parts:
        found["text"] = [row for size in args.sizes for dtype in args.dtypes for row in text(size, dtype, args)]
        names = ("size", "dtype", "workload", "side", "differs", "against_no_drafts", "mean_acceptance_length")
        shown(console, "Text", found["text"], names)
    if args.json:
        about = {"machine": args.machine, "threads": torch.get_num_threads(), "torch": torch.__version__}
        write_whole(args.json, json.dumps({"machine": about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
