"""Real checkpoints on real story openings: equal to `model.generate`, token for token, in fp32.

All hundred prompts with every drafter are slow; every run has a sample of both. Divergences are listed with the gap
between the two likeliest tokens at the first one, since ties may resolve differently at another width.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import truedraft
from nets import drafter
from truedraft import registry
from truedraft.audit.tokens import noise_of

CHECKPOINTS = ["stories260K", "bitllama_3M", "babyllama_tok105"]
DRAFTERS = [n for n in registry.names("drafters") if "decoder" not in registry.method("drafters", n).card.cannot]


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def small_for(checkpoint: str, weights: Path) -> PreTrainedModel | None:
    """The draft model: stories260K has the vocabulary of bitllama_3M; None gives the others a sibling."""
    return load(weights / "stories260K")[0] if checkpoint == "bitllama_3M" else None


def divergences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    rows: int,
    drafts: list[str],
    sample: bool,
    small: PreTrainedModel | None = None,
    new: int = 128,
) -> dict[str, float]:
    """Every row that differs from plain generate -> the gap between the two best tokens where it first does."""
    sides = {
        draft: truedraft.accelerate(model, tokenizer, draft=drafter(draft, model, small=small), control="fixed")
        for draft in drafts
    }
    found = {}
    for start in range(0, len(texts), rows):
        inputs = tokenizer(texts[start : start + rows], return_tensors="pt", padding=True, return_token_type_ids=False)
        torch.manual_seed(start)
        expected = model.generate(**inputs, max_new_tokens=new, do_sample=sample)
        for draft, fast in sides.items():
            torch.manual_seed(start)
            got = fast.generate(**inputs, max_new_tokens=new, do_sample=sample)
            for b in range(len(got)):
                if not torch.equal(got[b], expected[b]):
                    at = int((got[b] != expected[b]).nonzero()[0])
                    pad = int((inputs["attention_mask"][b] == 0).sum())
                    step = at - inputs["input_ids"].shape[1]
                    noise = noise_of(start, step, len(got), model.config.vocab_size)[b] if sample else None
                    found[f"{draft}, prompt {start + b}, step {step}"] = gap(model, expected[b : b + 1, pad:at], noise)
    return found


@torch.no_grad()
def gap(model: PreTrainedModel, prefix: torch.Tensor, noise: torch.Tensor | None) -> float:
    """Between the two best of log p, or of log p - log noise where the token is sampled among the 50 likeliest."""
    scores = model(prefix).logits[0, -1].double()
    if noise is not None:
        scores = torch.where(scores >= scores.topk(50).values[-1], scores - noise.double().log(), -torch.inf)
    best = scores.topk(2).values
    return float(best[0] - best[1])


TIE = 1e-4  # fp32 logits of these models differ by up to about 2e-5 between widths


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_sample_of_prompts(checkpoint: str, sample: bool, weights: Path, stories: list[str]) -> None:
    """Each drafter on one checkpoint, greedily or sampled."""
    model, tokenizer = load(weights / checkpoint)
    drafts = DRAFTERS[2 * CHECKPOINTS.index(checkpoint) + sample :: 2 * len(CHECKPOINTS)]
    found = divergences(model, tokenizer, stories[:3], 3, drafts, sample, small_for(checkpoint, weights), new=40)
    assert all(g < TIE for g in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_hundred_prompts(checkpoint: str, rows: int, sample: bool, weights: Path, stories: list[str]) -> None:
    model, tokenizer = load(weights / checkpoint)
    found = divergences(model, tokenizer, stories, rows, DRAFTERS, sample, small_for(checkpoint, weights))
    print(f"\n{checkpoint}, {rows} rows, {'seeded' if sample else 'greedy'}: {found or 'all equal'}")
    assert all(g < TIE for g in found.values()), found
