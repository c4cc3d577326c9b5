"""Rotary frequencies that change with the length of a text: each side of the change is hosted, crossing is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import truedraft
from arrivals import pieces_of
from drafters_for_tests import Noise
from models import RECURRENT, V, ragged, tiny
from nets import RULES, text_net
from truedraft import DraftTree, Refused
from truedraft.targets.decoder import DecoderTarget, Prompt

LAST = 40  # of the tiny models: the last length that is read with short factors
LONGROPE = ["phi3_longrope", "llama_longrope"]


def words(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    phrase = [rng.randrange(3, V) for _ in range(9)]
    return (phrase * (length // 9 + 1))[:length]


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts."""
    rows = [[0] * (max(lengths) - n) + words(n, n) for n in lengths]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor([[0] * (max(lengths) - n) + [1] * n for n in lengths]),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["oracle", "noise", "draft-model"])
@pytest.mark.parametrize("lengths", [(5, 11, 16), (41, 55, 48), (40,)], ids=["short", "long", "one step"])
@pytest.mark.parametrize("architecture", LONGROPE)
def test_text_on_either_side(architecture: str, lengths: tuple[int, ...], name: str, rule: str) -> None:
    steps = LAST + 1 - max(lengths) if max(lengths) <= LAST else 30
    text_net(tiny(architecture, torch.float32), name, batch(*lengths), max_new_tokens=steps, **RULES[rule])


@torch.no_grad()
@pytest.mark.parametrize("architecture", LONGROPE)
def test_nodes_of_rows_on_both_sides_in_one_pass(architecture: str) -> None:
    model, tree = tiny(architecture, torch.float32), DraftTree((5, 9, 8, 7, 6), (-1, 0, 0, 1, 2))
    target = DecoderTarget(model)
    prompts = [words(n, n) for n in (50, 12, 41)]
    target.reserve(3, 64)
    target.prefill([Prompt(torch.tensor(prompt)) for prompt in prompts])
    scores = target.score([tree] * 3).logits
    for row, prompt in enumerate(prompts):
        for node in range(len(tree)):
            text = prompt[:-1] + [tree.tokens[i] for i in tree.path(node)]
            plain = model(torch.tensor([text]), use_cache=False).logits[0, -1]
            assert (scores[row, node] - plain).abs().max() < 1e-4 * plain.std()


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("architecture", LONGROPE)
def test_requests_on_both_sides_have_their_text_alone(architecture: str, runtime: str) -> None:
    """Prompts read in pieces while others run; prefixes of short prompts are not reused for long ones."""
    model = tiny(architecture, torch.float32)
    fast = truedraft.accelerate(model, draft=Noise(vocabulary=V), runtime=runtime)
    texts = [torch.tensor([words(n, 1)]) for n in (18, 44, 30, 61, 12, 20)]
    with pieces_of(4), fast.engine(max_rows=3, max_tokens=80, prefix_bytes=10**6) as engine:
        requests = [engine.add_request(text, max_new_tokens=10, do_sample=False) for text in texts]
        while engine.has_unfinished_requests():
            engine.step()
    for text, request in zip(texts, requests, strict=True):
        assert request.tokens == model.generate(text, max_new_tokens=10, do_sample=False)[0, text.shape[1] :].tolist()


REFUSED: dict[str, tuple[str, tuple[int, ...], int, str]] = {
    "a text that crosses": ("phi3_longrope", (38, 20), 4, "at most 3 or give prompts of more than 40 tokens"),
    "rows on both sides": ("llama_longrope", (12, 50), 4, "12 tokens .* past 40.* give prompts of more than 40"),
    "dynamic, later": ("llama_dynamic", (20,), 120, "dynamic.* set max_new_tokens to at most 108"),
    "dynamic, at once": ("llama_dynamic", (128,), 4, "texts read before: shorten the prompt"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_crossing_is_refused_in_one_sentence(case: str) -> None:
    architecture, lengths, steps, words = REFUSED[case]
    fast = truedraft.accelerate(tiny(architecture, torch.float32))
    with pytest.raises(Refused, match=words) as error:
        fast.generate(**batch(*lengths), max_new_tokens=steps, do_sample=False)
    assert "\n" not in str(error.value)


def test_dynamic_scaling_after_a_text_beyond_it() -> None:
    """The plain model keeps the frequencies of its longest text; up to the last length both start anew."""
    model: Any = tiny("llama_dynamic", torch.float32)
    inputs = ragged(model, 3)
    model.generate(**inputs, max_new_tokens=140, do_sample=False)
    fast = truedraft.accelerate(model, draft=Noise(vocabulary=V))
    model.generate(**inputs, max_new_tokens=140, do_sample=False)
    text = fast.generate(**inputs, max_new_tokens=100, do_sample=False)
    assert torch.equal(text, model.generate(**inputs, max_new_tokens=100, do_sample=False))


def test_models_with_states_are_refused() -> None:
    config = CONFIG_MAPPING["lfm2"](**RECURRENT["lfm2"], rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(Refused, match=r"dynamic rotary scaling, .* decoders without states"):
        truedraft.accelerate(AutoModelForCausalLM.from_config(config).eval())
