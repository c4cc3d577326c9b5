"""Reflective verification: the target scores a drafted chain a second time, with the whole chain in its context.

"Think Before You Accept: Semantic Reflective Verification for Faster Speculative Decoding", 2025; built from its
abstract. After a drafted chain the same pass reads a short prompt and the chain once more; the target's laws there are
mixed with those at the chain, and the likeliest token of the mixture is emitted. Lossy; with `share` 0 it is `greedy`.
Meant for models that follow instructions; each pass is about twice as wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.accept._base import ProbingRule
from truedraft.accept._verification import TargetProbs, Verdict, first_children
from truedraft.accept.lossy._base import LossyRule
from truedraft.card import Card, knob
from truedraft.chance import Chance
from truedraft.errors import Refused
from truedraft.tree import DraftTree, PreferredDrafts, Row


@dataclass
class Reflective(LossyRule, ProbingRule):
    card = Card(
        paper="Think Before You Accept (2025)",
        idea="Score the draft a second time in the same pass, after a prompt to repeat it, and mix the two laws.",
        family="lossy",
        published="5 to 15 % faster than statistical verification, at similar task scores.",
        lacks={
            "reflective": "the draft is scored twice in one pass, as published; sampling is not here, and of a tree "
            "the first chain alone is accepted from",
        },
        also={
            "reflective-verification": "",
        },
    )
    samples: ClassVar[bool] = False
    preferred_drafts: ClassVar[PreferredDrafts] = "likeliest"
    share: float = knob(0.3, 0, 1)  # weight of the second law, 0 is exact; the paper's knob between quality and speed
    prompt: str = knob(" Read it again and repeat it: ")  # between the draft and its repetition; of one's own making

    def bind(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise Refused("rule='lossy/reflective' has a prompt of its own: give accelerate() the model's tokenizer")
        self._prompt: list[int] = tokenizer(self.prompt, add_special_tokens=False)["input_ids"]
        if not self._prompt:
            raise Refused(f"reflective:prompt={self.prompt!r} has no token in this tokenizer: give some text")

    def extra_probes(self, width: int) -> int:
        return width + len(self._prompt) if width else 0

    def add_probes(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        return [self._repeated(tree) for tree in trees]

    def _repeated(self, tree: DraftTree) -> DraftTree:
        """A draft with probes after its first chain: the prompt, and the chain once more."""
        chain = first_children(tree)
        if len(chain) == 1:
            return tree
        more = [*self._prompt, *(tree.tokens[node] for node in chain[1:-1])]
        return tree.with_probes(more, (chain[-1], *range(len(tree), len(tree) + len(more) - 1)))

    def accept(self, tree: DraftTree, probs: TargetProbs, row: Row, chance: Chance) -> Verdict:
        chain = first_children(tree)
        # node of the chain -> the probe with its second law: the prompt's last token, then each repeated token
        again = dict(zip(chain[:-1], range(len(tree) - (len(chain) - 1), len(tree)), strict=True))
        path = [0]
        while True:
            law = probs[path[-1]]
            if path[-1] in again:
                second = probs.logits[again[path[-1]]].float().softmax(-1).masked_fill(law == 0, 0.0)
                law = torch.lerp(law, second, self.share)
            best, token = law.max(-1)
            chosen = -1 if best.isnan() else int(token)
            if chosen in row.ends or (below := tree.child(path[-1], chosen)) is None:
                return path, chosen
            path.append(below)
