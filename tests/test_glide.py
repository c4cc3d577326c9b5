"""GliDe: drafts and training against the drafter run plainly, in matrices, over the keys of a plain forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import truedraft
from models import tiny
from test_heads import learner_of
from test_views import COMPILED
from truedraft import Refused, registry
from truedraft.caches.rows import RowCache
from truedraft.drafters._learned import Batch, save_learnt
from truedraft.drafters.heads._crossing import CompiledCrossingPass, CrossingPass, CrossingReader
from truedraft.drafters.heads.glide import GlideHead, Training
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.overrides import overridden
from truedraft.runtime.rotations import _constant, cached_keys
from truedraft.runtime.selecting import SeenQueries
from truedraft.runtime.tapping import blocks_of
from truedraft.runtime.weights import NotCompilable
from truedraft.targets.hostable import layer_types

# by the rotary embeddings of the architectures: whole heads, by kind of layer, none, and by neighbours
ARCHITECTURES = ["llama", "gemma3_text", "gpt2", "cohere"]
RUNTIMES = [pytest.param("auto", marks=COMPILED), "stock"]
WINDOW = 9  # of the tiny models with windows


def target(architecture: str = "llama") -> PreTrainedModel:
    return tiny(architecture, torch.float32, layers=3)


def trained(model: PreTrainedModel, **knobs: Any) -> Any:
    return learner_of("glide", model, **knobs).module.eval()


def rotated(model: Any, layer: int, query: Tensor) -> Tensor:
    """Queries (1, heads, n, size) of positions from 0 on, by the model's own functions."""
    if model.config.model_type == "gpt2":
        return query
    kind = (model.config.layer_types[layer],) if model.config.model_type == "gemma3_text" else ()
    cos, sin = model.model.rotary_emb(query, torch.arange(query.shape[2])[None], *kind)
    found: Tensor = sys.modules[type(model).__module__].apply_rotary_pos_emb(query, query, cos, sin)[0]
    return found


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Of each query over what it sees; (1, heads, n, size), one query and one head at a time."""
    share, found = query.shape[1] // key.shape[1], torch.zeros(*query.shape[:3], value.shape[-1])
    for head in range(query.shape[1]):
        for i, places in enumerate(seen):
            if places.any():
                keys, values = key[0, head // share][places], value[0, head // share][places]
                weights = (keys @ query[0, head, i] / query.shape[-1] ** 0.5).softmax(0)
                found[0, head, i] = weights @ values
    return found


@torch.no_grad()
def plain_logits(model: Any, head: GlideHead, tokens: Sequence[int], bounds: Sequence[int]) -> Tensor:
    """(n, draft vocabulary) logits after each token, which sees the target's keys before its bound."""
    count, cache = len(tokens), DynamicCache()
    model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 3
    places = torch.arange(count)
    past = places <= places[:, None]
    x = head.embed(torch.tensor([tokens]))
    rotary = head.rotary(x, places[None])
    for i, layer in enumerate(head.blocks):
        index = len(kinds) - len(head.blocks) + i
        seen = places < torch.tensor(bounds)[:, None]
        if kinds[index] == "sliding_attention":
            seen &= places[:, None] - places < WINDOW
        x = x + layer.self_attn(layer.input_layernorm(x), rotary, lambda q, k, v: attention(q, k, v, past))
        kept: Any = cache.layers[index]
        given = layer.cross_attention_layernorm(x)
        query = layer.cross_attn.q_proj(given).unflatten(-1, (-1, kept.keys.shape[-1])).transpose(1, 2)
        crossed = attention(rotated(model, index, query), kept.keys, kept.values, seen)
        x = x + layer.cross_attn.o_proj(crossed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return head.logits(x)[0]


def check_drafts(architecture: str, runtime: str, spec: str = "glide", blocks: int = 1, **knobs: Any) -> None:
    """In batches of rows of different lengths that leave one by one, in other slots than the target's."""
    model, compared = target(architecture), 0
    head = trained(model, blocks=blocks)
    expand = CrossingReader.expand

    def checked(self: CrossingReader, growing: Sequence[Any]) -> Tensor:
        nonlocal compared
        logits = expand(self, growing)
        at = [(tree, node) for tree in growing for node in tree.frontier]
        for (tree, node), found in zip(at, logits, strict=True):
            known, path = tree.row.tokens, tree.path(node)
            bounds = [*range(len(known)), *[len(known) - 1] * len(path)]
            plain = plain_logits(model, head, [*known, *path], bounds)[-1]
            torch.testing.assert_close(found, plain, rtol=2e-4, atol=2e-4)
            compared += 1
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrossingReader, "expand", checked)
        start = CrossingReader.start
        patch.setattr(CrossingReader, "start", lambda self, rows, more: start(self, rows[::-1], more))
        draft = registry.load("drafters", "glide", model=head, quantize="none", **(knobs if spec == "glide" else {}))
        draft = draft if spec == "glide" else registry.load("drafters", spec, source=draft, **knobs)
        fast = truedraft.accelerate(model, draft=draft, control="fixed", runtime=runtime)
        ids = torch.randint(1, 61, (3, 24), generator=torch.Generator().manual_seed(2))
        mask = torch.tensor([[1] * 24, [0] * 23 + [1], [0] * 2 + [1] * 22])
        given: dict[str, Any] = dict(max_new_tokens=10, do_sample=False, eos_token_id=20, pad_token_id=0)
        expected = model.generate(ids, attention_mask=mask, **given)
        assert torch.equal(fast.generate(ids, attention_mask=mask, **given), expected)
    assert compared > 20


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_drafts_read_the_keys_of_the_target(runtime: str, architecture: str) -> None:
    check_drafts(architecture, runtime)


@COMPILED
def test_drafts_of_several_layers_in_trees() -> None:
    check_drafts("gemma3_text", "auto", blocks=2, nodes=6, top_k=3, depth=4)


@COMPILED
@pytest.mark.parametrize("spec", ["cape", "opt-tree"])
def test_other_shapes_grow_from_it(spec: str) -> None:
    check_drafts("llama", "auto", spec)


class Passes:
    """Every pass of a head compiled, in torch, and in torch in fp64, each over its own cache.

    errors: of the laws of all nodes, (nodes,) the largest difference from fp64, compiled and in torch. gaps: between
    the two likeliest tokens in fp64. alike: whether the likeliest token of the compiled pass is that of fp64.
    """

    name = "three"

    def __init__(self, head: GlideHead):
        exact = deepcopy(head).double()
        self.sides = CompiledCrossingPass(head), CrossingPass(head), CrossingPass(exact)
        self.errors: tuple[list[Tensor], list[Tensor]] = [], []
        self.gaps, self.alike = list[Tensor](), list[Tensor]()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("target", "slot_rows"):
            for side in self.sides:
                setattr(side, name, value)

    def attach(self, cache: RowCache | None) -> None:
        compiled, *others = self.sides
        compiled.attach(cache)
        for side in others:
            if cache is not None:
                side.attach(self.followed(cache, next(side.head.parameters()).dtype))

    @staticmethod
    def followed(cache: RowCache, dtype: torch.dtype) -> RowCache:
        """A copy of a cache in a dtype, whose rows move as those of the first do."""
        copied, release = RowCache(len(cache.layers), cache.cursor.slots, cache.cursor.capacity), cache.release
        for layer, kept in zip(copied.layers, cache.layers, strict=True):
            layer.lazy_initialization(kept.keys.to(dtype), kept.values.to(dtype))
            layer.keys.copy_(kept.keys)
            layer.values.copy_(kept.values)

        def both(slot: int) -> None:
            copied.lengths[:] = cache.lengths
            copied.release(slot)
            release(slot)

        cache.release = both  # type: ignore[method-assign]
        return copied

    def read(self, nodes: Nodes, embeds: Tensor, features: Tensor) -> None:
        for side in self.sides:
            side.read(nodes, embeds, features)

    def run(self, nodes: Nodes, embeds: Tensor, features: Tensor, gather: Sequence[int]) -> tuple[Tensor, Tensor]:
        states, logits = self.sides[0].run(nodes, embeds, features, gather)
        others = [side.run(nodes, embeds, features, gather)[1] for side in self.sides[1:]]
        compiled, plain, exact = (found.double().softmax(-1) for found in (logits, *others))
        for errors, found in zip(self.errors, (compiled, plain), strict=True):
            errors.append((found - exact).abs().amax(-1))
        best = exact.topk(2).values
        self.gaps.append(best[:, 0] - best[:, 1])
        self.alike.append(compiled.argmax(-1) == exact.argmax(-1))
        return states, logits


@COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_compiled_pass_computes_what_torch_does(architecture: str, learnt: bool, dtype: torch.dtype) -> None:
    """Of random and of trained weights, in trees of rows of which one has a single token: as near to fp64 as torch is,
    with the same likeliest tokens where two are not nearer to each other than the rounding of either."""
    model: Any = tiny(architecture, dtype, layers=3)
    head = trained(model, blocks=2)
    if learnt:
        torch.manual_seed(0)
        learner = Training(blocks=2)
        learner.begin(model.float())
        _, batch = responses(model, 26)
        fitted(learner, batch, 25, lambda: learner.loss(batch))
        model, head = model.to(dtype), learner.module.to(dtype).eval()
    head.runner = passes = Passes(head)
    draft = registry.load("drafters", "glide", model=head, nodes=7, top_k=3, depth=4)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    ids = torch.randint(1, 61, (3, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1] * 40, [0] * 39 + [1], [0] * 9 + [1] * 31])
    given: dict[str, Any] = dict(max_new_tokens=9, do_sample=False, eos_token_id=20, pad_token_id=0)
    fast.generate(ids, attention_mask=mask, **given)
    compiled, plain, gaps, alike = (torch.cat(found) for found in (*passes.errors, passes.gaps, passes.alike))
    assert len(compiled) > 60
    assert compiled.mean() < 2 * plain.mean() + 1e-7
    assert compiled.max() < 3 * plain.max() + 1e-6
    assert compiled.max() < (1e-4 if dtype == torch.float32 else 0.1)
    clear = gaps > 2 * torch.maximum(compiled, plain)
    assert clear.double().mean() > 0.3
    assert alike[clear].all()


@COMPILED
def test_heads_without_a_compiled_pass_run_in_torch() -> None:
    """Of a target whose heads have a size that vectors do not hold; the text is its own."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).eval()
    draft = registry.load("drafters", "glide", model=trained(model))
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    assert type(fast.drafter.reader.passes) is CrossingPass  # type: ignore[attr-defined]
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=9, do_sample=False), expected)


def test_values_of_another_size_than_keys_have_no_compiled_pass() -> None:
    head = trained(target())
    source = head.sources[0]
    head.sources = [replace(source, keys=replace(source.keys, value_size=2 * source.keys.size))]
    with pytest.raises(NotCompilable):
        CompiledCrossingPass(head)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("blocks", [1, 2])
def test_training_computes_what_drafts_do(architecture: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of blocks that begin at a random place, of which each token sees what was before its block."""
    model = target(architecture)
    learner = learner_of("glide", model, blocks=blocks, block_size=4)
    texts = torch.randint(1, 61, (2, 19), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(19) < torch.tensor([19, 14])[:, None]
    learnt = mask & (torch.arange(19) >= 6)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(1))
    loss = learner.loss(Batch(texts, mask, learnt, {}))
    bounds = [0, 0, 0, *(start for start in (3, 7, 11, 15) for _ in range(4))][:18]
    losses = []
    for text, counted in zip(texts, learnt, strict=True):
        plain = plain_logits(model, learner.module, text[:-1].tolist(), bounds)
        losses.append(cross_entropy(plain, text[1:], reduction="none")[counted[1:]])
    torch.testing.assert_close(loss, torch.cat(losses).mean(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "architecture",
    [*ARCHITECTURES, "glm", "phi", "gpt_neox", "nanochat", "falcon", "qwen3_vl_text", "llama4_text"],
)
def test_queries_of_the_model_are_rotated_like_its_keys(architecture: str) -> None:
    """The rotation that is found of the keys of one state turns that state's own query into those of all positions."""
    model: Any = tiny(architecture, torch.float32)
    count = len(layer_types(model))
    blocks = blocks_of(model, count)
    assert blocks is not None
    for layer in range(count):
        keys = cached_keys(model, layer, count)
        with torch.no_grad(), SeenQueries() as seen, overridden([_constant(blocks[layer])]):
            model.base_model(input_ids=torch.tensor([[5, 9, 2, 33, 7, 60, 41, 8]]), use_cache=False)
        query = seen.queries[layer]
        again = keys.rotation(query[:, :, :1].expand_as(query), torch.arange(8))
        scale = query[:, :, :1].norm() / again[:, :, :1].norm()  # cosines of some begin below one
        torch.testing.assert_close(again * scale, query, rtol=1e-3, atol=1e-3)


def responses(model: PreTrainedModel, count: int) -> tuple[Tensor, Batch]:
    ids = torch.randint(1, 61, (4, 5), generator=torch.Generator().manual_seed(4))
    texts = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)  # type: ignore[operator]
    ones = torch.ones_like(texts, dtype=torch.bool)
    return ids, Batch(texts, ones, ones & (torch.arange(5 + count) >= 5), {})


def fitted(learner: Any, batch: Batch, steps: int, loss: Callable[[], Tensor]) -> list[float]:
    optimizer, losses = torch.optim.Adam(learner.module.parameters(), 0.01), list[float]()
    for _ in range(steps):
        optimizer.zero_grad()
        found = loss()
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


@pytest.mark.parametrize("knobs", [{}, {"loss_name": "kl", "vocabulary": 30}])
def test_acceptance_in_training_is_that_in_serving(knobs: dict[str, Any]) -> None:
    """After a training that leaves the target's weights as they were."""
    model = target()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids, batch = responses(model, 26)
    torch.manual_seed(0)
    learner = Training(**knobs)
    learner.begin(model)
    learner.prepare(batch.ids[:, 5:].flatten().bincount(minlength=61))
    losses = fitted(learner, batch, 40, lambda: learner.loss(batch))
    assert sum(losses[-5:]) < sum(losses[:5]) * 0.7
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    measured: Any = learner.evaluate([batch])
    draft = registry.load("drafters", "glide", model=learner.module.eval())
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    passes = tokens = 0
    for row in ids:
        fast.generate(row[None], max_new_tokens=26, do_sample=False, eos_token_id=None)
        report = fast.report()
        tokens, passes = tokens + report.tokens, passes + report.row_passes
    assert measured["tokens_per_pass"] > 1.5
    rows = len(ids)  # whose first token is that of the prompt's pass
    assert (tokens - rows) / (passes - rows) == pytest.approx(measured["tokens_per_pass"], rel=0.05)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("deepseek_v3", "the keys of DeepseekV3ForCausalLM cannot be read: it keeps latents in their place"),
        ("gemma3n_text", "layer 3 has no keys and values of every position"),
        ("qwen3_5_text", "it keeps states of the text instead"),
        ("phi3_longrope", "their rotation changes with the length of a text"),
    ],
)
def test_targets_without_plain_keys_are_refused(architecture: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        Training().begin(tiny(architecture, torch.float32))


def test_what_has_nothing_to_read_is_refused() -> None:
    model = target()
    with pytest.raises(Refused, match="each block reads a layer of the target, which has 3"):
        Training(blocks=4).begin(model)
    with pytest.raises(Refused, match="drafts for the whole model, and this one generates under lossy/skip-layers"):
        truedraft.accelerate(
            model, draft=registry.load("drafters", "glide", model=trained(model)), view="lossy/skip-layers:layers=1"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_of_one_model(tmp_path: Path, dtype: torch.dtype) -> None:
    """It drafts as the head that was saved, and is refused for a target of other sizes."""
    model = tiny("llama", dtype, layers=3)
    learner = learner_of("glide", model, blocks=2, vocabulary=40)
    save_learnt(tmp_path, "glide", learner.module, model, learner.config(), dtype)
    ids, trees = torch.tensor([[5, 6, 7, 8]]), []
    for given in (learner.module.eval(), str(tmp_path)):
        draft: Any = registry.load("drafters", "glide", model=given)
        fast = truedraft.accelerate(model, draft=draft, control="fixed")
        proposed = list[Any]()
        propose = draft.propose
        draft.propose = lambda *args, p=propose, kept=proposed: kept.extend(made := p(*args)) or made
        found = fast.generate(ids, max_new_tokens=9, do_sample=False)
        assert torch.equal(found, model.generate(ids, max_new_tokens=9, do_sample=False))  # type: ignore[operator]
        trees.append([tree.tokens for tree in proposed])
    assert trees[0] == trees[1]
    assert max(map(len, trees[0])) == 6
    with pytest.raises(Refused, match="was trained for another model"):
        other = tiny("llama", torch.float32, vocabulary=53)
        truedraft.accelerate(other, draft=registry.load("drafters", "glide", model=str(tmp_path)))
