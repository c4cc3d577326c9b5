"""Prompts for training learned drafters of `nano`: beginnings of stories, plays and Python functions, and edits.

The texts are those that `tools/train_nano.py` trains on, without the documents that it holds out.

    python tools/head_prompts.py --stories FILE --plays FILE --count 6000 --out prompts.jsonl
    truedraft train eagle3 --target nano --data prompts.jsonl --out runs/eagle3
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from train_nano import Corpus, held_out, plays
from truedraft import assets
from truedraft.files import write_whole

SHARES = {"story": 0.5, "python": 0.25, "edit": 0.2, "play": 0.05}
WORDS = (3, 40)  # of the beginning of a text
LONGEST = 500  # tokens of an edit, prompt and answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--plays", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.edits = SHARES["edit"]
    tokenizer = AutoTokenizer.from_pretrained(assets.path("nano"))
    lines = [json.dumps({"prompt": prompt, "kind": kind}) for kind, prompt in prompts(args, tokenizer)]
    write_whole(args.out, "\n".join(lines) + "\n")


def prompts(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, str]]:
    """`args.count` prompts, each with its kind, in random order."""
    rng, corpus = random.Random(args.seed), Corpus(args, tokenizer)
    texts = {kind: corpus.snippets[kind][False] for kind in ("story", "python")}
    texts["play"] = [text for text in plays(args.plays) if not held_out(text)]
    for kind in rng.choices(list(SHARES), list(SHARES.values()), k=args.count):
        if kind == "edit":
            yield kind, tokenizer.decode(corpus.edit(rng, False, LONGEST)[0])
        else:
            yield kind, beginning(rng.choice(texts[kind]), rng)


def beginning(text: str, rng: random.Random) -> str:
    """The first words of a text, with the whitespace between them."""
    at = 0
    for word in text.split()[: rng.randint(*WORDS)]:
        at = text.index(word, at) + len(word)
    return text[:at]


if __name__ == "__main__":
    main()
