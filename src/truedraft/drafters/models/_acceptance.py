"""The head of SpecDec++ (`specdec_pp.py`), which estimates whether drafted tokens are accepted, and its training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, logsigmoid, silu
from transformers import PreTrainedModel

from truedraft.card import knob, shown
from truedraft.drafters._learned import Batch, Learner, Metrics, read_weights
from truedraft.drafters.models._reader import loaded
from truedraft.errors import Refused
from truedraft.identity import Identity
from truedraft.runtime.identity import identity_of
from truedraft.runtime.tapping import LayerTaps
from truedraft.targets.kinds import family_of
from truedraft.tree import Taps

CANNOT = {"encoder-decoder": "its head is trained on hidden states of a decoder language model"}
LAST = Taps((-1,))  # the layer that the head reads
STEP, LONGEST = 0.1, 20  # of an evaluation: time of a draft model's pass, in passes of the target; most tokens
THRESHOLDS = tuple(k / 20 for k in range(20))  # those that an evaluation compares
MEMORY = 1 << 30  # bytes of hidden states that a training keeps, so that later epochs need no passes of the models


class AcceptanceHead(nn.Module):
    """Hidden states of the draft model to the log-odds that the tokens read there are accepted.

    Residual blocks with SiLU, then a linear layer with an output for rejection and one for acceptance. The release
    applies one block as often as it has blocks; here each has its own weights.

    Args:
        hidden: H of the draft model.
        blocks: their number.
        weight: of rejections in its training.
    """

    def __init__(self, hidden: int, blocks: int, weight: float):
        super().__init__()
        self.hidden, self.weight = hidden, weight
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(blocks))
        self.output = nn.Linear(hidden, 2)

    def forward(self, states: Tensor) -> Tensor:
        """(..., H) to (...): log-odds of acceptance, lowered by the weight of rejections."""
        x = states.float()
        for block in self.blocks:
            x = x + silu(block(x))
        rejected, accepted = self.output(x).unbind(-1)
        return accepted - rejected

    def chances(self, odds: Tensor) -> tuple[Tensor, Tensor]:
        """Log-odds to the paper's a, and to probabilities without the weight of rejections."""
        return odds.sigmoid(), (odds + math.log(self.weight)).sigmoid()


def drafted(logits: Tensor, temperature: float) -> Tensor:
    """(..., V) logits to tokens drawn at a temperature, (...); the likeliest at 0."""
    if temperature == 0:
        return logits.argmax(-1)
    law = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(law.flatten(0, -2), 1).view(law.shape[:-1])


def acceptance(target: Tensor, draft: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """min(1, p / q) of drafted tokens, (...), from the logits of both models, (..., V), at a temperature."""
    if temperature == 0:
        return (target.argmax(-1) == tokens).float()
    p, q = ((part.float() / temperature).log_softmax(-1) for part in (target, draft))
    return (p - q).gather(-1, tokens[..., None]).squeeze(-1).clamp_max(0).exp()


@dataclass
class Training(Learner):
    """Training of an `AcceptanceHead` on the target's responses, both models frozen.

    In the texts that the draft model reads a share of the tokens is replaced by its own, each drawn behind the original
    text; their labels are the probabilities min(1, p / q) with which the target accepts them.
    """

    name: ClassVar[str] = "specdec-pp"
    model: Any = None  # the draft model: a model of transformers, or its name
    blocks: int = knob(3, 0, 64)  # of the head; published 3
    mixing: float = knob(0.15, 0, 1, open=True)  # share of drafted tokens; published 0.15, the release's code has 0.85
    texts: int = knob(6, 1, 256)  # texts made of each, with other tokens drafted; published 1
    weight: float = knob(6.0, 0, 1e6, open=True)  # of rejections in the loss; published 6
    temperature: float = knob(1.0, 0, 100)  # of both models, 0 for greedy decoding; published 1

    def begin(self, model: PreTrainedModel) -> None:
        if why := CANNOT.get(family_of(model.config)):
            raise Refused(f"{type(model).__name__} is no decoder language model: {why}")
        if self.model is None:
            raise Refused("the training of specdec-pp needs a draft model: specdec-pp:model=NAME")
        draft, own = loaded(self.model)
        if own is not None and self.tokenizer is not None and own.get_vocab() != self.tokenizer.get_vocab():
            raise Refused(f"model={shown(self.model)} has another tokenizer than the target: give one with the same")
        if why := CANNOT.get(family_of(draft.config)):
            raise Refused(f"model={shown(self.model)}: {type(draft).__name__} is no decoder language model: {why}")
        self.target, self.draft = model, draft.to(model.device).requires_grad_(False)
        self._kept: dict[Any, tuple[Tensor, Tensor]] = {}
        self._room = MEMORY
        self._taps = LayerTaps(self.draft)
        with self._taps.recording(LAST.hidden):
            pass
        self.module: AcceptanceHead = AcceptanceHead(hidden_size(draft), self.blocks, self.weight)

    def observed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The draft model's hidden states at n drafted tokens, (n, H), and their probabilities of acceptance, (n,).

        Of a text they are computed once, and kept while there is room, as the release computes its labels beforehand.
        """
        keys = [(tuple(ids[mask].tolist()), int(learnt.sum())) for ids, mask, learnt in zip(
            batch.ids, batch.mask, batch.loss_mask, strict=True
        )]  # fmt: skip
        new = [i for i, key in enumerate(keys) if key not in self._kept]
        found = dict[int, tuple[Tensor, Tensor]]()
        if new:
            at = torch.tensor(new, device=batch.ids.device)
            made = self._computed(Batch(batch.ids[at], batch.mask[at], batch.loss_mask[at], {}))
            found = dict(zip(new, made, strict=True))
        for i, part in found.items():
            if self._room >= (size := part[0].nbytes):
                self._kept[keys[i]], self._room = part, self._room - size
        parts = [found[i] if i in found else self._kept[key] for i, key in enumerate(keys)]
        states, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        return states, labels

    @torch.no_grad()
    def _computed(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """By text, the states and labels of `observed`."""
        ids, mask = batch.ids, batch.mask.long()
        text = (torch.rand(ids.shape, device=ids.device) / self.mixing).long().masked_fill(~batch.loss_mask, self.texts)
        text[:, 0] = self.texts
        chosen = text < self.texts
        target, draft = (
            model(ids, attention_mask=mask, use_cache=False).logits[:, :-1][chosen[:, 1:]]
            for model in (self.target, self.draft)
        )
        shared = min(target.shape[-1], draft.shape[-1])
        target, draft = target[:, :shared], draft[:, :shared]
        tokens = drafted(draft, self.temperature)
        label = acceptance(target, draft, tokens, self.temperature)
        own = text[:, None] == torch.arange(self.texts, device=ids.device)[:, None]  # (rows, texts, length)
        mixed = torch.where(own, ids.masked_scatter(chosen, tokens)[:, None], ids[:, None])
        with self._taps.recording(LAST.hidden) as states:
            attended = mask.repeat_interleave(self.texts, 0)
            self.draft.base_model(mixed.flatten(0, 1), attention_mask=attended, use_cache=False)
        labels = label.new_zeros(ids.shape).masked_scatter(chosen, label)[:, None].expand(own.shape)
        counts = own.sum((1, 2)).tolist()
        found = states[-1].unflatten(0, own.shape[:2])[own].float()
        return list(zip(found.split(counts), labels[own].split(counts), strict=True))

    def loss(self, batch: Batch) -> Tensor:
        states, label = self.observed(batch)
        if not len(label):
            return torch.zeros(())
        odds = self.module(states)
        rejected = self.weight * (1 - label)
        return -(label * logsigmoid(odds) + rejected * logsigmoid(-odds)).sum() / (label + rejected).sum()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """divergence: mean KL divergence of the labels from the head's probabilities.

        tokens_per_pass: tokens in the time of a pass of the target, with drafts that end by the best of `THRESHOLDS`,
        where a pass of the draft model takes a tenth of it. Drafts are sequences of the drafted tokens of held-out
        lines, in their order.
        """
        parts = [self.observed(batch) for batch in batches]
        label = torch.cat([part for _, part in parts])
        odds = torch.cat([self.module(states) for states, _ in parts])
        raw, chance = self.module.chances(odds)
        divergence = binary_cross_entropy(chance, label) - binary_cross_entropy(label, label) if len(label) else 0.0
        speed = max(tokens_in_time(raw.tolist(), label.tolist(), threshold) for threshold in THRESHOLDS)
        return {"tokens_per_pass": round(speed, 3), "divergence": round(float(divergence), 4)}

    def config(self) -> dict[str, Any]:
        given = self.model if isinstance(self.model, str | PathLike) else self.draft.config.name_or_path
        folder = Path(given).expanduser()
        return {
            "hidden": self.module.hidden, "blocks": self.blocks, "weight": self.weight,
            "draft": {
                "name": str(folder.resolve() if folder.is_dir() else given), **identity_of(self.draft).record(),
            },
        }  # fmt: skip

    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        own = json.loads(json.dumps(self.config()))  # as it is read from a checkpoint
        if any(config[k] != own[k] for k in ("hidden", "blocks", "weight")):
            raise Refused(f"--resume: the checkpoint is of a head {config}, not {own}: give the same knobs")
        self.module.load_state_dict(weights)

    def restore(self, folder: Path, model: PreTrainedModel) -> str:
        other = of_other_draft(self.draft, read_weights(folder, self.name)[0])
        return "; ".join(filter(None, [super().restore(folder, model), other]))


def tokens_in_time(raw: Sequence[float], label: Sequence[float], threshold: float) -> float:
    """Tokens per time of a pass of the target; see `Training.evaluate`.

    raw, label: of drafted tokens, the head's a and the probability that each is accepted if those before it are.
    """
    tokens = time = 0.0
    at = 0
    while at < len(label):
        first, read, accepted = at, 1.0, 1.0
        while at < len(label) and at - first < LONGEST and 1 - read <= threshold:
            read *= raw[at - 1] if at > first else 1.0
            accepted *= label[at]
            tokens, time, at = tokens + accepted, time + STEP, at + 1
        tokens, time = tokens + 1, time + 1
    return tokens / time if time else 1.0


def hidden_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).hidden_size)


def of_other_draft(model: PreTrainedModel, config: dict[str, Any]) -> str:
    """A sentence for reports where a head was trained for other weights of its draft model; empty where it was not.

    Raises:
        Refused: it was trained for a draft model of other sizes.
    """
    fitted = f"specdec-pp: the head was trained beside {config['draft']['name']}"
    remedy = "give that model, or train a head for this one"
    stored = config["draft"]
    return Identity.read({"target": stored.get("class", "model"), **stored}).compared(
        identity_of(model), fitted, remedy
    )
