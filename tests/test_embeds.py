"""Probes with embeddings: a pass uses their vectors instead of the embeddings of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import seq2seq_models
import truedraft
from models import ARCHITECTURES, BY_TOKEN, V, ragged, tiny
from test_graphs import ON_BOTH, capture, model_on, traced, uncaptured  # noqa: F401
from test_runtime import made
from truedraft import DraftTree, Refused
from truedraft.runtime import native
from truedraft.runtime.programs import PROGRAMS
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Prompt, Row

from drafters_for_tests import Noise  # isort: skip

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5]]


def probed(rng: random.Random, nodes: int) -> DraftTree:
    """A random tree whose last nodes and some others are probes."""
    parent = (-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, nodes)))
    probes = {nodes - 1} if nodes > 1 else set()
    for i in range(1, nodes):
        if parent[i] in probes or rng.random() < 0.3:
            probes.add(i)
    return DraftTree(tuple(rng.randrange(V) for _ in range(nodes)), parent, probes=frozenset(probes))


def as_vectors(model: Any, tree: DraftTree) -> DraftTree:
    """The same tree with its probes as embeddings of their tokens; the token ids there are then irrelevant."""
    with torch.no_grad():
        rows = model.get_input_embeddings()(torch.tensor(tree.tokens, device=model.device))
        if model.config.model_type == "falcon_h1":
            rows = rows * model.config.embedding_multiplier
    tokens = tuple(0 if i in tree.probes else token for i, token in enumerate(tree.tokens))
    return replace(tree, tokens=tokens, embeds={i: rows[i] for i in tree.probes})


def scored(target: DecoderTarget, trees: Sequence[DraftTree]) -> list[Tensor]:
    target.reserve(len(trees), 64)
    target.prefill([Prompt(torch.tensor(p, device=target.device)) for p in PROMPTS[: len(trees)]])
    logits = target.score(trees).logits
    target.cache = None
    return [logits[row, : len(tree)].clone() for row, tree in enumerate(trees)]


def passes(architecture: str, target: DecoderTarget) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Logits of trees with probes that are tokens, and that are the same tokens' embeddings."""
    found = []
    for seed in range(3):
        rng = random.Random(seed)
        trees = [probed(rng, n) for n in (7, 4, 9)][: 3 - seed]
        found.append((scored(target, trees), scored(target, [as_vectors(target.model, tree) for tree in trees])))
    return found


@pytest.mark.covering(1)
@pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", sorted(PROGRAMS.keys() - BY_TOKEN))
def test_the_compiled_pass_reads_vectors_bit_for_bit(architecture: str, dtype: torch.dtype) -> None:
    target = made(tiny(architecture, dtype), "auto", strict=True)
    for tokens, vectors in passes(architecture, target):
        assert all(torch.equal(a, b) for a, b in zip(tokens, vectors, strict=True))


@pytest.mark.covering(1)
@ON_BOTH
@pytest.mark.parametrize("graphs", [False, True], ids=["forward", "graphs"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - BY_TOKEN))
def test_the_forward_reads_vectors(architecture: str, graphs: bool, device: str, capture: Any) -> None:  # noqa: F811
    if graphs:
        capture(traced if architecture == "llama" else uncaptured)
    target = DecoderTarget(model_on(device, architecture), "auto" if graphs else "stock")
    assert target.runner.name == ("captured CUDA graphs" if graphs else "transformers forward")
    for tokens, vectors in passes(architecture, target):
        for a, b in zip(tokens, vectors, strict=True):
            assert (a - b).abs().max() < 1e-5 * max(a.abs().max(), 1)


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_a_vector_that_is_no_token_matches_a_plain_forward(runtime: str) -> None:
    model = tiny("llama", torch.float32)
    target, rng = DecoderTarget(model, runtime), random.Random(5)
    trees = [probed(rng, n) for n in (8, 5, 9)]
    size = model.config.hidden_size
    trees = [replace(tree, embeds={i: torch.randn(size) for i in tree.probes if i % 3}) for tree in trees]
    assert sum(len(tree.embeds) for tree in trees) > 4
    for prompt, tree, logits in zip(PROMPTS, trees, scored(target, trees), strict=True):
        for node in range(len(tree)):
            path = tree.path(node)
            with torch.no_grad():
                inputs = model.get_input_embeddings()(
                    torch.tensor([prompt[:-1] + [tree.tokens[i] for i in path]])
                ).clone()
                for place, i in enumerate(path, len(prompt) - 1):
                    inputs[0, place] = tree.embeds.get(i, inputs[0, place])
                plain = model(inputs_embeds=inputs, use_cache=False).logits[0, -1]
            assert torch.allclose(logits[node], plain, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("architecture", sorted(BY_TOKEN))
def test_vectors_are_refused_where_layers_have_embeddings_of_tokens(architecture: str, runtime: str) -> None:
    target = DecoderTarget(tiny(architecture, torch.float32), runtime)
    with pytest.raises(Refused, match="an embedding of each token in every layer"):
        scored(target, [as_vectors(target.model, probed(random.Random(5), 8))] * len(PROMPTS))


class Vectors(Noise):
    """Noise with a probe below each root that is no token; or, where `wrong`, a draft that is none."""

    size, wrong = 32, False

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        vector = torch.full((self.size,), 0.5)
        if self.wrong:
            return [replace(DraftTree.chain(row.tokens[-1], [1]), embeds={1: vector}) for row in rows]
        return [tree.with_probes([0], [0], {0: vector}) for tree in super().propose(rows, budget)]

    @property
    def width(self) -> int:
        return super().width + 1


def test_text_with_such_probes_matches_generate() -> None:
    model = tiny("llama", torch.float32)
    drafter, inputs = Vectors(vocabulary=V), ragged(model, 3)
    drafter.size = model.config.hidden_size
    settings = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    fast = truedraft.accelerate(model, draft=drafter, control="fixed")
    assert torch.equal(fast.generate(**inputs, **settings), model.generate(**inputs, **settings))
    drafter.size = 3
    with pytest.raises(ValueError, match=r"^the embedding of a probe is \(3,\), the model's are \d+ wide$"):
        fast.generate(**inputs, **settings)


def test_only_probes_may_have_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.tree.CHECKS", False)
    drafter = Vectors(vocabulary=V)
    drafter.wrong = True
    fast = truedraft.accelerate(tiny("llama", torch.float32), draft=drafter, control="fixed")
    with pytest.raises(ValueError, match=r"^embeddings are for probes, \[\], and nodes \[1\] have one$"):
        fast.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=8, do_sample=False)


def test_an_encoder_decoder_refuses_them() -> None:
    fast = truedraft.accelerate(seq2seq_models.model(), draft=Vectors(vocabulary=20), control="fixed")
    with pytest.raises(Refused, match=r"^probes with embeddings are for decoder language models: "):
        fast.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False)
