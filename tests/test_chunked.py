"""Llama 4: attention within chunks of positions, and queries scaled by their positions."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

import truedraft
from models import ARCHITECTURES, V
from nets import node_net
from truedraft import DraftTree, Refused
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Prompt

CHUNK = 7
SETTINGS = ARCHITECTURES["llama"] | dict(
    head_dim=8, num_local_experts=4, num_experts_per_tok=2, intermediate_size_mlp=40, moe_layers=[1],
    no_rope_layers=[1, 0], attention_chunk_size=CHUNK, attn_scale=0.5,
)  # fmt: skip


def model_of(floor_scale: int) -> Llama4ForCausalLM:
    torch.manual_seed(7)
    model = Llama4ForCausalLM(Llama4TextConfig(**SETTINGS, floor_scale=floor_scale)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model


@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("floor_scale", [3, 8192])
def test_nodes_of_rows_of_different_lengths_are_those_of_a_plain_forward(floor_scale: int, runtime: str) -> None:
    """Trees cross the ends of chunks, and of scales."""
    model, rng = model_of(floor_scale), random.Random(3)
    prompts = [[rng.randrange(V) for _ in range(n)] for n in (CHUNK - 3, 2 * CHUNK + 2, 1)]
    parents = (-1, 0, 0, 1, 2, 2, 3, 5, 7, 8)
    trees = [DraftTree((prompt[-1], *(rng.randrange(V) for _ in parents[1:])), parents) for prompt in prompts]
    target = DecoderTarget(model, runtime)
    target.reserve(3, 64)
    target.prefill([Prompt(torch.tensor(prompt)) for prompt in prompts])
    scored = target.score(trees).logits
    for prompt, tree, logits in zip(prompts, trees, scored, strict=True):
        for node in range(len(tree)):
            path = prompt[:-1] + [tree.tokens[i] for i in tree.path(node)]
            with torch.no_grad():
                plain = model(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1]
            assert (logits[node] - plain).abs().max() < 1e-4 * plain.std()


@pytest.mark.parametrize("name", ["oracle", "noise"])
def test_drafts_give_the_text_of_generate(name: str) -> None:
    assert node_net(model_of(8192), name, tolerance=1e-4) > 50


def test_padding_is_refused_where_indices_scale_queries() -> None:
    fast = truedraft.accelerate(model_of(30))
    ids, mask = torch.randint(3, V, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    given = dict(input_ids=ids, do_sample=False, pad_token_id=0)
    with pytest.raises(Refused, match=r"prompts of 7 to 12 tokens and 19 new ones reach past 29, .* of one length"):
        fast.generate(**given, attention_mask=mask, max_new_tokens=19)
    for one, steps in ((mask, 18), (torch.ones_like(mask), 40)):
        text = fast.generate(**given, attention_mask=one, max_new_tokens=steps)
        assert torch.equal(text, fast.model.generate(**given, attention_mask=one, max_new_tokens=steps))
