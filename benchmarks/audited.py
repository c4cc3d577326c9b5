"""A long audit on real checkpoints: every drafted token against the model's own forward, and against plain decoding.

    python benchmarks/audited.py MODEL --prompts FILE ... [--tokens 100000] [--dtype float32] [--json FILE]

The files have a JSON object per line, with `turns` (as Spec-Bench has them), `prompt` or `content`; requests are in the
model's chat template. Batches of rows of different lengths are generated, each by a drafter, in a way and of a size
that are drawn anew: every drafter that needs nothing but the model, and those of `--also`. A text is checked twice:

- Against one forward of `transformers` over prompt and text, which knows nothing of drafts or of compiled passes:
  greedy tokens have to be the likeliest, with the logits processors of `transformers` where there are any, and
  sampled ones those that `torch.multinomial` draws after the same `torch.manual_seed`. Another token is a near-tie
  where the scores differ by no more than rounding can move them, by twice the noise (the largest difference between
  the logits of that forward and those of the engine's passes, as measured when a model is hosted), else unexplained.
- Against the same call without drafts. The compiled pass has the same bits at every width, so that any difference is
  unexplained.

In float32, where the first is the sharper one, every batch is compared with a forward and every fourth with plain
decoding; in other precisions it is the other way round.

A run ends at a number of tokens, writes what it found after every batch, and goes on where that of the same model in
the file of results ended.
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
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import truedraft
from truedraft import registry
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.text.templates import request_text

PENALTY, TEMPERATURE, TOP_P = 1.2, 0.8, 0.9
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, repetition penalty": {"do_sample": False, "repetition_penalty": PENALTY},
    "sampled": {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0},
    "sampled, temperature, top-p": {"do_sample": True, "top_k": 0, "top_p": TOP_P, "temperature": TEMPERATURE},
}
BATCHES = (1, 2, 4, 8, 16, 24, 48, 96)
WEIGHTS = (4, 2, 2, 1)  # by which ways are drawn: a nucleus costs a sort of the vocabulary for each token
SELDOM = 4  # of so many batches one is checked in the less sharp way


def processors(way: str, top_p: float = TOP_P) -> LogitsProcessorList:
    """What `model.generate` does to logits."""
    made: list[LogitsProcessor] = []
    if way == "greedy, repetition penalty":
        made.append(RepetitionPenaltyLogitsProcessor(PENALTY))
    if way == "sampled, temperature, top-p":
        made += [TemperatureLogitsWarper(TEMPERATURE), TopPLogitsWarper(top_p)]
    return LogitsProcessorList(made)


def prompts_of(path: Path) -> list[str]:
    """The requests of a file, first turns alone; a file that has no objects of JSON has a request per line."""
    if path.suffix != ".jsonl":
        return path.read_text("utf-8").splitlines()
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [line["turns"][0] if "turns" in line else line.get("prompt") or line["content"] for line in lines]


class Audit:
    """A model, and what was found of it."""

    def __init__(self, name: str, dtype: str, quantize: str | None, drafters: Sequence[str], new: int):
        self.model, self.tokenizer = load(name, dtype, quantize)
        self.new, self.found, self.examples = new, Counter[str](), list[dict[str, Any]]()
        self.plain = truedraft.accelerate(self.model, self.tokenizer, draft=None)
        self.noise, self.largest = self.plain.target.noise, 0.0  # the largest gap of a near-tie
        self._fast: dict[str, truedraft.Accelerated] = {}
        self._drafters = list(drafters)  # those that may be made: some need more than the model

    def drafter(self, rng: random.Random) -> str:
        """One drawn of those that this model can have."""
        while True:
            name = rng.choice(self._drafters)
            try:
                if name not in self._fast:
                    self._fast[name] = truedraft.accelerate(self.model, self.tokenizer, draft=name)
                return name
            except truedraft.Refused:
                self._drafters.remove(name)

    def batch(self, texts: Sequence[str], drafter: str, way: str, seed: int) -> int:
        """Generate and check a batch; returns the number of its tokens."""
        asked = [request_text(self.tokenizer, text) for text in texts]
        inputs = self.tokenizer(asked, return_tensors="pt", padding=True, return_token_type_ids=False)
        width = inputs["input_ids"].shape[1]
        whole = self._generated(self._fast[drafter], inputs, way, seed)
        prompts = [ids[mask] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)]
        answers = [self._ended(row[width:].tolist()) for row in whole]
        emitted = sum(map(len, answers))
        for kind in (way, drafter, f"batches of {len(texts)}"):
            self.found[f"tokens: {kind}"] += emitted
        about = {"drafter": drafter, "way": way, "seed": seed, "prompts": [text[:80] for text in texts]}
        single = self.model.dtype == torch.float32
        if single or seed % SELDOM == 0:
            self._against_forward(prompts, answers, way, seed, about)
        if not single or seed % SELDOM == 0:
            self.found["tokens compared with plain decoding"] += emitted
            if not torch.equal(whole, self._generated(self.plain, inputs, way, seed)):
                self.found["batches other than plain decoding"] += 1
                self.examples.append(about)
        return emitted

    def _generated(self, fast: truedraft.Accelerated, inputs: Any, way: str, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return fast.generate(**inputs, **WAYS[way], max_new_tokens=self.new, pad_token_id=self.tokenizer.pad_token_id)

    def _ended(self, text: list[int]) -> list[int]:
        """A text up to its end, without padding."""
        ends = self.plain.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return next((text[: i + 1] for i, token in enumerate(text) if token in ends), text)

    @torch.no_grad()
    def _against_forward(
        self, prompts: Sequence[Tensor], answers: Sequence[list[int]], way: str, seed: int, about: dict[str, Any]
    ) -> None:
        """Compare answers with what `model.generate` would choose after each of their tokens, by one forward each."""
        ids = [torch.cat([prompt, torch.tensor(text)]) for prompt, text in zip(prompts, answers, strict=True)]
        logits = [
            self.model(one[None]).logits[0, len(prompt) - 1 : -1].float()
            for one, prompt in zip(ids, prompts, strict=True)
        ]
        torch.manual_seed(seed)
        for step in range(max(map(len, answers))):
            noise = torch.empty(len(ids), logits[0].shape[1]).exponential_(1) if way.startswith("sampled") else None
            for row, text in enumerate(answers):
                if step < len(text):
                    prefix = ids[row][: len(prompts[row]) + step]
                    drawn = None if noise is None else noise[row]
                    kind = self._checked(way, prefix, logits[row][step], drawn, text[step])
                    self.found[f"{kind} against the forward"] += 1
                    if kind == "unexplained":
                        self.examples.append({**about, "row": row, "step": step, "token": text[step]})

    def _checked(self, way: str, prefix: Tensor, logits: Tensor, noise: Tensor | None, token: int) -> str:
        """How a token is related to the one that `model.generate` chooses by these logits: "equal", "near-ties" or
        "unexplained".

        noise: (V,) of `torch.multinomial`, which draws the argmax of probabilities over exponential noise.
        """
        bound = 2 * self.noise * (PENALTY if "penalty" in way else 1 / TEMPERATURE if "temperature" in way else 1)
        scores = processors(way)(prefix[None], logits[None])[0]
        keys = scores if noise is None else scores.log_softmax(-1) - noise.log()
        if keys.max() <= keys[token]:
            return "equal"
        if "top-p" in way:  # of the mass of a nucleus, rounding may move as much as of a score
            keys = self._in_nucleus(processors(way, 1.0)(prefix[None], logits[None])[0].softmax(-1), token, bound)
            keys = keys.log() - noise.log() if noise is not None else keys
        gap = float(keys.max() - keys[token])
        if not gap <= bound:
            return "unexplained"
        self.largest = max(self.largest, gap)
        return "near-ties"

    @staticmethod
    def _in_nucleus(law: Tensor, token: int, moved: float) -> Tensor:
        """Probabilities (V,) of the tokens in the smallest nucleus with the token that is possible, 0 for others; with
        none where the token is in no possible nucleus.

        moved: the mass by which a nucleus may be larger or smaller.
        """
        order = law.argsort(descending=True)
        before = torch.empty_like(law)
        before[order] = law[order].cumsum(-1) - law[order]  # the mass of likelier tokens
        if before[token] >= TOP_P + moved:
            return torch.zeros_like(law)
        inside = before <= torch.clamp(before[token], min=TOP_P - moved)
        return law * inside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize")
    parser.add_argument("--also", nargs="*", default=[], help="drafters that need more than the model")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--longest", type=int, help="characters of a request; longer ones are left out")
    parser.add_argument("--new", type=int, default=192, help="tokens of an answer at most")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="rows, of which a number is drawn")
    parser.add_argument("--name", help="of the model in the result")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    registered = ["auto", *registry.names("drafters"), *registry.names("views"), *args.also]
    audit = Audit(args.model, args.dtype, args.quantize, registered, args.new)
    texts = [text for path in args.prompts for text in prompts_of(path) if len(text) <= (args.longest or len(text))]
    weights = args.quantize or ("GGUF" if str(args.model).endswith(".gguf") else "of the dtype")
    run = {"model": args.name or Path(args.model).name, "dtype": str(audit.model.dtype), "weights": weights}
    runs = json.loads(args.json.read_text("utf-8"))["runs"] if args.json.exists() else []
    before = next((one for one in runs if one.items() >= run.items()), {})
    others = [one for one in runs if one is not before]
    audit.found.update(before.get("found", {}))
    audit.examples += before.get("examples", [])
    audit.largest = before.get("largest_gap", 0.0)
    turn, done, seconds = (before.get(name, 0) for name in ("batches", "tokens", "seconds"))
    began = time.time()
    while done < args.tokens:
        rng = random.Random(turn)
        drafter, (way,) = audit.drafter(rng), rng.choices(list(WAYS), WEIGHTS)
        done += audit.batch(rng.sample(texts, rng.choice(args.batches)), drafter, way, turn)
        turn += 1
        result = run | {
            "noise": audit.noise, "largest_gap": audit.largest, "machine": machine(),
            "seconds": round(seconds + time.time() - began), "tokens": done, "batches": turn,
            "found": dict(sorted(audit.found.items())), "examples": audit.examples[:20],
        }  # fmt: skip
        write_whole(args.json, json.dumps({"runs": [*others, result]}, indent=1) + "\n")
        if turn % 10 == 0:
            print(f"{done:,} tokens, {result['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
