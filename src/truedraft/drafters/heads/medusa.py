"""Medusa: heads that predict the tokens after the next one all at once, from the target's last state alone.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML 2024 (arXiv
2401.10774). Head i reads the state after the final norm at the last processed token t, and predicts token t + 2 + i
without the tokens between, so one pass of all heads makes a draft. The published tree is static: of the paths of
ranks, those likeliest to be right by the accuracies measured in training. By default it is of the paths likeliest by
the heads' probabilities at the state: 2.48 tokens per pass of `nano` instead of 2.24, greedy. It wins where passes of
the target are dear and its text predictable; heads that read their own drafts (`eagle3`) reach further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from transformers import PreTrainedModel

from truedraft.card import Card, knob, shown
from truedraft.drafters._base import Drafter
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._candidates import DraftVocabulary, candidates
from truedraft.drafters._growing import position_laws
from truedraft.drafters._learned import Batch, Learner, Metrics, target_logits
from truedraft.drafters._trees import likeliest_paths, likeliest_positions
from truedraft.drafters._walking import Walk
from truedraft.drafters.heads._checkpoint import Foreign, Format, loaded, origin_of, read_head
from truedraft.drafters.heads._drafter import SEQ2SEQ
from truedraft.drafters.heads._head import check_target, sizes_of
from truedraft.drafters.heads._quantize import FORM, check_copies, copies_of
from truedraft.errors import Refused
from truedraft.runtime.finite import check_finite
from truedraft.runtime.linears import Linears
from truedraft.targets._base import Target
from truedraft.targets.kinds import family_of
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps

RANKS = 10  # of each head's tokens, the likeliest first, whose accuracy is measured
FIRST, DEEPER, LOWER = 0.6, 0.8, 0.3  # accuracy of the first head's likeliest token; factor per head, and per rank
PUBLISHED = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
VLLM = re.compile(
    r"(?:medusa_heads\.)?(?:blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight|token_map)"
)


@dataclass(frozen=True)
class HeadsShape:
    """Sizes of Medusa heads.

    heads: their number. blocks: residual blocks of each. bias: whether blocks have one.
    output: vocabulary matrices: "each" head has its own, "one" for all, or the "target"'s.
    rank: of the vocabulary matrices, 0 for full ones.
    draft_vocabulary: tokens that are predicted, 0 for all.
    """

    heads: int
    blocks: int
    bias: bool = True
    output: Literal["each", "one", "target"] = "each"
    rank: int = 0
    draft_vocabulary: int = 0


class MedusaHeads(nn.Module):
    """Heads of residual blocks x + SiLU(W x + b), each followed by a vocabulary matrix.

    blocks: `blocks.{head}.{block}`. narrow: `narrow.{head}`, to the rank of the matrices. lm_heads: `lm_heads.{head}`.
    accuracy: (heads, RANKS) share of positions at which a head's token of that rank is right; 0 where not measured.
    draft_token_ids: (draft vocabulary,) target ids of the logits, None where they are all.
    """

    accuracy: Tensor
    draft_token_ids: Tensor | None

    def __init__(self, shape: HeadsShape, model: PreTrainedModel):
        super().__init__()
        self.shape = shape
        self.target, self.target_sizes = (model,), sizes_of(model)  # not a submodule
        config = model.config.get_text_config(decoder=True)
        size, heads = config.hidden_size, range(shape.heads)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size, bias=shape.bias) for _ in range(shape.blocks)) for _ in heads
        )
        self.narrow = nn.ModuleList(nn.Linear(size, shape.rank, bias=False) for _ in heads if shape.rank)
        count = {"each": shape.heads, "one": 1, "target": 0}[shape.output]
        width, rows = shape.rank or size, shape.draft_vocabulary or config.vocab_size
        self.lm_heads = nn.ModuleList(nn.Linear(width, rows, bias=False) for _ in range(count))
        self.register_buffer("accuracy", torch.zeros(shape.heads, RANKS))
        self.register_buffer("draft_token_ids", torch.arange(rows) if shape.draft_vocabulary else None)

    def record(self) -> dict[str, Any]:
        """The configuration from which they can be rebuilt."""
        return {"shape": vars(self.shape)}

    def logits(self, head: int, states: Tensor) -> Tensor:
        """A head's logits, (..., draft vocabulary), from the target's states after the final norm, (..., H)."""
        x = states
        for layer in self.blocks[head]:  # type: ignore[attr-defined]
            x = x + silu(layer(x))
        if not self.lm_heads:
            return target_logits(self.target[0], x)
        x = self.narrow[head](x) if self.shape.rank else x
        return self.lm_heads[min(head, len(self.lm_heads) - 1)](x)

    def forward(self, states: Tensor) -> Tensor:
        """(..., H) to (..., heads, draft vocabulary)."""
        return torch.stack([self.logits(head, states) for head in range(self.shape.heads)], -2)

    @torch.no_grad()
    def initialise(self) -> None:
        """Begin with the target's own logits at every head; with a rank, with the best matrix of that rank."""
        for parameter in self.blocks.parameters():
            parameter.zero_()
        given: Any = self.target[0].get_output_embeddings()
        if self.lm_heads and self.shape.rank:
            weight = given.weight.float()
            axes = torch.linalg.eigh(weight.mT @ weight).eigenvectors[:, -self.shape.rank :]
            for narrow, matrix in zip(self.narrow, self.lm_heads, strict=True):
                narrow.weight.copy_(axes.mT)  # type: ignore[operator]
                matrix.weight.copy_(weight @ axes)  # type: ignore[operator]
            return
        for matrix in self.lm_heads:
            matrix.weight.copy_(given.weight)  # type: ignore[operator]


@dataclass
class Training(Learner):
    """Training of `MedusaHeads` on the target's responses, the target itself frozen (Medusa-1)."""

    name: ClassVar[str] = "medusa"
    heads: int = knob(4, 1, 16)  # published 3 to 5
    blocks: int = knob(1, 1, 8)  # residual blocks of a head; published 1
    decay: float = knob(0.8, 0, 1, open=True)  # weight of a head's loss relative to the one before; published 0.8
    rank: int = knob(0, 0, 1 << 14)  # of the heads' vocabulary matrices, 0 for full ones; published 0
    own_head: bool = knob(True)  # vocabulary matrices of their own, not the target's output head; published True

    def begin(self, model: PreTrainedModel) -> None:
        if why := SEQ2SEQ.get(family_of(model.config)):
            raise Refused(f"{type(model).__name__} is no decoder language model: {why}")
        size = model.config.get_text_config(decoder=True).hidden_size
        if self.rank and not self.own_head:
            raise Refused(f"medusa:rank={self.rank}: with own_head=False there is no matrix of that rank; leave it out")
        if self.rank >= size:
            raise Refused(f"medusa:rank={self.rank}: give less than the target's hidden size {size}, or 0")
        shape = HeadsShape(self.heads, self.blocks, output="each" if self.own_head else "target", rank=self.rank)
        self.needs = Taps((-1,))
        self.module: MedusaHeads = MedusaHeads(shape, model.requires_grad_(False)).to(model.device)
        self.module.initialise()

    def config(self) -> dict[str, Any]:
        return self.module.record()

    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        own = self.config()["shape"]
        if config["shape"] != json.loads(json.dumps(own)):
            raise Refused(f"--resume: the checkpoint is of heads {config['shape']}, not {own}: give the same knobs")
        self.module.load_state_dict(weights)

    def loss(self, batch: Batch) -> Tensor:
        total = torch.zeros((), device=batch.ids.device)
        states = batch.features[-1].to(self.module.accuracy.dtype)
        for head in range(self.heads):
            shift = head + 2
            counted = batch.loss_mask[:, shift:]
            if counted.any():
                logits = self.module.logits(head, states[:, :-shift][counted])
                labels = batch.ids[:, shift:][counted]
                total = total + self.decay**head * cross_entropy(logits.float(), labels)
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Acceptance of chains of the heads' likeliest tokens, see `Walk`; sets the accuracies of the module."""
        walk, hits, tried = Walk(self.heads), torch.zeros(self.heads, RANKS), torch.zeros(self.heads, 1)
        for text in (text for batch in batches for text in batch.split(1)):
            ((first, length),) = text.spans()
            if length - first < 3:
                continue
            reach = torch.zeros(length - 2 - first, dtype=torch.long)
            alive = torch.ones_like(reach, dtype=torch.bool)
            for head, right in enumerate(self._right(text, first, length)):
                hits[head, : right.shape[1]] += right.sum(0)
                tried[head] += len(right)
                alive &= torch.cat([right[:, 0], right.new_zeros(len(alive) - len(right))])
                reach += alive
            walk.add([0] * first + reach.tolist(), first, length)
        self.module.accuracy.copy_(hits / tried.clamp_min(1))
        return walk.metrics()

    def _right(self, text: Batch, first: int, length: int) -> Iterator[Tensor]:
        """By head: (positions from `first` on whose token is in the text, ranks) whether the token of a rank is it."""
        states = text.features[-1][0].to(self.module.accuracy.dtype)
        for head in range(self.heads):
            labels = text.ids[0, first + head + 2 : length]
            logits = self.module.logits(head, states[first : first + len(labels)])
            yield (logits.topk(min(RANKS, logits.shape[-1])).indices == labels[:, None]).cpu()


def _published(foreign: Foreign, model: PreTrainedModel) -> MedusaHeads:
    """Heads of the authors' layout, in a file of their own or beside a full model's weights (Medusa-2).

    Files, not configurations, give the number of heads. Blocks of a head may be one module, of which a file may hold
    only the first.
    """
    found = {m.groups(): foreign.tensors[n] for n in foreign.tensors if (m := PUBLISHED.fullmatch(n))}
    heads = 1 + max(int(i) for i, *_ in found)
    matrices = {int(i): (int(j), t) for (i, j, linear, _), t in found.items() if not linear}
    blocks = max([*(j for j, _ in matrices.values()), *(int(j) + 1 for _, j, linear, _ in found if linear)])
    weights = {f"lm_heads.{i}.weight": tensor for i, (_, tensor) in matrices.items()}
    for i in range(heads):
        for j in range(blocks):
            for kind in ("weight", "bias"):
                given = (found.get((str(i), str(k), "linear.", kind)) for k in range(j, -1, -1))
                if (tensor := next((t for t in given if t is not None), None)) is not None:
                    weights[f"blocks.{i}.{j}.{kind}"] = tensor
    return _filled(foreign, model, HeadsShape(heads, blocks, output="each" if matrices else "target"), weights)


def _vllm(foreign: Foreign, model: PreTrainedModel) -> MedusaHeads:
    """Heads of vLLM's layout; its token map holds ids of the target, which its matrices may or may not be cut to."""
    given = {n.removeprefix("medusa_heads."): foreign.tensors[n] for n in foreign.tensors if VLLM.fullmatch(n)}
    ids = given.pop("token_map", None)
    weights = {n.replace(".layers.", "."): t for n, t in given.items()}
    if ids is not None:
        weights |= {n: t[ids] for n, t in weights.items() if n.startswith("lm_heads") and len(t) != len(ids)}
        weights["draft_token_ids"] = ids.long()
    places = [tuple(map(int, n.split(".")[1:3])) for n in weights if n.startswith("blocks.")]
    heads, blocks = (1 + max(place[k] for place in places) for k in (0, 1))
    matrices = sum(n.startswith("lm_heads.") for n in weights)
    output: Literal["each", "one", "target"] = "each" if matrices > 1 else "one" if matrices else "target"
    bias = any(n.endswith(".bias") for n in weights)
    shape = HeadsShape(heads, blocks, bias, output, draft_vocabulary=0 if ids is None else len(ids))
    return _filled(foreign, model, shape, weights)


def _filled(foreign: Foreign, model: PreTrainedModel, shape: HeadsShape, weights: Mapping[str, Tensor]) -> MedusaHeads:
    heads = MedusaHeads(shape, model)
    return loaded(heads, {"accuracy": heads.accuracy, **weights}, foreign.source)


def _holds(pattern: re.Pattern[str], part: str, foreign: Foreign) -> bool:
    return any(part in name and pattern.fullmatch(name) for name in foreign.tensors)


FORMATS = (
    Format("Medusa", lambda foreign: _holds(PUBLISHED, ".linear.", foreign), _published),
    Format("Medusa of vLLM", lambda foreign: _holds(VLLM, "blocks.", foreign), _vllm),
)


def accuracies(heads: MedusaHeads) -> list[list[float]]:
    """Accuracy of each head's tokens by rank: as measured, or falling geometrically."""
    if heads.accuracy.any():
        return heads.accuracy.tolist()
    return [[FIRST * DEEPER**i * LOWER**rank for rank in range(RANKS)] for i in range(heads.shape.heads)]


def static_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> DraftTree:
    """The paths of ranks that are likeliest right if heads err independently; its tokens are ranks, its root 0.

    accuracy: by head and rank.
    """
    order = [sorted(range(len(some)), key=lambda rank, some=some: -some[rank]) for some in accuracy]  # type: ignore[misc]
    chances = [[some[rank] for rank in ranks] for ranks, some in zip(order, accuracy, strict=True)]
    return likeliest_paths(0, order, chances, nodes, frozenset())


@dataclass
class Medusa(Drafter):
    card = Card(
        paper="arXiv 2401.10774 (2024)",
        idea="Heads beside the target's own predict the next few tokens at once; a tree joins the likeliest.",
        family="learned head",
        needs=("training",),
        cannot=SEQ2SEQ,
        presets={"medusa-published": {"nodes": 63, "dynamic": False}},
        published="More than 2.2x (Medusa-1) and 2.3x to 3.6x (Medusa-2) on Vicuna, one GPU (from memory).",
        also={
            "medusa-1": "",
            "medusa-2": "its checkpoints are read by draft='medusa:FOLDER'; its training of the model together with "
            "the heads is not here",
            "koala": "`truedraft train medusa:blocks=2` trains heads of several layers; its adversarial loss is not "
            "here",
            "slimspec": "`truedraft train medusa:rank=N` trains Medusa heads with matrices of low rank; those of other "
            "heads are whole",
        },
    )
    learner = Training
    needs = Taps((-1,))
    model: Any = None  # a checkpoint's folder, its name on the hub, or a MedusaHeads
    quantize: str = knob("auto", form=FORM, reader=copies_of)  # of the weights that its passes read
    nodes: int = knob(16, 1, 1024)  # of the draft; published 63
    top_k: int = knob(10, 1, 10)  # tokens of a head in a tree, 1 for a chain; published 10
    dynamic: bool = knob(True)  # the likeliest paths by the heads' probabilities; published False: a static tree
    formats = FORMATS

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | PathLike | MedusaHeads | None):
            raise Refused(f"medusa:model={shown(self.model)}: give the folder of a checkpoint, or a MedusaHeads")
        self._states: dict[int, Tensor] = {}
        self.forget()

    @property
    def notes(self) -> list[str]:
        return [*super().notes, *filter(None, [origin_of(self.heads)])]

    def forget(self) -> None:
        self._calibration = Calibration()

    def bind(self, target: Target) -> None:
        if why := self.card.cannot.get(target.family):
            raise Refused(f"medusa cannot draft for {type(target.model).__name__}: {why}")
        if isinstance(self.model, MedusaHeads):
            check_target("medusa", self.model.target_sizes, target.model)
            self.heads = self.model
        else:
            of = self.target_tokenizer
            self.heads = read_head("medusa", self.model, self.formats, target.model, self.rebuilt, of)
        check_finite("medusa", self.model or "its heads", self.heads)
        self._tree = static_tree([some[: self.top_k] for some in accuracies(self.heads)], self.nodes)
        self.heads.to(target.device, target.dtype).eval()
        self._vocabulary = DraftVocabulary(self.heads.target_sizes[0], self.heads.draft_token_ids)
        used: list[Any] = [self.heads] if self.heads.lm_heads else [self.heads, target.model.get_output_embeddings()]
        int8 = copies_of(self.quantize)
        self._linears = Linears(nn.ModuleList(used if target.device.type == "cpu" else []), int8)
        check_copies("medusa", self.quantize, int8)

    def open(self) -> None:
        self._linears.refresh()

    @staticmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> MedusaHeads:
        """The untrained heads of a record, see `MedusaHeads.record`."""
        return MedusaHeads(HeadsShape(**record["shape"]), model)

    @property
    def width(self) -> int:
        return self.nodes

    @torch.no_grad()
    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        drafts = [DraftTree.chain(row.tokens[-1], (), ()) for row in rows]
        if asked := [i for i, row in enumerate(rows) if budget[i] > 0 and id(row) in self._states]:
            some = [rows[i] for i in asked]
            with self._linears.compiled():
                logits = self.heads(torch.stack([self._states[id(row)] for row in some])).float()
            logits = logits if self._vocabulary.suffices(some) else self._vocabulary.spread(logits)
            for i, row, laws in zip(asked, some, position_laws(some, logits), strict=True):
                draft = self._drafted(row, laws, min(budget[i], self.nodes))
                drafts[i] = self._calibration.proposed(row, draft)
        return drafts

    def _drafted(self, row: Row, laws: Tensor, most: int) -> DraftTree:
        """A row's draft of at most `most` nodes. laws: (heads, V)."""
        found = candidates(self, row, laws, range(len(laws)), self.top_k, self._vocabulary)
        if self.dynamic:
            return likeliest_positions(row.tokens[-1], found, most, row.ends)
        drafted, parents, confidence = [row.tokens[-1]], [-1], [1.0]
        places = {0: 0}  # node of the static tree -> that of the draft
        for node in range(1, len(self._tree)):
            parent, rank = places.get(self._tree.parent[node]), self._tree.tokens[node]
            if len(drafted) > most:
                break
            head = self._tree.shape.depth[node] - 1
            if parent is None or (parent and drafted[parent] in row.ends) or rank >= len(found[head]):
                continue
            places[node] = len(drafted)
            parents.append(parent)
            token, chance = found[head][rank]
            drafted.append(token)
            confidence.append(chance)
        return DraftTree(tuple(drafted), tuple(parents), confidence=tuple(confidence))

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self._calibration.update(rows)
        for place, (row, one) in enumerate(zip(rows, accepted, strict=True)):
            if not one.ended:
                last = scores.features(place, one.path[-1:], (-1,))[-1]
                self._states[id(row)] = last.to(self.heads.accuracy.dtype, copy=True)

    def end(self, row: Row) -> None:
        self._calibration.end(row)
        self._states.pop(id(row), None)
