"""Measures views of a target on texts, for calibrations (`views/_calibrated.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import PreTrainedModel

from truedraft.accelerated import accelerate
from truedraft.drafters.self_._drafter import SelfDrafter
from truedraft.errors import Refused
from truedraft.targets.hosting import hosted
from truedraft.tree import DraftTree, Prompt, Scores, Taps
from truedraft.views._base import Reduction, View
from truedraft.views._layers import Without

LONGEST = 256  # tokens of a text that the loss is computed over
PROMPT, NEW = 128, 32  # tokens of a text that a draft continues at most, and of its continuation; published 32
DEPTH = 8  # of the drafts; published 8
BEHIND = 0.5  # of a goodput of interest, by which the first text is below it where no other is drafted; 1/sqrt(n) of n


@dataclass
class TextEvaluator:
    """An `Evaluator` of one target.

    Args:
        model: the target.
        texts: token ids of texts.
        prompts: of the texts, for `states`; those that do not fit the model's context are left out.
        subjects: by name, the same on texts of one subject each.

    Raises:
        Refused: the model cannot be hosted, or no text has two tokens.
    """

    model: PreTrainedModel
    texts: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]] = ()
    subjects: Mapping[str, TextEvaluator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target = hosted(self.model)
        self.texts = [list(text[:LONGEST]) for text in self.texts if len(text) > 1]
        self.prompts = [prompt for prompt in self.prompts if len(prompt)]
        if not self.texts:
            raise Refused("--data: the calibration needs texts of at least two tokens, and has none: give longer lines")
        room = self.target.context or inf
        self._long = any(len(prompt) > room for prompt in self.prompts)
        self.prompts = [prompt for prompt in self.prompts if len(prompt) <= room]

    @property
    def layers(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    def loss(self, view: View) -> float:
        total = 0.0
        for text in self.texts:
            after = torch.tensor(text[1:], device=self.target.device)
            total += float(cross_entropy(self._logits(text, view), after, reduction="sum"))
        return total / self._predicted

    @torch.no_grad()
    def states(self) -> Iterator[Tensor]:
        target, last = self.target, Taps((-1,))
        if not self.prompts and not self._long:
            raise Refused("--data: the calibration reads the ends of prompts, and none has a token: give other lines")
        target.check_taps(last)
        for prompt in self.prompts:
            with target.temporary_cache(1, len(prompt) + 1):
                target.taps = last
                scores = target.prefill([Prompt(torch.tensor(prompt, device=target.device))])
                target.taps = Taps()
                yield scores.features(0, (0,), last.hidden)[-1].float().cpu()

    @torch.no_grad()
    def similarities(self) -> Iterator[Tensor]:
        for layer in range(self.layers):
            later = frozenset(range(layer + 1, self.layers))
            before = self._hidden(layer + 1, Without(Reduction(later, later | {layer})))
            after = self._hidden(layer + 1, Without(Reduction(later, later)))
            yield cosine_similarity(before, after, -1)

    def _hidden(self, layer: int, view: View) -> Tensor:
        """(tokens, H) fp32 hidden states of a layer, numbered as in `Taps`, at the tokens of the texts."""
        tap = Taps((layer,))
        self.target.check_taps(tap)
        states = [self._scored(text, view.tapping(tap)).hidden[layer][0] for text in self.texts]
        return torch.cat(states).float().cpu()

    def agreement(self, view: View) -> float:
        """The share of tokens whose likeliest successor, behind the text before, is that of the whole model."""
        whole = View()
        equal = [self._logits(text, view).argmax(-1) == self._logits(text, whole).argmax(-1) for text in self.texts]
        return sum(int(some.sum()) for some in equal) / self._predicted

    @property
    def _predicted(self) -> int:
        return sum(len(text) - 1 for text in self.texts)

    @torch.no_grad()
    def _logits(self, text: Sequence[int], view: View) -> Tensor:
        """(n - 1, V) logits at a text's tokens but the last, by the target run under the view alone."""
        return self._scored(text, view).logits[0].float()

    def _scored(self, text: Sequence[int], view: View) -> Scores:
        target = self.target
        with target.temporary_cache(1, len(text) + 1):
            target.prefill([Prompt(torch.tensor(text[:1], device=target.device))])
            return target.score([DraftTree.chain(text[0], text[1:-1])], view)

    def goodput(self, view: View, least: float = 0.0) -> float:
        fast = accelerate(self.model, draft=SelfDrafter(view, nodes=DEPTH, depth=DEPTH, top_k=1), control="fixed")
        emitted, read, share = 0, 0.0, self.target.share(view)
        settings: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False, stop_strings=None)
        for number, text in enumerate(self.texts, 1):
            prompt = torch.tensor([text[:PROMPT]], device=self.target.device)
            fast.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
            report = fast.report()
            emitted += report.tokens
            read += report.row_passes + share * sum(e.offered for p in report.passes for e in p.emitted)
            if emitted / read < least * (1 - BEHIND / number**0.5):
                break
        return emitted / read
