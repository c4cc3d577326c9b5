"""Lines for training learned drafters of `nano`: beginnings of stories, plays and Python functions, and edits, with
the responses of `nano`, every second batch of them greedy and the others sampled at 0.8.

The texts are those that `tools/train_nano.py` trains on, without the documents that it holds out.

    python tools/head_prompts.py --stories FILE --plays FILE --count 18000 --out lines.jsonl
    truedraft train eagle3:layers=2x4x6,vocabulary=2048 --target nano --data lines.jsonl --labels given --out RUN
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from train_nano import Corpus, held_out, plays
from truedraft import accelerate, assets
from truedraft.files import write_whole
from truedraft.loading import load

SHARES = {"story": 0.5, "python": 0.25, "edit": 0.2, "play": 0.05}
WORDS = (3, 40)  # of the beginning of a text
LONGEST = 500  # tokens of an edit, prompt and answer
ROWS, RESPONSE, TEMPERATURE = 64, 200, 0.8  # prompts of a batch; tokens of a response; of every second batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--plays", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--kinds", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.edits = SHARES["edit"]
    tokenizer = AutoTokenizer.from_pretrained(assets.path("nano"))
    lines = [json.dumps(line) for line in responded([prompt for _, prompt in prompts(args, tokenizer)], args.seed)]
    write_whole(args.out, "\n".join(lines) + "\n")


def prompts(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, str]]:
    """`args.count` prompts of `args.kinds`, each with its kind, in random order."""
    rng, corpus = random.Random(args.seed), Corpus(args, tokenizer)
    texts = {kind: corpus.snippets[kind][False] for kind in ("story", "python")}
    texts["play"] = [text for text in plays(args.plays) if not held_out(text)]
    for kind in rng.choices(args.kinds, [SHARES[kind] for kind in args.kinds], k=args.count):
        if kind == "edit":
            yield kind, tokenizer.decode(corpus.edit(rng, False, LONGEST)[0])
        else:
            yield kind, beginning(rng.choice(texts[kind]), rng)


def responded(texts: list[str], seed: int) -> Iterator[dict[str, str]]:
    """Prompts with responses, those left out whose ids the texts do not give."""
    model, tokenizer = load("nano")
    fast = accelerate(model, tokenizer, draft=None)
    texts = sorted(texts, key=len)
    for number, first in enumerate(range(0, len(texts), ROWS)):
        inputs = tokenizer(texts[first : first + ROWS], return_tensors="pt", padding=True)
        sampling = dict(temperature=TEMPERATURE, top_k=0) if number % 2 else {}
        out = fast.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=RESPONSE,
            do_sample=bool(sampling), seed=seed + number, **sampling,
        )  # fmt: skip
        end = model.generation_config.eos_token_id
        for prompt, ids in zip(
            texts[first : first + ROWS], out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True
        ):
            response = tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)
            again = tokenizer(response, add_special_tokens=False)["input_ids"]
            if again and again == ids[: len(again)]:
                yield {"prompt": prompt, "response": response}
        print(f"{min(first + ROWS, len(texts)):,} of {len(texts):,} prompts", flush=True)


def beginning(text: str, rng: random.Random) -> str:
    """The first words of a text, with the whitespace between them."""
    at = 0
    for word in text.split()[: rng.randint(*WORDS)]:
        at = text.index(word, at) + len(word)
    return text[:at]


if __name__ == "__main__":
    main()
