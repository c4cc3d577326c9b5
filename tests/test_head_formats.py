"""Published checkpoints of learned heads, as they are read, against the plain references of `foreign`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import foreign.eagle3
from foreign import FORMATS, Foreign
from foreign.common import V, features, save
from foreign.common import opened as raw
from truedraft import Refused, accelerate, registry
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._learned import Batch, save_learnt
from truedraft.drafters.heads._checkpoint import read_head
from truedraft.drafters.heads._export import files_of
from truedraft.drafters.heads._head import Head
from truedraft.drafters.heads._reader import HeadReader
from truedraft.runtime.heads import CompiledHeadPass, HeadPass, TorchHeadPass
from truedraft.tree import Accepted, Row, Scores

TOKENS, LATER = [5, 17, 3, 44, 9, 60], [7, 31, 12]
Paths = list[tuple[int, ...]]
CHAIN: Paths = [(), (8,), (8, 2), (8, 2, 40)]
TREE: Paths = [(), (8,), (2,), (8, 4), (8, 8), (2, 4), (8, 8, 1), (2, 4, 9)]
METHODS = {"eagle3": "eagle3", "eagle3-speculators": "eagle3", "eagle": "eagle"}
VARIANTS = [(name, variant) for name in METHODS for variant in FORMATS[name].variants]
CONTROLS = [(name, wrong) for name in METHODS for wrong in FORMATS[name].controls]
PASSES = [
    (CompiledHeadPass, torch.float32, 1e-4), (TorchHeadPass, torch.float64, 1e-5),
    pytest.param(TorchHeadPass, torch.float32, 1e-4, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _heads_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head size that compiled passes can compute."""
    monkeypatch.setitem(foreign.eagle3.LAYER, "head_dim", 16)


def opened(name: str, folder: Path, target: PreTrainedModel) -> Head:
    """The head of a folder, as the drafter of its method reads it."""
    method = registry.method("drafters", METHODS[name])
    head: Any = read_head(METHODS[name], folder, method.formats, target, method.rebuilt)
    return head.to(target.dtype).eval()


def written(name: str, folder: Path, dtype: torch.dtype = torch.float32, **variant: Any) -> PreTrainedModel:
    target = FORMATS[name].target(dtype=dtype)
    FORMATS[name].write(folder, target, 0, **variant)
    return target


class Driven:
    """A head that drafts given paths after a text, of which it has read all but the last token."""

    def __init__(self, head: Head, passes: HeadPass, target: PreTrainedModel):
        self.reader, self.target = HeadReader(head), target
        self.reader.passes = passes
        self.row = Row(0, list(TOKENS), len(TOKENS), 20)
        self.reader.start([self.row], 40)
        self._observe(0)

    def append(self, tokens: Sequence[int]) -> None:
        read = len(self.row.tokens) - 1
        self.row.tokens += tokens
        self._observe(read)

    def _observe(self, read: int) -> None:
        """What passes of the target give of the tokens from `read` on, the pending one not among them."""
        tokens = self.row.tokens
        parts = {layer: features(self.target, tokens, [layer])[read:] for layer in self.reader.head.layers}
        count = len(tokens) - 1 - read
        scores = Scores(torch.zeros(1, count, V), {layer: [part] for layer, part in parts.items()}, [0])
        self.reader.observe([self.row], scores, [Accepted(tuple(range(count)), tokens[-1], False)])

    def logits(self, paths: Paths) -> Tensor:
        """(len(paths), V) after each path; with a path its ancestors are given, those of one level together."""
        row = self.row
        self.reader.catch_up([row])
        read = self.reader.tokens_read(row, 8)
        assert read is not None
        growing = GrowingTree(row, row.tokens[read:], len(row.tokens) - 1 - read, 40, 8)
        node, found = {(): growing.root}, dict[tuple[int, ...], Tensor]()
        while growing.frontier:
            here = [next(path for path, at in node.items() if at == one) for one in growing.frontier]
            found |= dict(
                zip(here, self.reader.head.draft_vocabulary.spread(self.reader.expand([growing])), strict=True)
            )
            added = []
            for path in paths:
                if path and path not in node and path[:-1] in here:
                    (node[path],) = growing.add(node[path[:-1]], [path[-1]])
                    added.append(node[path])
            growing.end_level(added)
            self.reader.grown([growing])
        return torch.stack([found[path] for path in paths])


def reference(form: Foreign, folder: Path, target: PreTrainedModel, paths: Paths, more: Sequence[int] = ()) -> Tensor:
    return torch.stack([form.logits(folder, target, [*TOKENS, *more], path)[-1] for path in paths])


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found.nan_to_num(neginf=0), expected.nan_to_num(neginf=0), atol=tolerance, rtol=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("made", "dtype", "tolerance"), PASSES)
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_drafts_are_those_of_the_published_law(
    name: str, variant: str, made: Callable[[Head], HeadPass], dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """A chain, a tree, and a tree after a round in which none of the drafted tokens was accepted."""
    form = FORMATS[name]
    if made is CompiledHeadPass and variant == "narrower":
        pytest.skip("hidden states that are no multiple of sixteen are not compiled")
    target = written(name, tmp_path, dtype, **form.variants[variant])
    head = opened(name, tmp_path, target)
    driven = Driven(head, made(head), target)
    assert_close(driven.logits(CHAIN), reference(form, tmp_path, target, CHAIN), tolerance)
    driven.append(LATER)
    assert_close(driven.logits(TREE), reference(form, tmp_path, target, TREE, LATER), tolerance)
    driven.append(LATER[:1])
    assert_close(driven.logits(TREE), reference(form, tmp_path, target, TREE, [*LATER, *LATER[:1]]), tolerance)


@pytest.mark.parametrize(("name", "wrong"), CONTROLS)
def test_errors_of_readers_would_show(name: str, wrong: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    target = written(name, tmp_path, torch.float64, **form.controls[wrong])
    head = opened(name, tmp_path, target)
    found = Driven(head, TorchHeadPass(head), target).logits(CHAIN)
    law = form.logits(tmp_path, target, TOKENS, CHAIN[-1], wrong=wrong)
    assert (found.softmax(-1) - law.softmax(-1)).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_text_is_that_of_generate(name: str, variant: str, tmp_path: Path) -> None:
    target = written(name, tmp_path, **FORMATS[name].variants[variant])
    ids = torch.tensor([TOKENS])
    expected = target.generate(ids, max_new_tokens=12, do_sample=False)
    for method in (METHODS[name], *(["eagle2"] if name == "eagle" else [])):
        drafter = registry.load("drafters", method, model=str(tmp_path))
        fast = accelerate(target, draft=drafter)
        assert torch.equal(fast.generate(ids, max_new_tokens=12), expected)


@pytest.mark.parametrize(
    ("name", "variant", "convention", "layers"),
    [
        ("eagle3", {}, "default", (2, 4, 5)),
        ("eagle3", dict(ids=(1, 3, 6)), "outputs of blocks", (2, 4, 7)),
        ("eagle3", dict(ids=(4, 6, 8)), "layers", (4, 6, 8)),
        ("eagle3-speculators", dict(ids=(2, 4, 5, 8)), "layers", (2, 4, 5)),
        ("eagle3-speculators", dict(ids=None), "default", (2, 4, 5)),
        ("eagle", {}, "after the final norm", (-1,)),
    ],
)
def test_records_keep_how_the_source_numbers_layers(
    name: str, variant: dict, convention: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    head = opened(name, tmp_path, written(name, tmp_path, **variant))
    record = json.loads(json.dumps(head.record()))
    assert record["convention"] == convention and tuple(record["layers"]) == head.layers == layers
    assert record["source"] == {"eagle3": "SpecForge", "eagle": "SafeAILab"}.get(name, "speculators")


def test_copies_of_the_targets_weights_are_not_kept(tmp_path: Path) -> None:
    target = written("eagle3-speculators", tmp_path)
    assert opened("eagle3-speculators", tmp_path, target).get_input_embeddings() is target.get_input_embeddings()


def changed(folder: Path, config: dict[str, Any], weights: dict[str, Tensor | None]) -> None:
    """Replace entries of a checkpoint; None removes a tensor."""
    settings, found = raw(folder, torch.float32)
    kept = {n: w for n, w in {**found, **weights}.items() if w is not None}
    (folder / "pytorch_model.bin").unlink(missing_ok=True)
    save(folder, {**settings, **config}, kept, "model.safetensors")


@pytest.mark.parametrize(
    ("name", "config", "weights", "message"),
    [
        ("eagle3", {"target_hidden_size": 48}, {}, "its target_hidden_size is 48, that of the target 32"),
        ("eagle3", {"vocab_size": 99}, {}, "its vocab_size is 99, that of the target 97"),
        ("eagle3", {"model_type": "gemma"}, {}, "its layers are of the kind 'gemma'"),
        ("eagle3", {"num_attention_heads": "many"}, {}, "describes no layers of the kind 'llama'"),
        ("eagle3", {"bias": True}, {}, "lacks fc.bias"),
        ("eagle3", {"fc_norm": True}, {}, "lacks fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, {}, "reads 96 numbers, not 2"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}}, {}, "it reads layer 9, but"),
        ("eagle3", {}, {"fc.weight": None}, "it lacks the matrix fc.weight"),
        ("eagle3", {}, {"fc.weight": torch.ones(32, 100)}, "its fc.weight reads 100 numbers"),
        ("eagle3", {}, {"midlayer.hidden_norm.weight": None}, "lacks midlayer.hidden_norm.weight"),
        ("eagle3", {}, {"mask_token": torch.ones(3)}, "has foreign mask_token"),
        ("eagle3", {}, {"norm.weight": torch.ones(16)}, "norm.weight (16,) instead of (32,)"),
        ("eagle3", {}, {"d2t": None}, "it lacks d2t: its lm_head has 41 rows, the target 97 tokens"),
        ("eagle3", {}, {"d2t": torch.zeros(40).long()}, "its d2t is 40, that of the target 41"),
        ("eagle3", {}, {"d2t": torch.arange(41).long() + 60, "t2d": None}, "of the target's 97 tokens"),
        ("eagle3", {}, {"d2t": -torch.arange(41).long(), "t2d": None}, "no ascending ids"),
        ("eagle3", {}, {"t2d": torch.arange(97) < 41}, "its d2t and t2d name different tokens"),
        ("eagle3", {}, {"t2d": torch.arange(96) < 41}, "its vocabulary, by t2d, is 96, that of the target 97"),
        ("eagle3", {"hidden_size": 16}, {}, "it lacks embed_tokens.weight: its hidden size is 16, not 32"),
        ("eagle", {"hidden_size": 48, "head_dim": 8}, {}, "its hidden_size is 48, that of the target 32"),
        ("eagle", {"bias": False}, {}, "has foreign fc.bias"),
        ("eagle", {}, {"layers.0.input_layernorm.weight": torch.ones(32)}, "has foreign"),
        ("eagle3-speculators", {"transformer_layer_config": None}, {}, "has no transformer_layer_config"),
        ("eagle3-speculators", {"norm_before_fc": True, "fc_norm": True}, {}, "has both fc_norm and norm_before_fc"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    name: str, config: dict, weights: dict, message: str, tmp_path: Path
) -> None:
    target = written(name, tmp_path)
    changed(tmp_path, config, weights)
    with pytest.raises(Refused) as error:
        opened(name, tmp_path, target)
    assert message in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_in_no_format_is_refused(tmp_path: Path) -> None:
    target = written("eagle3", tmp_path)
    save(tmp_path, {}, {"other.weight": torch.ones(2)}, "model.safetensors")
    with pytest.raises(Refused, match=r"in no format that it reads .SpecForge's, speculators'."):
        opened("eagle3", tmp_path, target)


@pytest.mark.parametrize(("engine", "layers", "ids"), [
    ("vllm", "1x4x8", [1, 4, 8]), ("vllm", "2x4x8", [2, 4, 8]),
    ("sglang", "2x4x8", [1, 3, 7]), ("sglang", "3x4x6", [3, 4, 6])
])  # fmt: skip
def test_exported_head_is_read_back(engine: str, layers: str, ids: list[int], tmp_path: Path) -> None:
    target = FORMATS["eagle3"].target()
    learner = registry.method("drafters", "eagle3").learner(layers=layers, vocabulary=40)
    learner.begin(target)
    learner.prepare(torch.randint(0, 50, (V,), generator=torch.Generator().manual_seed(1)))
    save_learnt(tmp_path / "own", "eagle3", learner.module, target, learner.config())
    target.save_pretrained(tmp_path / "target")
    out = tmp_path / engine
    own = opened("eagle3", tmp_path / "own", target)
    config, weights = files_of(own, engine)
    save_file(weights, tmp_path / "weights")
    out.mkdir()
    (tmp_path / "weights").rename(out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    assert (
        config["eagle_aux_hidden_state_layer_ids"] == config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
    )
    read = opened("eagle3", out, target)
    assert read.layers == own.layers == tuple(map(int, layers.split("x")))
    for one, other in zip(drafted(own, target), drafted(read, target), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    if engine == "vllm" and ids[0] != 1:
        config.pop("truedraft")
        (out / "config.json").write_text(json.dumps(config))
        plain = FORMATS["eagle3"].logits(out, target, TOKENS, LATER)
        torch.testing.assert_close(drafted(own, target)[0], plain[0], rtol=1e-4, atol=1e-4)


def drafted(head: Head, target: PreTrainedModel) -> Tensor:
    """The logits of a head at the nodes of a tree."""
    driven = Driven(head, TorchHeadPass(head), target)
    return driven.logits(TREE)


def test_heads_without_a_place_in_the_layout_are_refused() -> None:
    target = FORMATS["eagle3"].target()
    for knobs, engine, why in (
        ({}, "vllm", "whole vocabulary"), ({"vocabulary": 40, "layers": "1x4x8"}, "sglang", "begin with 1")
    ):  # fmt: skip
        learner = registry.method("drafters", "eagle3").learner(**knobs)
        learner.begin(target)
        with pytest.raises(Refused, match=why):
            files_of(learner.module, engine)


def test_training_of_eagle_regresses_features_and_their_distributions(tmp_path: Path) -> None:
    """One step, against the published law: the last position of every prefix is that of its drafts."""
    target = written("eagle", tmp_path, torch.float64)
    learner: Any = registry.method("drafters", "eagle").learner(noise=0.0, weight=0.3)
    learner.begin(target)
    learner.module = opened("eagle", tmp_path, target)
    ids = torch.tensor([[*TOKENS, *LATER, 0]])
    read = int(ids.shape[1]) - 1  # the last token is padding
    states = features(target, ids[0].tolist(), [-1])
    loss_mask = torch.arange(read + 1)[None] >= 4
    mask = torch.arange(read + 1)[None] < read
    batch = Batch(ids, mask, loss_mask & mask, {-1: torch.cat([states, states[:1]])[None]})
    head = target.get_output_embeddings().weight.detach()
    expected = []
    for place in range(4, read):  # tokens to predict
        logits = FORMATS["eagle"].logits(tmp_path, target, ids[0, :place].tolist(), [])[-1]
        q, p = logits.log_softmax(-1), (states[place - 1] @ head.T).softmax(-1)
        state = torch.linalg.lstsq(head, logits[:, None]).solution[:, 0]  # the head has more rows than columns
        apart = (state - states[place - 1]).abs()
        smooth = torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
        expected.append(smooth + 0.3 * (p * (p.log() - q)).sum())
    torch.testing.assert_close(learner.loss(batch).double(), torch.stack(expected).mean(), atol=1e-4, rtol=1e-4)
    noisy: Any = registry.method("drafters", "eagle").learner(noise=0.5)
    noise = noisy.noised(torch.zeros(1, read + 1, 32), batch) * read / 512
    assert noise.abs().max() <= 0.5 and noise.max() > 0.4 and noise.min() < -0.4
    with torch.no_grad():
        assert not noisy.noised(torch.zeros(1, read + 1, 32), batch).any(), "there is none in evaluation"


@pytest.mark.parametrize("method", ["eagle", "eagle2"])
def test_both_trees_of_eagle_read_a_head_trained_here(method: str, tmp_path: Path) -> None:
    target = written("eagle", tmp_path / "published")
    head: Any = opened("eagle", tmp_path / "published", target)
    save_learnt(tmp_path / "own", "eagle", head, target, head.record())
    drafter: Any = registry.load("drafters", method, model=str(tmp_path / "own"))
    ids = torch.tensor([TOKENS])
    accelerate(target, draft=drafter).generate(ids, max_new_tokens=4)
    assert all(torch.equal(w, drafter.head.state_dict()[n]) for n, w in head.state_dict().items())


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("eagle", "SafeAILab: it reads the target's layers the last one after the final norm"),
        ("eagle3", "SpecForge: it reads the target's layers 2, "),
        ("eagle3-speculators", "speculators: it reads the target's layers "),
    ],
)
def test_reports_name_the_layers_that_a_foreign_head_reads(name: str, note: str, tmp_path: Path) -> None:
    target = written(name, tmp_path)
    fast = accelerate(target, draft=f"{METHODS[name]}:{tmp_path}+prompt-lookup")
    fast.generate(torch.tensor([TOKENS]), max_new_tokens=3, do_sample=False)
    (found,) = [text for text in fast.report().notes if "in the format of" in text]
    assert f"the head of {METHODS[name]} is in the format of {note}" in found
