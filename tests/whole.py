"""Plain forwards over whole texts, by the methods of a target: for models whose own forward continues from no state."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft import DraftTree
from truedraft.tree import Prompt, Taps


class Whole:
    """Chains behind prompts, each read from the first token on."""

    fallback_reason = None

    def __init__(self, model: PreTrainedModel):
        self.model, self.taps = model, Taps()

    def reserve(self, rows: int, capacity: int) -> None:
        self.texts: list[list[int]] = []

    def prefill(self, prompts: Sequence[Prompt]) -> Any:
        ids = [prompt.ids.tolist() for prompt in prompts if prompt.ids is not None]
        self.texts, self.drafts = [text[:-1] for text in ids], [text[-1:] for text in ids]
        read = [self._read(text) for text in ids]
        return self._scores([logits[-1:] for logits, _ in read], [hidden for _, hidden in read])

    def score(self, trees: Sequence[DraftTree]) -> Any:
        self.drafts = [list(tree.tokens) for tree in trees]
        read = [self._read(text + draft) for text, draft in zip(self.texts, self.drafts, strict=True)]
        sizes = [len(tree) for tree in trees]
        rows = [logits[-n:] for (logits, _), n in zip(read, sizes, strict=True)]
        hidden = [{k: v[-n:] for k, v in own.items()} for (_, own), n in zip(read, sizes, strict=True)]
        return self._scores(rows, hidden)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for text, draft, path in zip(self.texts, self.drafts, paths, strict=True):
            text += [draft[node] for node in path]

    @torch.no_grad()
    def _read(self, text: list[int]) -> tuple[Tensor, dict[int, Tensor]]:
        out = self.model(torch.tensor([text]), use_cache=False, output_hidden_states=bool(self.taps.hidden))
        return out.logits[0], {layer: out.hidden_states[layer][0] for layer in self.taps.hidden}

    def _scores(self, rows: list[Tensor], hidden: list[dict[int, Tensor]]) -> Any:
        logits = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return SimpleNamespace(logits=logits, hidden={k: [own[k] for own in hidden] for k in self.taps.hidden})
