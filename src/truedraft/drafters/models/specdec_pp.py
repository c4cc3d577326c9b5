"""SpecDec++: a draft model whose drafts end where a trained head expects that one of their tokens is rejected.

Huang, Guo and Wang, "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths", COLM 2025 (arXiv
2405.19715). The head reads the draft model's last hidden state at each drafted token and estimates a, the probability
that this token is accepted if those before it are. A pass of the draft model reads the last token, which gives its a,
and draws the next one; the draft ends once 1 - a_1 a_2 ... exceeds a threshold. Whether a token is drafted depends on
those before it alone, and once it is, it is verified, so that drawn drafts stay exact.

The paper proves that a threshold is optimal and finds one by search, 0.3 to 0.7. By default it follows from measured
costs, under controls that measure them. One more pass of the draft model takes c seconds, and its token n more in the
target's pass. It is accepted with probability s r^2: s is the product of the a so far, and r the row's rate of
acceptance, which stands for the last token, not read yet, and for the new one. With l, the row's seconds per token, the
pass pays while l s r^2 > c + n. As s never rises, no later pass pays where one does not, and to end there is optimal (a
monotone stopping problem); as l is the ratio that the policy itself attains, its seconds per token are the fewest
(renewal theory). So the threshold is 1 - (c + n) / (l r^2). Without measured costs it is 0.3.

Rejections weigh six times in the training, which lowers a: published thresholds are of such a, those by costs of
probabilities without the weight, calibrated by how often like tokens were right. It wins over a fixed length where
acceptance varies along the text; each token is a call of the draft model, where `draft-model` makes one per draft.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, logsigmoid, silu
from transformers import PreTrainedModel

from truedraft.card import Card, knob, shown
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._learned import Batch, Learner, Metrics, read_learnt, read_weights, with_weights
from truedraft.drafters._timed import TimedLevels
from truedraft.drafters.models._model import ContinuingModelDrafter
from truedraft.drafters.models._reader import Reader, loaded
from truedraft.errors import Refused
from truedraft.runtime.identity import fingerprint
from truedraft.runtime.tapping import LayerTaps
from truedraft.targets._base import Target
from truedraft.targets.kinds import family_of
from truedraft.tree import Accepted, DraftTree, Draws, Row, Scores, Taps

CANNOT = {"encoder-decoder": "its head is trained on hidden states of a decoder language model"}
LAST = Taps((-1,))  # the layer that the head reads
PUBLISHED = 0.3  # threshold where costs are not known: that of the release's evaluation
KEPT = 0.95  # weight that a pass keeps at each later one, in what is counted of a row
STEP, LONGEST = 0.1, 20  # of an evaluation: time of a draft model's pass, in passes of the target; most tokens
THRESHOLDS = tuple(k / 20 for k in range(20))  # those that an evaluation compares


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
        draft, self.tokenizer = loaded(self.model)
        if why := CANNOT.get(family_of(draft.config)):
            raise Refused(f"model={shown(self.model)}: {type(draft).__name__} is no decoder language model: {why}")
        self.target, self.draft = model, draft.to(model.device).requires_grad_(False)
        self._taps = LayerTaps(self.draft)
        with self._taps.recording(LAST.hidden):
            pass
        self.module: AcceptanceHead = AcceptanceHead(hidden_size(draft), self.blocks, self.weight)

    @torch.no_grad()
    def observed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The draft model's hidden states at n drafted tokens, (n, H), and their probabilities of acceptance, (n,)."""
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
        own = text == torch.arange(self.texts, device=ids.device)[:, None, None]
        mixed = torch.where(own, ids.masked_scatter(chosen, tokens), ids)
        with self._taps.recording(LAST.hidden) as states:
            self.draft.base_model(mixed.flatten(0, 1), attention_mask=mask.repeat(self.texts, 1), use_cache=False)
        labels = label.new_zeros(ids.shape).masked_scatter(chosen, label).expand(own.shape)
        return states[-1].unflatten(0, own.shape[:2])[own].float(), labels[own]

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
                "name": str(folder.resolve() if folder.is_dir() else given), "class": type(self.draft).__name__,
                "fingerprint": fingerprint(self.draft),
            },
        }  # fmt: skip

    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        own = json.loads(json.dumps(self.config()))  # as it is read from a checkpoint
        if any(config[k] != own[k] for k in ("hidden", "blocks", "weight")):
            raise Refused(f"--resume: the checkpoint is of a head {config}, not {own}: give the same knobs")
        check_draft(self.draft, config)
        self.module.load_state_dict(weights)


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


def check_draft(model: PreTrainedModel, config: dict[str, Any]) -> None:
    """Raises Refused where a head was trained for another draft model."""
    stored, given = config["draft"], fingerprint(model)
    if stored["fingerprint"] != given:
        raise Refused(
            f"specdec-pp: the head was trained for another draft model ({stored['name']}, a {stored['class']}, "
            f"fingerprint {stored['fingerprint']}; this is a {type(model).__name__}, {given}): give that model, or "
            "train a head for this one"
        )


class AcceptanceReader(Reader):
    """A draft model, whose passes give the head's estimates of the drafted tokens that they read: `GrowingTree.score`
    is the paper's a, `chance` the probability without the weight of rejections."""

    head: AcceptanceHead

    @torch.no_grad()
    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        logits, states = self.expand_tapped(growing, LAST)
        read = [(tree, node) for tree in growing for node in tree.frontier]
        if any(node > tree.root for tree, node in read):
            estimates = zip(*(part.tolist() for part in self.head.chances(self.head(states))), strict=True)
            for (tree, node), (raw, chance) in zip(read, estimates, strict=True):
                if node > tree.root:
                    tree.score[node], tree.chance[node] = raw, chance
        return logits


@dataclass(slots=True)
class RowPace:
    """What a row's drafts cost and gave so far; later passes weigh more.

    seconds, tokens: of passes, drafting included, and those emitted.
    right, tried: drafted tokens that were accepted, and those whose earlier ones were; first a prior.
    length: tokens of the row at the last pass. draft: what was drafted behind them. drafting: seconds of it.
    """

    length: int
    seconds: float = 0.0
    tokens: float = 0.0
    right: float = 1.4
    tried: float = 2.0
    draft: list[int] = field(default_factory=list)
    drafting: float = 0.0

    @property
    def rate(self) -> float:
        return self.right / self.tried

    def update(self, tokens: Sequence[int], passed: float) -> None:
        """Count a pass. tokens: of the row. passed: the row's share of the seconds of the pass."""
        emitted = tokens[self.length :]
        right = 0
        while right < min(len(emitted), len(self.draft)) and emitted[right] == self.draft[right]:
            right += 1
        self.seconds = KEPT * self.seconds + passed + self.drafting
        self.tokens = KEPT * self.tokens + len(emitted)
        self.right = KEPT * self.right + right
        self.tried = KEPT * self.tried + min(right + 1, len(emitted), len(self.draft))
        self.length, self.draft, self.drafting = len(tokens), [], 0.0

    def per_token(self, plain: float) -> float:
        """Seconds per token, with one pass without drafts, of `plain` seconds, as a prior."""
        return (self.seconds + plain) / (self.tokens + 1)


@dataclass
class SpecdecPp(TimedLevels, ContinuingModelDrafter):
    card = Card(
        paper="arXiv 2405.19715 (2024)",
        idea="A smaller model drafts until a trained head expects that one of the tokens is rejected.",
        family="draft model",
        needs=("draft model", "training"),
        cannot=CANNOT,
        published="Llama 2 chat 70B by 7B: 2.04x to 2.26x, 7% to 11% more than drafts of the best fixed length.",
    )
    learner = Training
    model: Any = None  # a model of transformers, or its name; None for the one that the head was trained for, by name
    head: Any = None  # folder of a checkpoint (`truedraft train specdec-pp:model=NAME`), or an AcceptanceHead
    threshold: float = knob(0.0, 0, 1)  # ends a draft; 0: by measured costs; published 0.3 to 0.7
    shortest: int = knob(1, 1, 256)  # tokens at least; published 2, which a given threshold has by itself
    length: int = knob(20, 1, 256)  # tokens at most; published 20

    def __post_init__(self) -> None:
        if not isinstance(self.head, str | PathLike | AcceptanceHead | None):
            raise Refused(f"specdec-pp:head={shown(self.head)}: give the folder of a checkpoint, or an AcceptanceHead")
        if self.model is None and isinstance(self.head, str | PathLike):
            self.model = read_weights(Path(self.head).expanduser(), "specdec-pp")[0]["draft"]["name"]
        super().__post_init__()
        self._reader: AcceptanceReader = AcceptanceReader(self.model)
        self.forget()

    def forget(self) -> None:
        self._calibration = Calibration()
        self._paces: dict[int, RowPace] = {}

    def bind(self, target: Target) -> None:
        if why := CANNOT.get(target.family):
            raise Refused(f"specdec-pp cannot draft for {type(target.model).__name__}: {why}")
        super().bind(target)
        head = self._opened(target)
        if head.hidden != (given := hidden_size(self.model)):
            raise Refused(
                f"specdec-pp: the head reads states of size {head.hidden}, and those of the draft model "
                f"{type(self.model).__name__} have {given}: give its own head"
            )
        self.reader.target.check_taps(LAST)
        self._reader.head = head.to(target.device).eval()

    def _opened(self, target: Target) -> AcceptanceHead:
        """The head, whose checkpoint is one for these two models."""
        if isinstance(self.head, AcceptanceHead):
            return self.head
        if self.head is None:
            raise Refused(
                "specdec-pp needs a head: draft='specdec-pp:model=NAME,head=FOLDER', made by `truedraft train "
                "specdec-pp:model=NAME`"
            )
        config, weights = read_learnt(Path(self.head).expanduser(), "specdec-pp", target.model)
        check_draft(self.model, config)
        shape = config["hidden"], config["blocks"], config["weight"]
        return with_weights(lambda: AcceptanceHead(*shape), weights, "specdec-pp", self.head)

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return self.threshold == 0

    @property
    def width(self) -> int:
        return self.length

    @property
    def draws(self) -> Draws:
        return "one"

    def start(self, rows: Sequence[Row]) -> None:
        self._paces |= {id(row): RowPace(len(row.tokens)) for row in rows}
        super().start(rows)

    def continues(self, growing: GrowingTree, rows: int, active: int) -> bool:
        if len(growing.tokens) - 1 - growing.root < self.shortest:
            return True
        read = range(growing.root + 1, len(growing.tokens) - 1)
        if self.threshold or self.pass_cost is None:
            accepted = math.prod(growing.score[node] for node in read)
            return 1 - accepted <= (self.threshold or PUBLISHED)
        chances = (1.0, *(growing.chance[node] for node in read))
        return 1 - math.prod(self._calibration.settled(growing.row, chances)) <= self._by_costs(growing, rows, active)

    def _by_costs(self, growing: GrowingTree, rows: int, active: int) -> float:
        """The threshold above which a further token costs more than it saves."""
        assert self.pass_cost is not None
        pace = self._paces[id(growing.row)]
        saved = pace.per_token(self.pass_cost.plain / rows) * pace.rate**2
        return 1 - (self._of_level / active + self.pass_cost.node) / max(saved, 1e-12)

    def _level(self, active: Sequence[GrowingTree]) -> None:
        super()._level(active)
        for growing in active:
            self._paces[id(growing.row)].drafting += self._of_level / len(active)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        (node,), (law,) = nodes, laws
        growing.end_level(growing.add(node, self.chosen(growing, node, law), law))

    def finished(self, growing: GrowingTree) -> DraftTree:
        tree, pace = super().finished(growing), self._paces[id(growing.row)]
        nodes = range(growing.root + 1, len(growing.tokens))
        if not growing.after:
            pace.draft = growing.tokens[growing.root + 1 :]
        if tree.dist is not None:
            return tree
        tree = tree.replaced(confidence=(1.0, *(growing.chance.get(node, pace.rate) for node in nodes)))
        return self._calibration.proposed(growing.row, tree, growing.after)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self._calibration.update(rows)
        cost = self.pass_cost
        for row, tree in zip(rows, trees, strict=True):
            passed = 0.0 if cost is None else cost.plain / len(rows) + cost.node * tree.drafted
            self._paces[id(row)].update(row.tokens, passed)

    def end(self, row: Row) -> None:
        super().end(row)
        self._calibration.end(row)
        self._paces.pop(id(row), None)
