"""Neurons chosen by a token: passes equal a plain loop over layers with masked feed-forwards, and text is exact."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import truedraft
from models import RECURRENT, SHARING, ragged
from nets import predictors_of
from test_runtime import BOTH, random_tree, words
from test_views import COMPILED, RUNTIMES, begun, cache_for, check_same_bits, deep, error, target_of
from truedraft import Refused, registry
from truedraft.cli import main
from truedraft.drafters._learned import Batch
from truedraft.drafters.self_._drafter import SelfDrafter
from truedraft.drafters.self_._neurons import Training
from truedraft.runtime import weights
from truedraft.runtime.panels import dequantised, panels
from truedraft.runtime.programs import PROGRAMS
from truedraft.runtime.weights import Weight
from truedraft.targets.decoder import DecoderTarget
from truedraft.views._neurons import highest
from truedraft.views._together import Together
from truedraft.views.deja_vu import DejaVu
from truedraft.views.skip_layers import SkipLayers

KEPT = 0.4
LENGTHS = (13, 1, 6)  # of prompts; behind the second nothing is committed
LAST = ("down_proj", "dense_4h_to_h", "mlp.c_proj", "fc2", "mlp.fc_out", "ffn.down_proj", "w2", "mlp.dense")
REFUSED = r"cannot run some of its neurons: |layers of .* cannot be skipped: "
UNCOMPILED = {"bitnet", "apertus"}  # a norm of the activations; an activation that is not zero at zero


def marks(predictors: Any, layer: int, states: Tensor) -> Tensor:
    """(..., neurons) 0 or 1: by hand, one token after another."""
    first, _, second = predictors.layers[layer]
    made = []
    for x in states.detach().double().reshape(-1, states.shape[-1]):
        x = x / (x.pow(2).mean() + 1e-6).sqrt()
        inner = (first.weight.double() @ x + first.bias.double()).clamp_min(0)
        scores = (second.weight.double() @ inner + second.bias.double()).tolist()
        count = max(round(KEPT * len(scores)), 1)
        chosen = sorted(range(len(scores)), key=lambda g: -scores[g])[:count]
        made.append([float(g in chosen) for g in range(len(scores)) for _ in range(predictors.size)])
    return torch.tensor(made, dtype=states.dtype).view(*states.shape[:-1], -1)


class Masked(nn.Module):
    """The last linear layer of a feed-forward, behind activations of which some are zero."""

    def __init__(self, linear: Any):
        super().__init__()
        self.linear, self.marks = linear, torch.ones(1)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x * self.marks.view(x.shape))


def masked(model: PreTrainedModel, predictors: Any) -> Any:
    """A copy of the model whose layers mask the activations of their feed-forwards by their own input."""
    made: Any = copy.deepcopy(model)
    count = len(predictors.layers)
    layers = next(m for m in made.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    for i, layer in enumerate(layers):
        named = (n for n, m in layer.named_modules() if isinstance(m, nn.Module) and n.endswith(LAST))
        path = next(n for n in named if "attn" not in n)
        outer, _, inner = path.rpartition(".")
        last = Masked(layer.get_submodule(path))
        setattr(layer.get_submodule(outer), inner, last)

        def note(_: Any, args: Any, kwargs: Any, i: int = i, last: Masked = last) -> None:
            last.marks = marks(predictors, i, args[0] if args else kwargs["hidden_states"])

        layer.register_forward_pre_hook(note, with_kwargs=True)
    return made


@torch.no_grad()
def check_against_masked(target: DecoderTarget, tolerance: float, group: int = 1) -> None:
    """Two trees in consecutive passes, a path of the first kept; every node by a forward of the masked model over its
    path alone, behind the keys and values that the whole model has of the prompt."""
    rng, model = random.Random(4), target.model
    predictors = predictors_of(model, group)
    view, plain = DejaVu(predictors, KEPT), masked(model, predictors)
    prompts = [words(rng, n) for n in LENGTHS]
    begun(target, prompts)
    committed = [cache_for(model) for _ in prompts]
    for prompt, cache in zip(prompts, committed, strict=True):
        if prompt[1:]:
            model(torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True)
    behind = [list[int]() for _ in prompts]
    for sizes in ((5, 9, 1), (4, 2, 7), (1, 1, 1)):
        trees = [
            random_tree(rng, prompt[-1] if not text else 3, n)
            for prompt, text, n in zip(prompts, behind, sizes, strict=True)
        ]
        scores = target.score(trees, view).logits
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                text = behind[row] + [tree.tokens[i] for i in tree.path(node)]
                cache = copy.deepcopy(committed[row])
                logits = plain(torch.tensor([text]), past_key_values=cache, use_cache=True).logits[0, -1]
                assert error(scores[row, node], logits) < tolerance, (sizes, row, node)
        paths = [tree.path(len(tree) - 1) for tree in trees]
        target.advance(view, paths)
        for text, tree, path in zip(behind, trees, paths, strict=True):
            text += [tree.tokens[i] for i in path]
    target.cache = None


def by_layers(model: Any, ids: Tensor, predictors: Any = None) -> tuple[list[Tensor], list[Tensor]]:
    """The hidden states of a Llama before each layer and after the last, and the activations of its neurons, of which
    some are left out."""
    body, at = model.model, torch.arange(ids.shape[1])
    x = body.embed_tokens(ids)
    states, active, mask = [x], [], torch.where(at > at[:, None], -torch.inf, 0.0)[None, None].to(x.dtype)
    for i, layer in enumerate(body.layers):
        mlp, turns, given = layer.mlp, body.rotary_emb(x, at[None]), x
        x = x + layer.self_attn(layer.input_layernorm(x), position_embeddings=turns, attention_mask=mask)[0]
        y = layer.post_attention_layernorm(x)
        active.append(nn.functional.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
        if predictors is not None:
            active[-1] = active[-1] * marks(predictors, i, given)
        x = x + mlp.down_proj(active[-1])
        states.append(x)
    return states, active


@torch.no_grad()
def test_the_masked_model_is_a_loop_over_layers() -> None:
    """The oracle of the other tests: Llama, layer by layer, without any hook."""
    model: Any = deep("llama", torch.float64)
    predictors, ids = predictors_of(model), torch.tensor([[5, 6, 7, 5, 9]])
    by_hand = model.lm_head(model.model.norm(by_layers(model, ids, predictors)[0][-1]))
    assert error(masked(model, predictors)(ids).logits, by_hand) < 1e-9
    assert error(model(ids).logits, by_hand) > 0.1


@pytest.mark.covering(1)
@pytest.mark.parametrize("group", [1, 2, 8, 16])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_logits_are_those_of_masked_feed_forwards(runtime: str, group: int) -> None:
    """Of single neurons and of groups, in and across the panels in which weights lie."""
    check_against_masked(target_of(deep("llama", torch.float32), runtime), 1e-3, group)


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", RUNTIMES[:2])
@pytest.mark.parametrize("architecture", sorted(PROGRAMS.keys() - RECURRENT.keys() - SHARING))
def test_neurons_of_every_architecture_or_a_refusal(architecture: str, runtime: str) -> None:
    """But for mixtures of experts and, by the compiled pass, what lies between the linear layers of a feed-forward."""
    target = target_of(deep(architecture, torch.float32), runtime)
    mixture = any("expert" in name for name, _ in target.model.named_modules())
    try:
        target.check_view(DejaVu(predictors_of(target.model), KEPT))
    except Refused as refused:
        assert re.search(REFUSED, str(refused))
        assert mixture or (runtime == "auto" and architecture in UNCOMPILED)
    else:
        assert not mixture and (runtime != "auto" or architecture not in UNCOMPILED)
        check_against_masked(target, 1e-3)


@pytest.mark.parametrize("runtime", RUNTIMES[:2])
def test_text_is_the_model_s_own(runtime: str) -> None:
    """Alone, beside another view, before a lookup, over it, and as the lossy model; all neurons are the model."""
    model = deep("llama", torch.float32)
    inputs = ragged(model, 3)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    predictors = predictors_of(model)
    for view, accepted in ((DejaVu(predictors, KEPT), None), (DejaVu(predictors, 1.0), 1.0)):
        draft = SelfDrafter(view, nodes=4, depth=4)
        fast = truedraft.accelerate(model, draft=draft, control="fixed", runtime=runtime)
        assert torch.equal(fast.generate(**inputs, max_new_tokens=20, do_sample=False), plain)
        assert accepted is None or fast.report().acceptance_rate == accepted


@COMPILED
@BOTH
@pytest.mark.parametrize("group", [1, 16])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "jais2"])
def test_a_node_has_the_same_bits_however_it_is_scored(architecture: str, group: int, dtype: torch.dtype) -> None:
    """The weights that other nodes need are read with its own, and add zeros."""
    model = deep(architecture, dtype)
    check_same_bits(model, DejaVu(predictors_of(model, group), KEPT))


@COMPILED
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_groups_of_sixteen_are_read_in_fewer_bits(bits: str) -> None:
    """By rounded weights in the masked model; single neurons are refused."""
    model = deep("llama", torch.float32)
    rounded, name = copy.deepcopy(model), bits + "-self"
    predictors, tree = predictors_of(model, 16), random_tree(random.Random(1), 7, 12)
    for linear in (m for m in rounded.modules() if isinstance(m, nn.Linear)):
        linear.weight.data = dequantised(panels(weights.rounded(Weight(linear.weight.data, None, None), int(bits[3:]))))
    view = Together((DejaVu(predictors, KEPT), registry.load("views", name)))
    scores = begun(DecoderTarget(model, strict=True), [[7]]).score([tree], view).logits[0]
    plain = masked(rounded, predictors)
    for node in range(len(tree)):
        with torch.no_grad():
            logits = plain(torch.tensor([[tree.tokens[i] for i in tree.path(node)]])).logits[0, -1]
        assert error(scores[node], logits) < 1e-3
    with pytest.raises(Refused, match=r"neurons that are chosen by 1 are read .* as they are, not in \d bits"):
        DecoderTarget(model).check_view(Together((DejaVu(predictors_of(model)), registry.load("views", name))))


@COMPILED
def test_halves_of_layers_are_skipped_beside() -> None:
    """The predictor reads the input of its layer, whatever of that runs."""
    model = deep("llama", torch.float32)
    predictors, tree = predictors_of(model), random_tree(random.Random(1), 7, 12)
    views = Together((DejaVu(predictors, KEPT), SkipLayers("1a;2f;3")))
    mine, stock = (begun(target_of(model, r), [[7]]).score([tree], views).logits for r in ("auto", "stock"))
    assert error(mine, stock) < 1e-3


def test_the_share_counts_the_neurons_that_run() -> None:
    model: Any = deep("llama", torch.float32)
    view, layers = DejaVu(predictors_of(model), 0.34), model.model.layers
    whole = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    of_neurons = sum(p.numel() for layer in layers for p in layer.mlp.parameters())
    added = sum(p.numel() for p in view.model.parameters())
    expected = (whole - of_neurons * 2 / 3 + added) / whole
    assert DecoderTarget(model, "stock").share(view) == pytest.approx(expected)


def test_equal_scores_are_chosen_in_order() -> None:
    assert highest(torch.tensor([[1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]), 2).tolist() == [
        [True, True, False, False], [True, True, False, False]
    ]  # fmt: skip


# ---------------------------------------------------------------- training


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predictors of `nano-draft`, after some seconds."""
    folder = tmp_path_factory.mktemp("deja-vu")
    data, out = folder / "texts.txt", folder / "out"
    data.write_text("once upon a time there was a dog\nthe cat sat on a mat\n" * 6)
    given = ["--target", "nano-draft", "--data", str(data), "--max-new-tokens", "24", "--minutes", "0.02"]
    assert main(["train", "deja-vu:rank=16", *given, "--out", str(out)]) == 0
    return out


def test_a_trained_checkpoint_drafts(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for spec in (f"deja-vu:{trained}", f"deja-vu:{trained},kept=0.25+window-kv", f"deja-vu:{trained}<suffix"):
        assert main(["generate", "nano-draft", "once", "--max-new-tokens", "9", "--draft", spec]) == 0
    lossy = registry.lossy_view(f"lossy/deja-vu:{trained},kept=0.9")
    assert lossy.reduction(1).neurons.kept == 0.9
    with pytest.raises(Refused, match=r"deja-vu was trained for another model \(.*\): train it again"):
        truedraft.accelerate(deep("llama", torch.float32), draft=f"deja-vu:{trained}")


def test_training_learns_what_matters() -> None:
    """Recall rises far above that of a random choice; labels are those computed by hand."""
    model: Any = deep("llama", torch.float32)
    learner = Training(rank=32, share=0.34, group=16)
    learner.begin(model)
    ids = torch.randint(3, 60, (8, 24), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids, dtype=torch.bool), {})
    states, positive = learner._observed(batch)[1]
    x, active = (found[1].detach().flatten(0, 1) for found in by_layers(model, ids))
    assert error(states, x) < 1e-4
    added = (active[:, None] * model.model.layers[1].mlp.down_proj.weight).norm(dim=1)  # by neuron
    largest = added.unflatten(1, (-1, 16)).norm(dim=2).argmax(1)
    assert torch.equal(positive.int().argmax(1), largest) and torch.equal(positive.sum(1), torch.ones(len(x)))
    before = learner.evaluate([batch])
    optimiser = torch.optim.Adam(learner.module.parameters(), 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        learner.loss(batch).backward()
        optimiser.step()
    after = learner.evaluate([batch])
    assert after["recall"] > 0.75 > before["recall"]
    assert after["agreement"] > before["agreement"] and after["tokens_per_pass"] > before["tokens_per_pass"]
