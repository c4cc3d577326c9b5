"""Training of autoregressive heads: unrolled over their own states, as in drafting (training-time test, EAGLE-3)."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.drafters._learned import Batch, Learner, Metrics, target_logits
from truedraft.drafters._losses import IGNORED, LOSSES
from truedraft.drafters._walking import Walk
from truedraft.drafters.heads._drafter import SEQ2SEQ
from truedraft.drafters.heads._head import Head, Learned
from truedraft.errors import Refused
from truedraft.runtime.modules import inner_size
from truedraft.targets.kinds import family_of
from truedraft.tree import Taps

DRAFTED = 8  # positions of a draft that an evaluation measures


class Unrolled:
    """Attention of one block of a head over the steps of its unrolling.

    At step 0 pair i sees the pairs up to i. At step j its state stands for pair i + j, which in drafting sees the pairs
    up to i as they were at step 0, and of each later step up to j the one at its own place.
    """

    def __init__(self, visible: Tensor):
        self._visible = visible  # (rows, 1, width, width)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        share = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(share, 1))
        self._values.append(value.repeat_interleave(share, 1))
        query = query * query.shape[-1] ** -0.5
        scores = (query @ self._keys[0].mT).float().masked_fill(~self._visible, -torch.inf)
        later = [(query * keys).sum(-1, keepdim=True).float() for keys in self._keys[1:]]
        weights = torch.cat([scores, *later], -1).softmax(-1).to(query.dtype)
        width = scores.shape[-1]
        found = weights[..., :width] @ self._values[0]
        for step, values in enumerate(self._values[1:]):
            found = found + weights[..., width + step, None] * values
        return found


class HeadLearner(Learner):
    """Training of a head."""

    module: Learned

    @abstractmethod
    def head(self, model: PreTrainedModel) -> Learned:
        """An untrained head for a target."""

    def begin(self, model: PreTrainedModel) -> None:
        if why := SEQ2SEQ.get(family_of(model.config)):
            raise Refused(f"{type(model).__name__} is no decoder language model: {why}")
        self.model = model.requires_grad_(False)
        self.module = self.head(model)
        self.needs = Taps(self.module.layers)

    def prepare(self, counts: Tensor) -> None:
        """Keep the most frequent tokens in the draft vocabulary, and begin with the target's output head for them."""
        head = self.module
        if head.draft_token_ids is not None:
            order = (-counts).argsort(stable=True)
            head.draft_token_ids.copy_(order[: len(head.draft_token_ids)].sort().values)
        self.initialise()

    def initialise(self) -> None:
        """Set weights that begin as the target's."""

    @torch.no_grad()
    def copy_output_head(self) -> None:
        """Begin with the target's output head, for the tokens that are drafted."""
        head: Any = self.module
        rows: Any = self.model.get_output_embeddings()
        head.lm_head.weight.copy_(rows.weight if head.draft_token_ids is None else rows.weight[head.draft_token_ids])

    def config(self) -> dict[str, Any]:
        return self.module.record()

    def resume(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        own = json.loads(json.dumps(self.config()))  # as it is read from a checkpoint
        if {k: v for k, v in config.items() if k in own} != own:
            raise Refused(f"--resume: the checkpoint is of a head {config}, not {own}: give the same knobs")
        self.module.load_state_dict(weights)

    def _labels(self, expected: Tensor, counted: Tensor) -> Tensor:
        ids = self.module.draft_token_ids
        if ids is None:
            return expected.masked_fill(~counted, IGNORED)
        at = torch.searchsorted(ids, expected.contiguous()).clamp_max(len(ids) - 1)
        return at.masked_fill(~counted | (ids[at] != expected), IGNORED)


class StepwiseLearner(HeadLearner):
    """Training of a head that drafts token by token, with the tokens of the text in the place of drafted ones.

    Subclasses have the knobs steps (tokens after each pair), decay (weight of a step relative to the one before),
    loss_name and vocabulary, and make the head.

    drafted: positions of a draft that an evaluation measures.
    """

    steps: int
    decay: float
    loss_name: str

    @property
    def drafted(self) -> int:
        return DRAFTED

    @abstractmethod
    def _passes(self, batch: Batch, tokens: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """By step: (rows, pairs, size) states and (rows, pairs, draft vocabulary) logits.

        tokens: by step, (rows, pairs) ids of the token that it reads; at step 0 that of the pair.
        """

    def begin(self, model: PreTrainedModel) -> None:
        super().begin(model)
        self.needs = Taps((*self.module.layers, -1))

    def loss(self, batch: Batch) -> Tensor:
        total, weight = torch.zeros(()), 1.0
        compute = LOSSES[self.loss_name]
        for _, logits, p, labels, _ in self._unrolled(batch, self.steps):
            counted = labels != IGNORED
            if counted.any():
                found = compute(logits[counted].float().log_softmax(-1), p(counted), labels[counted])
                total = total + weight * found.sum() / counted.sum()
            weight *= self.decay
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Acceptance of chains of the likeliest tokens by position, over all positions of the responses, and the tokens
        per pass of decoding them with such drafts."""
        walk = Walk(self.drafted)
        for batch in batches:
            for reach, span in zip(self._reach(batch).tolist(), batch.spans(), strict=True):
                walk.add(reach, *span)
        return walk.metrics()

    def _reach(self, batch: Batch) -> Tensor:
        """(rows, pairs) number of leading tokens of a chain drafted after each pair that are right."""
        ids = self.module.draft_token_ids
        alive: Tensor | None = None
        reach: Tensor | None = None
        for _, logits, _, _, expected in self._unrolled(batch, self.drafted):
            found = logits.argmax(-1)
            found = found if ids is None else ids[found]
            right = found == expected
            alive = right if alive is None else alive & right
            reach = alive.long() if reach is None else reach + alive
        assert reach is not None
        return reach

    def _unrolled(self, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor, Any, Tensor, Tensor]]:
        """By step: (rows, pairs, H) states; (rows, pairs, draft vocabulary) logits; a function from counted pairs to
        the target's probabilities there; labels in the draft vocabulary, `IGNORED` where there is no loss; and the
        target ids of the text, -1 beyond it."""
        ids = batch.ids
        pairs = ids.shape[1] - 1
        shifted = torch.cat([ids, ids.new_zeros(len(ids), steps + 1)], 1)
        counted = torch.cat([batch.loss_mask, batch.loss_mask.new_zeros(len(ids), steps + 1)], 1)
        tokens = [shifted[:, step + 1 : step + 1 + pairs] for step in range(steps)]
        for step, (states, logits) in enumerate(self._passes(batch, tokens)):
            expected = shifted[:, step + 2 : step + 2 + pairs]
            here = counted[:, step + 2 : step + 2 + pairs]
            labels, teacher = self._labels(expected, here), partial(self._teacher, batch, step)
            yield states, logits, teacher, labels, expected.masked_fill(~here, -1)

    def _teacher(self, batch: Batch, step: int, counted: Tensor) -> Tensor:
        """The target's probabilities, over the draft vocabulary, of the tokens after some pairs at a step."""
        rows, places = counted.nonzero(as_tuple=True)
        logits = target_logits(self.model, batch.features[-1][rows, places + 1 + step])
        ids = self.module.draft_token_ids
        return (logits if ids is None else logits[:, ids]).softmax(-1)


class UnrolledLearner(StepwiseLearner):
    """Training of a `Head`, unrolled over its own states. Subclasses have the knobs of `StepwiseLearner`."""

    module: Head

    def _passes(self, batch: Batch, tokens: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        head, pairs = self.module, batch.ids.shape[1] - 1
        tapped = torch.cat([batch.features[layer] for layer in head.layers], -1)[:, :-1]
        states = self.noised(head.fuse(tapped.to(head.dtype)), batch)
        causal = torch.ones(pairs, pairs, dtype=torch.bool, device=batch.ids.device).tril()
        attends = [Unrolled(causal[None, None]) for _ in head.blocks]
        position = torch.arange(pairs, device=batch.ids.device)[None]
        for step, some in enumerate(tokens):
            embeds = head.embed(some)
            states = head(embeds, states, head.rotary(embeds, position + step), attends)
            yield states, head.logits(states)

    def noised(self, states: Tensor, batch: Batch) -> Tensor:
        """The features with noise, for methods that train with it."""
        return states


def states_along(head: Head, features: Tensor) -> Tensor:
    """A head's states at every position of texts, (rows, length, H), of features alone; each sees those up to its
    own."""
    length = features.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=features.device).tril()
    rotary = head.rotary(features, torch.arange(length, device=features.device)[None])
    attends = [Unrolled(causal[None, None]) for _ in head.blocks]
    return head(features, head.fuse(features), rotary, attends)


def layer_like(config: Any) -> dict[str, Any]:
    """Fields of the configuration of a head's layers of the sizes of a target's."""
    heads = config.num_attention_heads
    return dict(
        hidden_size=config.hidden_size, num_attention_heads=heads,
        intermediate_size=inner_size(config),
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6), hidden_act="silu", attention_bias=False, mlp_bias=False,
        max_position_embeddings=getattr(config, "max_position_embeddings", 2048),
    )  # fmt: skip


def spread_layers(text: str, count: int | None = None) -> tuple[int, ...]:
    """Layers of a target from "2x4x6"; by default three of `count`: 2, n/2 and n - 3, in small models nearer the ends.

    Raises:
        ValueError: another format.
    """
    if text:
        return tuple(map(int, text.split("x")))
    if count is None:
        return ()
    published = (2, count // 2, count - 3)
    return published if published[0] < published[1] < published[2] else (min(1, count), (count + 1) // 2, count)
