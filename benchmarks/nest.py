"""NEST on the embedded model: tokens per pass, speed, share of copied tokens, and their cross-entropy under the model.

python benchmarks/nest.py                        # texts: the embedded stories
python benchmarks/nest.py FILE --texts 400       # the first paragraphs of a file
python benchmarks/nest.py FILE --texts 400 --apart   # openings of other paragraphs than those
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import truedraft
from truedraft import assets, registry
from truedraft.cli._models import load
from truedraft.stores.neighbours import Neighbours

STEPS, ROUNDS, OPENINGS, RUN = 100, 3, 8, 8


def repeated(tokens: list[int]) -> float:
    """Share of the runs of tokens that occur earlier in the same text."""
    runs = [tuple(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)]
    return 1 - len(set(runs)) / max(len(runs), 1)


def nats(model: torch.nn.Module, ids: torch.Tensor, start: int) -> float:
    """Mean cross-entropy, in nats, of the tokens from `start` on under the model at temperature 1."""
    with torch.no_grad():
        laws = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    return -float(laws.gather(1, ids[0, start:, None]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--apart", action="store_true")
    given = parser.parse_args()
    model, tokenizer = load("nano")
    texts = assets.prompt("stories.txt").strip().split("\n\n")
    if given.file:
        texts = [line for line in given.file.read_text().split("\n") if len(line) > 150]
    kept, others = texts[: given.texts], texts[given.texts :]
    openings = others if given.apart else kept
    words = 10 if given.file else 6
    prompts = [" ".join(t.split()[:words]) for t in openings[:: max(len(openings) // OPENINGS, 1)][:OPENINGS]]
    ids = [tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"] for prompt in prompts]
    began = time.perf_counter()
    documents = [(f"text {i}", tokenizer(t, add_special_tokens=False)["input_ids"]) for i, t in enumerate(kept)]
    store = Neighbours.built(model, documents)
    print(f"{len(store.keys)} states, read in {time.perf_counter() - began:.1f} s")
    state = store.keys[:1].clone()
    began = time.perf_counter()
    for _ in range(50):
        store.nearest(store.compared(state)[0], 1024)
    print(f"one search: {(time.perf_counter() - began) * 20:.2f} ms")

    ways = {
        f"{draft or 'none'}, {rule}": truedraft.accelerate(
            model,
            tokenizer,
            draft=draft and registry.load("drafters", draft, store=store),
            rule=rule if rule == "seeded" else registry.load("accept", rule, store=store),
        )
        for rule in ("seeded", "lossy/nest")
        for draft in (None, "nest")
    }
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, fast in ways.items():
            figures = []
            for seed, prompt in enumerate(ids):
                torch.manual_seed(seed)
                out = fast.generate(prompt, max_new_tokens=STEPS, do_sample=True, top_k=0, temperature=0.7)
                report, start = fast.report(), prompt.shape[1]
                copied = sum(a.end - a.start for a in report.attributions) / report.tokens
                figures.append((
                    report.mean_acceptance_length, 1 / report.tokens_per_second, copied,
                    repeated(out[0, start:].tolist()), nats(model, out, start),
                ))  # fmt: skip
            found[way].append(tuple(map(statistics.mean, zip(*figures, strict=True))))
    plain = statistics.median(seconds for _, seconds, *_ in found["none, seeded"])
    for way, rounds in found.items():
        length, seconds, copied, again, cost = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{way:18} {length:5.2f} tokens a pass, {plain / seconds:.2f}x, copied {copied:.0%}, repeated {again:.0%}, "
            f"{cost:.2f} nats"
        )


if __name__ == "__main__":
    main()
