"""Certainty-forcing distillation of dParallel: a copy of a diffusion model learns to be certain of many positions at
once, on its own texts.

A text is read with one block noised: what is before it is known, what is behind it masked. Half of the block's
positions behind the prompt are masked at random, and in a second pass the other half, so that each is predicted once.
The loss is the cross-entropy with the model's own text, and a weight times the entropy at those masked positions whose
likeliest token is right: where it is wrong, certainty would be harm. The published training has low-rank adapters of
all projections (rank 128, learning rate 2e-5); here all weights are trained, by the training loop of the package.

Chen et al., "dParallel: Learnable Parallel Decoding for dLLMs", arXiv 2509.26488 (2025).
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from truedraft.accelerated import accelerate
from truedraft.canvas._base import CanvasRow
from truedraft.canvas.layout import Layout
from truedraft.canvas.reference import attended
from truedraft.card import knob
from truedraft.drafters._learned import Metrics
from truedraft.errors import Refused
from truedraft.files import read_lines, write_whole
from truedraft.runtime.forward import attention_mask
from truedraft.train.checkpoints import MODEL, write_state
from truedraft.train.loop import Plan, Run, fit

HELD_OUT = 16  # one text in this many is held out for validation
AT_ONCE = 8  # prompts that are continued together
LOG, TEXTS = "training.jsonl", "texts.jsonl"  # file names in the folder of a run

Text = tuple[int, list[int]]  # length of the prompt, and ids


@dataclass(frozen=True)
class Noised:
    """Texts with masks, b of them of up to n positions.

    ids: (b, n). known: (b, n) bool, whether a position is part of its text, for attention.
    rows, places, labels: (m,) the masked positions to predict, and their tokens.
    """

    ids: Tensor
    known: Tensor
    rows: Tensor
    places: Tensor
    labels: Tensor


@dataclass
class CertaintyForcing:
    """The training of `lossy/dparallel`."""

    checkpoint: ClassVar[str] = MODEL
    weight: float = knob(2.0, 0, 100)  # of the entropy in the loss (2)
    temperature: float = knob(0.5, 0.01, 10)  # of the law whose entropy it is (0.5)
    share: float = knob(0.5, 0.05, 0.95)  # of the block's positions that are masked first (0.5)
    texts: int = knob(8, 1, 1024)  # in a batch, each with both masks

    def train(
        self, model: Any, tokenizer: Any, layout: Layout, prompts: Sequence[Sequence[int]], new: int, out: Path,
        plan: Plan, state: dict[str, Any] | None, report: Callable[[str], None],
    ) -> str:  # fmt: skip
        """Train a copy, and write it as a model's folder, with the texts; see `canvases.Training`.

        Raises:
            Refused: the loss is not a number, or the model's forward takes no mask.
        """
        kept = out / TEXTS
        if state is None:
            texts = texts_of(model, layout, prompts, new, report)
            write_whole(kept, "".join(f"{json.dumps(text)}\n" for text in texts))
        texts = [(prompt, ids) for prompt, ids in map(json.loads, read_lines(kept))]
        module = copy.deepcopy(model).requires_grad_(True)
        held, learnt = texts[::HELD_OUT], [text for i, text in enumerate(texts) if i % HELD_OUT] or texts
        batches = self.batches(learnt, layout, plan.seed)
        checked = list(islice(self.batches(held, layout, plan.seed), 4))

        def save(run: Run) -> None:
            module.save_pretrained(out)
            if tokenizer is not None:
                tokenizer.save_pretrained(out)
            write_state(out, run.state())

        rest = islice(batches, state["steps"] if state else 0, None)
        fit(
            module, lambda batch: self.loss(module, layout, batch), rest, plan,
            validate=lambda: self.figures(module, layout, checked), save=save, log=out / LOG, state=state,
            report=report,
        )  # fmt: skip
        return f"{out}: a model of its own, for --rule lossy/dparallel"

    def batches(self, texts: Sequence[Text], layout: Layout, seed: int) -> Iterator[Noised]:
        """Endless batches of texts, drawn with replacement, each noised twice."""
        rng = random.Random(seed)
        while True:
            pairs = [self.noised(*rng.choice(texts), layout, rng) for _ in range(self.texts)]
            yield stacked([one for pair in pairs for one in pair], layout.mask)

    def noised(self, prompt: int, ids: Sequence[int], layout: Layout, rng: random.Random) -> list[Any]:
        """A text with a random block of those behind the prompt noised, and with the other half of it masked: each the
        ids with masks, and the masked positions with their tokens."""
        blocks = layout.blocks(prompt, len(ids) - prompt)
        block = rng.choice(blocks)
        inside = [i for i in block if prompt <= i < len(ids)]
        length = blocks[-1].stop if layout.attention == "whole" else block.stop
        first = {i for i in inside if rng.random() < self.share}
        found = []
        for masked in (first, set(inside) - first):
            shown = [layout.mask if i >= block.stop or i >= len(ids) or i in masked else ids[i] for i in range(length)]
            found.append((shown, [(i, ids[i]) for i in sorted(masked)]))
        return found

    def loss(self, model: Any, layout: Layout, batch: Noised) -> Tensor:
        logits = logits_of(model, layout, batch)
        right = logits.argmax(-1) == batch.labels
        law = torch.softmax(logits / self.temperature, -1)
        entropy = torch.special.entr(law).sum(-1)[right]
        certain = entropy.mean() if len(entropy) else logits.new_zeros(())
        return cross_entropy(logits, batch.labels) + self.weight * certain

    def figures(self, model: Any, layout: Layout, batches: Sequence[Noised]) -> Metrics:
        """Cross-entropy, accuracy, and the mean entropy in nats, on texts that are held out."""
        logits = torch.cat([logits_of(model, layout, batch) for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        nats = torch.special.entr(torch.softmax(logits, -1)).sum(-1).mean()
        return {
            "cross_entropy": round(cross_entropy(logits, labels).item(), 4),
            "accuracy": round((logits.argmax(-1) == labels).float().mean().item(), 4),
            "entropy": round(nats.item(), 4),
        }


def texts_of(
    model: Any, layout: Layout, prompts: Sequence[Sequence[int]], new: int, report: Callable[[str], None]
) -> list[Text]:
    """What the model writes step by step behind prompts.

    Raises:
        Refused: its forward takes no mask, or it writes nothing.
    """
    fast: Any = accelerate(model, layout=layout)
    if getattr(fast.target, "unmasked", False):
        raise Refused(f"--target: the forward of {type(model).__name__} takes no mask, which this training needs")
    texts = list[Text]()
    for start in range(0, len(prompts), AT_ONCE):
        some = prompts[start : start + AT_ONCE]
        longest = max(map(len, some))
        inputs = torch.tensor([[0] * (longest - len(one)) + list(one) for one in some])
        seen = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in some])
        rows = list[CanvasRow]()
        fast.generate(
            inputs.to(model.device), attention_mask=seen, max_new_tokens=new, do_sample=False, on_canvas=rows.extend
        )
        texts += [(len(one), [*one, *row.text]) for one, row in zip(some, rows[-len(some) :], strict=True)]
        report(f"{len(texts)} of {len(prompts)} texts")
    if not (texts := [(prompt, ids) for prompt, ids in texts if len(ids) > prompt]):
        raise Refused("--data: the model writes nothing behind these prompts: give others")
    return texts


def stacked(noised: Sequence[tuple[list[int], list[tuple[int, int]]]], mask: int) -> Noised:
    """Noised texts as a batch, filled up at the right."""
    longest = max(len(ids) for ids, _ in noised)
    ids = torch.tensor([ids + [mask] * (longest - len(ids)) for ids, _ in noised])
    known = torch.tensor([[True] * len(ids) + [False] * (longest - len(ids)) for ids, _ in noised])
    found = [(row, place, token) for row, (_, masked) in enumerate(noised) for place, token in masked]
    rows, places, labels = torch.tensor(found).reshape(-1, 3).unbind(-1)
    return Noised(ids, known, rows, places, labels)


def logits_of(model: Any, layout: Layout, batch: Noised) -> Tensor:
    """(m, V) fp32 at the masked positions."""
    device = model.get_input_embeddings().weight.device
    seen = attended(batch.ids.shape[1], layout) & batch.known[:, None]
    mask = attention_mask(model, seen[:, None].to(device))
    logits = model(batch.ids.to(device), attention_mask=mask, use_cache=False).logits
    return logits[batch.rows, (batch.places - int(layout.shifted)).clamp_min(0)].float().cpu()
