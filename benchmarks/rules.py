"""Acceptance rules compared: acceptance, its share of the optimum, and time.

    python benchmarks/rules.py                # nano-draft drafts for nano
    python benchmarks/rules.py --share        # time of the rules alone at a vocabulary of 150 k and 32 nodes
    python benchmarks/rules.py --note         # tokens per pass at temperature 0.8, for the pages of the methods

Prompts are the embedded stories; drafts are made in full (control fixed), so that lengths compare. "of the optimum":
how often the token chosen at a node was a drafted one, over the rate of the best rule for the drafts of that node
(`truedraft.accept.optimal_acceptance`; of siblings drawn without replacement on every `--every`th node).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

import truedraft
from noted import figure, note
from truedraft import assets, registry
from truedraft.accept import optimal_acceptance
from truedraft.accept._base import ArgmaxRule
from truedraft.accept._verification import Candidates, Verification, candidates
from truedraft.chance import Chance, StreamNoise
from truedraft.delegate import Delegate
from truedraft.drafters._base import Drafter
from truedraft.loading import load
from truedraft.sampling import History, Laws
from truedraft.stopping import Stops
from truedraft.tree import Accepted, DraftTree, Row, Scores

# rule, drafter, its knobs: about the same number of nodes each
PAIRS = [
    ("seeded", "draft-model", "length=6"),
    ("rejection", "draft-model", "length=6"),
    ("block", "draft-model", "length=6"),
    ("seeded", "gumbel-top-k", "branches=2x2x1"),
    ("multi-round", "gumbel-top-k", "branches=2x2x1"),
    ("multi-round", "stochastic-beam", "beam=3,length=4"),
    ("multi-round", "spectr", "paths=3,length=4"),
    ("k-seq", "spectr", "paths=3,length=4"),
    ("multi-round", "greedy-multi-draft", "branches=3x2x1"),
    ("greedy-multi-draft", "greedy-multi-draft", "branches=3x2x1"),
    ("seeded", "opt-tree", "nodes=12,beam=4,length=4"),
    ("multi-round", "opt-tree", "nodes=12,beam=4,length=4"),
]
LONG = StoppingCriteriaList([MaxLengthCriteria(1000)])
SEEDS = 3  # runs of every prompt
CHAINS = [pair for pair in PAIRS if pair[1] == "draft-model"]
LOSSY = [(f"lossy/{rule}", "draft-model", "length=6") for rule in ("lenient", "typical")]
GREEDY = [(rule, "draft-model", "length=6") for rule in ("greedy", "lossy/top-beta")]


class CountedDrafter(Delegate):
    """A drafter that counts how often a drafted token was accepted, and what the optimum would have been.

    aside: seconds that counting took.
    """

    every: int
    kept: list[bool]
    best: list[float]
    aside: float

    def __init__(self, drafter: Drafter, every: int):
        super().__init__(drafter)
        self.every, self.kept, self.best, self.aside = every, [], [], 0.0

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        start = time.perf_counter()
        for b, (row, tree, one) in enumerate(zip(rows, trees, accepted, strict=True)):
            tokens = [*(tree.tokens[node] for node in one.path[1:]), one.token]
            for node, token in zip(one.path, tokens, strict=True):
                self._count(row, candidates(tree, node), token, scores.logits[b, node])
        self.aside += time.perf_counter() - start
        self.inner.observe(rows, trees, scores, accepted)

    def _count(self, row: Row, offer: Candidates, token: int, logits: Tensor) -> None:
        if not offer.tokens:
            return
        self.kept.append(token in offer.tokens)
        if len(self.kept) % (self.every if offer.draws == "distinct" else max(self.every // 10, 1)) == 0:
            p = row.request.laws.of_drafts([row], [[]], logits[None])[0].softmax(-1)
            self.best.append(_optimum(p, offer))


def _optimum(p: Tensor, offer: Candidates) -> float:
    if offer.dist is None:
        return float(p[list(set(offer.tokens))].sum())
    if offer.draws != "last":
        return optimal_acceptance(p, [offer.dist] * len(offer.tokens), offer.draws)
    certain = list(offer.tokens[:-1])
    rest = p.clone()
    rest[certain] = 0.0
    return float(p[certain].sum() + rest.minimum(offer.dist).sum())


def measured(
    models: tuple[Any, Any, Any], pair: tuple[str, str, str], settings: dict[str, Any], tokens: int, every: int
) -> dict[str, float]:
    """Figures of a rule and a drafter. models: the target, its tokenizer, the draft model."""
    (model, tokenizer, small), (rule, drafter, knobs) = models, pair
    draft = registry.load("drafters", f"{drafter}:{knobs}", model=small)
    counted: Any = CountedDrafter(draft, every)
    fast = truedraft.accelerate(model, tokenizer, draft=counted, rule=rule, control="fixed")
    emitted = passes = 0
    seconds = drafting = 0.0
    for number, prompt in enumerate(SEEDS * assets.prompt("stories.txt").strip().split("\n\n")):
        torch.manual_seed(number)
        inputs: Any = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        fast.generate(**inputs, max_new_tokens=tokens, **{"do_sample": True, "top_k": 0, **settings})
        report = fast.report()
        emitted, passes = emitted + report.tokens, passes + report.row_passes
        seconds += report.seconds["all"] - report.seconds["measure"]
        drafting += report.seconds["draft"]
    return {
        "accepted": emitted / passes,
        "kept": mean(counted.kept),
        "share": mean(counted.kept) / mean(counted.best) if counted.best else float("nan"),
        "ms": 1e3 * (seconds - counted.aside) / passes,
        "draft": 1e3 * drafting / passes,
        "nodes": draft.width,
    }


def compare_rules(models: tuple[Any, Any, Any], tokens: int, every: int) -> None:
    """Every rule with drafts that suit it."""
    temperatures = (0.4, 0.8, 1.2)
    headings = [f"T {t}: tokens a pass, of the optimum, ms" for t in temperatures]
    print(f"| rule | drafts | nodes | {' | '.join(headings)} |\n|---|---|---|" + "---|" * 3, flush=True)
    for pair in PAIRS:
        cells = []
        for temperature in temperatures:
            m = measured(models, pair, {"temperature": temperature}, tokens, every)
            share = "" if pair[0] == "seeded" else f", {m['share']:.0%}"
            cells.append(f"{m['accepted']:.2f}{share}, {m['ms']:.1f}")
        print(f"| `{pair[0]}` | `{pair[1]}:{pair[2]}` | {m['nodes']:.0f} | " + " | ".join(cells) + " |", flush=True)


def noted(models: tuple[Any, Any, Any], tokens: int, temperature: float = 0.8) -> None:
    """Write the tokens per pass of each rule and of each drafter of several continuations for their pages."""
    made: dict[tuple[str, str], list[Any]] = {}
    for pair in [*GREEDY, *LOSSY, *PAIRS]:
        rule, drafter, knobs = pair
        settings = {"do_sample": False, "top_k": None} if pair in GREEDY else {"temperature": temperature}
        found = measured(models, pair, settings, tokens, 10**9)
        how = "greedy" if pair in GREEDY else f"{SEEDS} seeds, temperature {temperature}"
        setting = f"nano drafted by nano-draft, three stories of {tokens} tokens, {how}"
        given = round(found["accepted"], 2), "tokens per pass", setting, "counts"
        command = f"python benchmarks/rules.py --note --tokens {tokens}"
        kind, name = ("accept.lossy", rule.removeprefix("lossy/")) if rule.startswith("lossy/") else ("accept", rule)
        made.setdefault((kind, name), []).append(figure(f"drafts of {drafter}:{knobs}", *given, command))
        if drafter not in ("draft-model", "opt-tree"):
            made.setdefault(("drafters", drafter), []).append(figure(f"{knobs}, rule {rule}", *given, command))
        print(rule, drafter, knobs, *given, flush=True)
        for (kind, name), figures in made.items():
            note(kind, name, figures)


def by_temperature(models: tuple[Any, Any, Any], tokens: int) -> None:
    """Rules on one chain by temperature and top-p."""
    headings = [f"{rule}: tokens a pass (drafts kept)" for rule, *_ in CHAINS]
    print(f"\n| temperature | top-p | {' | '.join(headings)} |\n|---|---|" + "---|" * len(CHAINS))
    for temperature in (0.3, 0.6, 0.9, 1.2, 1.5):
        for top_p in (1.0, 0.9):
            settings = {"temperature": temperature, "top_p": top_p}
            found = [measured(models, pair, settings, tokens, 10**9) for pair in CHAINS]
            cells = [f"{m['accepted']:.2f} ({m['kept']:.0%})" for m in found]
            print(f"| {temperature} | {top_p} | " + " | ".join(cells) + " |", flush=True)


def share(vocabulary: int = 150_000, nodes: int = 32, rounds: int = 20) -> None:
    """Time of a rule per pass, laws and walk included, over a tree of 32 nodes with a short accepted path."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, nodes, vocabulary, generator=g)
    laws = (logits[0] + 0.5 * torch.randn(nodes, vocabulary, generator=g)).softmax(-1)
    print(f"| rule | ms a pass ({vocabulary:,} tokens, {nodes} nodes) |\n|---|---|")
    for name in registry.names("accept"):
        rule: Any = registry.load("accept", name)
        accepted = rule.accepts_draws or {"distinct"}
        draws: Any = next(d for d in ("distinct", "independent", "last") if d in accepted)
        if name in ("block", "rejection"):
            draws = "one"
        took = []
        for turn in range(rounds):
            row = Row(0, [1], 1, 999)
            history = History(torch.tensor([[1]]), 999, 0, [row])
            tree = _tree(laws, draws, nodes, StreamNoise(1), row, greedy=rule.preferred_drafts != "law")
            table, chance = Laws(LogitsProcessorList(), history), StreamNoise(1)
            torch.manual_seed(turn)
            start = time.perf_counter()
            at_once = isinstance(rule, ArgmaxRule)
            scores, stops = Scores(logits, {}, [0]), Stops(LONG, history, table)
            tokens = rule.decide_all_nodes(scores, [row], [tree], table, chance) if at_once else None
            rule.verify(Verification([row], [tree], scores, table, stops, chance, 0, tokens))
            took.append(time.perf_counter() - start)
        print(f"| `{name}` | {1e3 * sorted(took)[len(took) // 2]:.1f} |")


def _tree(laws: Tensor, draws: Any, nodes: int, chance: Chance, row: Row, greedy: bool) -> DraftTree:
    """Four children a node, or a chain where one is drawn; those of the likeliest tokens where nothing is drawn."""
    tokens, parent, at = [1], [-1], 0
    siblings = 1 if draws == "one" else 4
    while len(tokens) < nodes:
        law = laws[at]
        if greedy:
            drawn = law.topk(siblings).indices.tolist()
        elif draws == "last":
            drawn = law.topk(siblings - 1).indices.tolist()
            drawn += chance.draw(law.index_fill(0, torch.tensor(drawn), 0.0), row)
        else:
            drawn = chance.draw(law, row, siblings, draws == "distinct")
        drawn = drawn[: nodes - len(tokens)]
        tokens += drawn
        parent += [at] * len(drawn)
        at += 1
    return DraftTree(
        tuple(tokens), tuple(parent), None if greedy else tuple(laws), draws="certain" if greedy else draws
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=150, help="per prompt")
    parser.add_argument("--every", type=int, default=10, help="nodes per optimum computed where that is expensive")
    parser.add_argument("--share", action="store_true", help="time of the rules, alone")
    parser.add_argument("--note", action="store_true", help="counts alone, written for the pages of the methods")
    arguments = parser.parse_args()
    if arguments.share:
        share()
    else:
        loaded = (*load("nano"), load("nano-draft")[0])
        if arguments.note:
            noted(loaded, arguments.tokens)
            sys.exit()
        compare_rules(loaded, arguments.tokens, arguments.every)
        by_temperature(loaded, arguments.tokens)
