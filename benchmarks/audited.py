"""A long audit on real checkpoints: every drafted token against the model's own forward, and against plain decoding.

    python benchmarks/audited.py MODEL --prompts FILE [--tokens 100000] [--dtype float32] [--json FILE]

FILE has a JSON object per line, with `turns` (as Spec-Bench has them) or `prompt`; requests are in the model's chat
template. Batches of rows of different lengths are generated, each by another drafter, in turns greedily, greedily with
a repetition penalty, and sampled. A text is checked in two ways:

- greedy, without a penalty: one forward of `transformers` over prompt and text, which knows nothing of drafts or of
  compiled passes. A token that is not its likeliest is a near-tie where both scores are closer than twice the noise
  (the largest difference between the logits of that forward and those of the passes of the engine on a sample, as the
  engine measures it when it hosts a model), and unexplained otherwise.
- every way, a row of each batch: the text of the same request without drafts and alone. The compiled pass has the same
  bits at every width, so that any difference is unexplained; where a model runs by another pass, it is counted.

A run ends at a number of tokens, and writes what it found after every batch.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.text.templates import request_text

DRAFTERS = ("auto", "prompt-lookup", "suffix", "token-recycling", "int8-self", "skip-layers", "swift", "sam", "auto")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, repetition penalty 1.2": {"do_sample": False, "repetition_penalty": 1.2},
    "sampled, temperature 0.8, top-p 0.9": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
}
BATCHES = (1, 2, 4)


def prompts_of(path: Path) -> list[str]:
    """The requests of a file, first turns alone."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]


class Audit:
    """A model, and what was found of it."""

    def __init__(self, name: str, dtype: str, new: int):
        self.model, self.tokenizer = load(name, dtype)
        self.new, self.found, self.examples = new, Counter[str](), list[dict[str, Any]]()
        self.fast = {drafter: self._accelerated(drafter) for drafter in dict.fromkeys(DRAFTERS)}
        self.plain = truedraft.accelerate(self.model, self.tokenizer, draft=None)
        self.noise = self.plain.target.noise

    def _accelerated(self, drafter: str) -> truedraft.Accelerated | None:
        """None where the model is refused, which is counted."""
        try:
            return truedraft.accelerate(self.model, self.tokenizer, draft=drafter)
        except truedraft.Refused as refused:
            self.found[f"refused: {drafter}"] += 1
            print(drafter, refused, flush=True)
            return None

    def encoded(self, texts: Sequence[str]) -> Any:
        asked = [request_text(self.tokenizer, text) for text in texts]
        return self.tokenizer(asked, return_tensors="pt", padding=True, return_token_type_ids=False)

    def batch(self, texts: Sequence[str], drafter: str, way: str, seed: int) -> int:
        """Generate and check a batch; returns the number of its tokens."""
        if (fast := self.fast[drafter]) is None:
            return 0
        given = dict(max_new_tokens=self.new, pad_token_id=self.tokenizer.pad_token_id, **WAYS[way])
        if WAYS[way]["do_sample"]:
            given["seed"] = [seed + i for i in range(len(texts))]
        inputs, emitted = self.encoded(texts), 0
        whole, alone = fast.generate(**inputs, **given), seed % len(texts)
        for i, mask in enumerate(inputs["attention_mask"].bool()):
            prompt = inputs["input_ids"][i][mask]
            text = self._ended(whole[i, len(mask) :].tolist())
            emitted += len(text)
            self.found[f"tokens: {way}"] += len(text)
            self.found[f"tokens of {drafter}"] += len(text)
            if way == "greedy":
                self._against_forward(prompt, text, drafter, i)
            if i == alone:
                own = given | ({"seed": seed + i} if "seed" in given else {})
                self._against_plain(prompt, text, own, {"drafter": drafter, "way": way, "prompt": texts[i]})
        return emitted

    def _against_plain(self, prompt: torch.Tensor, text: list[int], given: dict[str, Any], about: Any) -> None:
        plain = self.plain.generate(input_ids=prompt[None], attention_mask=torch.ones(1, len(prompt)), **given)
        self.found["tokens compared with plain decoding"] += len(text)
        if self._ended(plain[0, len(prompt) :].tolist()) != text:
            self.found["texts other than plain decoding"] += 1
            self.examples.append(about)

    def _ended(self, text: list[int]) -> list[int]:
        """A text up to its end, without padding."""
        ends = self.plain.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return next((text[: i + 1] for i, token in enumerate(text) if token in ends), text)

    @torch.no_grad()
    def _against_forward(self, prompt: torch.Tensor, text: list[int], drafter: str, row: int) -> None:
        ids = torch.cat([prompt, torch.tensor(text)])[None]
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float()
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        self.found["tokens compared with the forward"] += len(text)
        for place, gap in enumerate(gaps.tolist()):
            if gap > 0:
                kind = "near-ties" if gap <= 2 * self.noise else "unexplained"
                self.found[f"{kind} against the forward"] += 1
                if kind == "unexplained":
                    self.examples.append({"drafter": drafter, "row": row, "place": place, "gap": gap})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--new", type=int, default=96, help="tokens of an answer at most")
    parser.add_argument("--name", help="of the model in the result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    audit, rng = Audit(args.model, args.dtype, args.new), random.Random(args.seed)
    texts, done, began, turn = prompts_of(args.prompts), 0, time.time(), 0
    while done < args.tokens:
        drafter, way = DRAFTERS[turn % len(DRAFTERS)], list(WAYS)[turn % len(WAYS)]
        some = rng.sample(texts, BATCHES[turn % len(BATCHES)])
        done += audit.batch(some, drafter, way, args.seed + 100 * turn)
        turn += 1
        result = {
            "model": args.name or Path(args.model).name, "dtype": str(audit.model.dtype), "noise": audit.noise,
            "machine": machine(), "seconds": round(time.time() - began), "tokens": done, "batches": turn,
            "found": dict(sorted(audit.found.items())), "examples": audit.examples[:20],
        }  # fmt: skip
        if args.json:
            write_whole(args.json, json.dumps(result, indent=1) + "\n")
        if turn % 10 == 0:
            print(f"{done:,} tokens, {result['seconds']} s", flush=True)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
