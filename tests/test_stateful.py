"""Heads with a state per drafted token: published checkpoints against the references, drafts against the plain head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import foreign.common
import seq2seq_models
from foreign import FORMATS
from models import ragged
from test_head_formats import CHAIN, LATER, TOKENS, TREE, Driven, Paths, assert_close, changed, reference, written
from test_heads import batch_of, learner_of, plain_attention, target
from truedraft import Refused, accelerate, registry
from truedraft.drafters._learned import save_learnt
from truedraft.drafters.heads import _reader
from truedraft.drafters.heads._checkpoint import read_head
from truedraft.drafters.heads._reader import HeadReader
from truedraft.drafters.heads._stateful import StatefulHead, StatefulReader
from truedraft.runtime.heads import TorchHeadPass
from truedraft.tree import Row

NAMES = ("hydra", "mlp-speculator")
KNOBS: list[tuple[str, dict[str, Any]]] = [
    ("hydra", {}), ("hydra", {"blocks": 3, "prefix": True, "vocabulary": 20}), ("hydra", {"own_head": False}),
    ("mlp-speculator", {}), ("mlp-speculator", {"tied": True, "scale_input": True, "size": 48, "vocabulary": 20}),
]  # fmt: skip
VARIANTS = [(name, variant) for name in NAMES for variant in FORMATS[name].variants]
CONTROLS = [(name, wrong) for name in NAMES for wrong in FORMATS[name].controls]


@pytest.fixture(autouse=True)
def _heads_of_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head size that compiled passes can compute."""
    monkeypatch.setattr(foreign.common, "HEADS", 2)
    monkeypatch.setattr(foreign.common, "KV_HEADS", 1)


def opened(name: str, folder: Path, target: PreTrainedModel) -> Any:
    method = registry.method("drafters", name)
    head: Any = read_head(name, folder, method.formats, target, method.rebuilt)
    return head.to(target.dtype).eval()


class Stateful(Driven):
    """As `Driven`, for a head with states."""

    def __init__(self, head: StatefulHead, target: PreTrainedModel, passes: str = "compiled"):
        if head.prefix is not None and passes == "torch":
            head.prefix.runner = TorchHeadPass(head.prefix)
        self.reader: Any = StatefulReader(head)
        if head.prefix is not None:
            assert self.reader._features.name == {"compiled": "compiled pass", "torch": "torch"}[passes]
        self.target = target
        self.row = Row(0, list(TOKENS), len(TOKENS), 20)
        self.reader.start([self.row], 40)
        self._observe(0)


def shallow(paths: Paths, head: StatefulHead) -> Paths:
    return [path for path in paths if len(path) < head.steps]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("passes", "dtype", "tolerance"), [
    ("compiled", torch.float32, 1e-4), ("torch", torch.float64, 1e-5)
])  # fmt: skip
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_drafts_are_those_of_the_published_law(
    name: str, variant: str, passes: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """A chain, a tree, and a tree after a round in which none of the drafted tokens was accepted."""
    form = FORMATS[name]
    target = written(name, tmp_path, dtype, **form.variants[variant])
    head = opened(name, tmp_path, target)
    driven = Stateful(head, target, passes)
    chain, tree = shallow(CHAIN, head), shallow(TREE, head)
    assert_close(driven.logits(chain), reference(form, tmp_path, target, chain), tolerance)
    driven.append(LATER)
    assert_close(driven.logits(tree), reference(form, tmp_path, target, tree, LATER), tolerance)
    driven.append(LATER[:1])
    assert_close(driven.logits(tree), reference(form, tmp_path, target, tree, [*LATER, *LATER[:1]]), tolerance)


@pytest.mark.parametrize(("name", "wrong"), CONTROLS)
def test_errors_of_readers_would_show(name: str, wrong: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    target = written(name, tmp_path, torch.float64, **form.controls[wrong])
    head = opened(name, tmp_path, target)
    chain = shallow(CHAIN, head)
    found = Stateful(head, target, "torch").logits(chain)
    law = form.logits(tmp_path, target, TOKENS, chain[-1], wrong=wrong)
    assert (found.softmax(-1) - law.softmax(-1)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "variant", "convention", "layers"),
    [
        ("hydra", {}, "after the final norm", (-1,)),
        ("hydra", dict(offset=2), "before the last 2 layers", (6,)),
        ("mlp-speculator", {}, "after the final norm", (-1,)),
    ],
)
def test_records_keep_how_the_source_numbers_layers(
    name: str, variant: dict, convention: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    target = written(name, tmp_path / "published", **variant)
    head = opened(name, tmp_path / "published", target)
    record = json.loads(json.dumps(head.record()))
    assert record["convention"] == convention and tuple(record["layers"]) == head.layers == layers
    assert record["source"] == {"hydra": "Hydra", "mlp-speculator": "IBM"}[name]
    save_learnt(tmp_path / "own", name, head, target, record)
    again = opened(name, tmp_path / "own", target)
    assert all(torch.equal(weight, again.state_dict()[n]) for n, weight in head.state_dict().items())


@pytest.mark.parametrize(
    ("name", "variant", "config", "weights", "message"),
    [
        ("hydra", {}, {"hydra_head_arch": "cross-attn"}, {}, "its hydra_head_arch is 'cross-attn'"),
        ("hydra", {}, {"hydra_head_arch": None}, {}, "its hydra_head_arch is None"),
        ("hydra", {}, {"hidden_state_offset": 9}, {}, "its hidden_state_offset is 9; the target has 8 layers"),
        ("hydra", {}, {"grounded_heads": False}, {}, "has foreign heads.0.0.residual.bias"),
        ("hydra", {}, {}, {"hydra_lm_head.2.bias": None}, "lacks lm_heads.2.bias"),
        ("hydra", {}, {}, {"hydra_mlp.1.0.linear.weight": torch.ones(32, 32)}, "(32, 32) instead of (32, 96)"),
        ("hydra", {"arch": "prefix-mlp"}, {"hydra_head_arch": "mlp"}, {}, "lacks heads.0.0.linear.bias"),
        ("hydra", {"arch": "prefix-mlp"}, {}, {"prefix_embeding_layer.norm.weight": None}, "lacks prefix.norm.weight"),
        ("hydra", {}, {}, {"cross_attention.weight": torch.ones(3)}, "has foreign cross_attention.weight"),
        ("mlp-speculator", {}, {"emb_dim": 48}, {}, "its emb_dim is 48, that of the target 32"),
        ("mlp-speculator", {}, {"vocab_size": 99}, {}, "its vocab_size is 99, that of the target 97"),
        ("mlp-speculator", {}, {"n_predict": None}, {}, "its n_predict is None: its config.json must give a number"),
        ("mlp-speculator", {}, {"n_predict": 4}, {}, "lacks embeds.3.weight"),
        ("mlp-speculator", {}, {"n_predict": 2}, {}, "has foreign embeds.2.weight"),
        ("mlp-speculator", {}, {"inner_dim": 16}, {}, "(97, 24) instead of (97, 16)"),
        ("mlp-speculator", {}, {"tie_weights": True}, {}, "has foreign embeds.1.weight"),
        ("mlp-speculator", {}, {}, {"speculator.ln.1.bias": None}, "lacks norms.1.bias"),
        ("mlp-speculator", {}, {}, {"speculator.cell_ln.0.bias": torch.ones(3)}, "has foreign"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    name: str, variant: dict, config: dict, weights: dict, message: str, tmp_path: Path
) -> None:
    target = written(name, tmp_path, **variant, **({"file": "model.safetensors"} if name == "mlp-speculator" else {}))
    changed(tmp_path, config, weights)
    with pytest.raises(Refused) as error:
        opened(name, tmp_path, target)
    assert message in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- drafting


@torch.no_grad()
def plain_logits(head: StatefulHead, features: Tensor, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """(1 + drafted, draft vocabulary) logits after `tokens` and after each drafted one.

    features: (len(tokens) - 1, H), of all tokens but the last.
    """
    read = features[None]
    if head.prefix is not None:
        rotary = head.prefix.rotary(read, torch.arange(read.shape[1])[None])
        read = head.prefix.logits(head.prefix(read, read, rotary, [plain_attention]))
    states, found = head.fuse(read[0, -1]), []
    for step, token in enumerate([tokens[-1], *drafted]):
        states = head.step(states, torch.tensor(token), step)
        found.append(head.logits(states, step))
    return torch.stack(found)


@pytest.mark.parametrize(("name", "given"), KNOBS)
def test_drafts_are_those_of_the_plain_head(name: str, given: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of rows of different lengths, with rows that leave and prompts read in pieces: the logits at every
    node of every drafted tree."""
    model = target()
    head = learner_of(name, model, **given).module.eval()
    compared = 0
    expand = StatefulReader.expand

    def checked(self: StatefulReader, growing: Sequence[Any]) -> Tensor:
        nonlocal compared
        logits = expand(self, growing)
        nodes = [(tree, node) for tree in growing for node in tree.frontier]
        for (tree, node), found in zip(nodes, logits, strict=True):
            tokens = tree.row.tokens
            features = batch_of(model, head.layers, [tokens], 0).features[-1][0, :-1]
            plain = plain_logits(head, features, tokens, tree.path(node))[-1]
            torch.testing.assert_close(found, plain, rtol=2e-4, atol=2e-4)
            compared += 1
        return logits

    monkeypatch.setattr(StatefulReader, "expand", checked)
    monkeypatch.setattr(_reader, "CHUNK", 3)
    fast = accelerate(model, draft=registry.load("drafters", name, model=head, quantize="none"), control="fixed")
    inputs: dict[str, Any] = ragged(model, 3)
    kwargs: dict[str, Any] = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert torch.equal(fast.generate(**inputs, **kwargs), model.generate(**inputs, **kwargs))
    assert compared > 30
    reader: Any = fast.drafter
    reader = reader.reader
    assert not reader._places and reader._states is None
    kept = reader._features
    assert not (kept.slot_rows if isinstance(kept, HeadReader) else kept._last)


@pytest.mark.parametrize(("name", "given"), KNOBS)
def test_training_step_is_that_of_drafting(name: str, given: dict) -> None:
    """The logits of every pair at every step equal those of a chain drafted there, of the text's tokens."""
    model = target()
    learner = learner_of(name, model, **given)
    learner.module.eval()
    texts = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0)).tolist()
    batch = batch_of(model, learner.needs.hidden, texts, 5)
    with torch.no_grad():
        steps = [logits for _, logits, *_ in learner._unrolled(batch, 4)]
    for row, text in enumerate(texts):
        for pair in range(len(text) - 5):
            plain = plain_logits(
                learner.module, batch.features[-1][row, : pair + 1], text[: pair + 2], text[pair + 2 : pair + 5]
            )
            trained = torch.stack([logits[row, pair] for logits in steps])
            torch.testing.assert_close(trained, plain, rtol=1e-4, atol=1e-4)


def test_untrained_hydra_has_the_targets_logits() -> None:
    model = target()
    for given in (KNOBS[0][1], {"vocabulary": 20}, {"blocks": 2}):
        learner = registry.method("drafters", "hydra").learner(**given)
        learner.begin(model)
        learner.prepare(torch.arange(61))
        head = learner.module.eval()
        states = torch.randn(3, 2 * head.size)
        expected = model.lm_head(states[:, : head.size])
        kept = slice(None) if head.draft_token_ids is None else head.draft_token_ids
        torch.testing.assert_close(head.logits(states), expected[:, kept])


def test_dropout_is_that_of_training_alone() -> None:
    model = target()
    learner = learner_of("hydra", model, dropout=0.5)
    batch = batch_of(model, learner.needs.hidden, torch.randint(0, 61, (2, 12)).tolist(), 5)
    learner.module.train()
    assert learner.loss(batch) != learner.loss(batch)
    learner.module.eval()
    assert learner.loss(batch) == learner.loss(batch)


def test_encoder_decoders_and_knobs_that_contradict_are_refused() -> None:
    for name in NAMES:
        with pytest.raises(Refused, match=f"{name} needs a head"):
            accelerate(target(), draft=registry.load("drafters", name))
        with pytest.raises(Refused, match="give the folder of a checkpoint, or a StatefulHead"):
            registry.load("drafters", name, model=3)
        with pytest.raises(Refused, match="is no decoder language model"):
            registry.method("drafters", name).learner().begin(seq2seq_models.model())
    with pytest.raises(Refused, match="hydra:vocabulary=20: with own_head=False"):
        registry.method("drafters", "hydra").learner(vocabulary=20, own_head=False).begin(target())
