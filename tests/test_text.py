"""Text net: greedy and seeded output equals that of `model.generate`, with every drafter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import truedraft
from models import ARCHITECTURES, NO_FP64, SHARING, STREAMS, ragged, tiny
from nets import COMPILED, NAMES, PRESETS, PROCESSORS, REGISTERED, RULES, TRIALS, eos_inside, model_for, text_net, turn
from truedraft.errors import Refused

ROWS = (1, 3)
SETTINGS = [  # greedy decoding has no warpers
    (rule, processors) for rule in RULES for processors in PROCESSORS if (rule, processors) != ("greedy", "warpers")
]


def cases() -> Iterator[tuple[str, str, int, str]]:
    """Trials: the full product, of which the everyday suite has every pair. Registered drafters: every setting once, by
    both rules, alone and in a batch in turn; together they have the full product, and test_matrix.py has more settings.
    Presets: once for each rule."""
    for name in (*TRIALS, "plain"):
        yield from ((name, rule, rows, processors) for rule, processors in SETTINGS for rows in ROWS)
    ways = [(rule, rows) for rows in ROWS for rule in RULES]
    for first, name in enumerate(NAMES):
        for i, processors in enumerate(PROCESSORS):
            rule, rows = ways[(first + i) % len(ways)]
            yield name, rule if (rule, processors) in SETTINGS else "seeded", rows, processors
    for name in PRESETS:
        for rule in RULES:
            ((processors, rows),) = turn(name, [(p, rows) for r, p in SETTINGS if r == rule for rows in ROWS])
            yield name, rule, rows, processors


def hosted(name: str) -> PreTrainedModel:
    """Trials run on the model's own forward, in fp64; registered drafters on the passes that `accelerate` makes."""
    return model_for(name, torch.float32 if name in REGISTERED else torch.float64)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("name", "rule", "rows", "processors"), cases())
def test_every_drafter_keeps_the_text_of_generate(name: str, rule: str, rows: int, processors: str) -> None:
    model = hosted(name)
    settings = {**RULES[rule], **PROCESSORS[processors]}
    report = text_net(model, name, ragged(model, rows), max_new_tokens=18, **settings)
    if name == "oracle" and processors != "stranger":
        assert report.mean_acceptance_length > 1.5
    if name == "plain":
        assert report.acceptance_rate is None


def in_turn(options: Sequence[int]) -> list[Any]:
    """(name, rule, option): for trials the full product; registered drafters try each option under one rule in turn,
    and in the everyday suite one of the options."""
    product = itertools.product((*TRIALS, "plain"), RULES, options)
    turns = itertools.product(enumerate(NAMES), enumerate(options))
    return [*product] + [
        pytest.param(name, [*RULES][(i + j) % 2], option, marks=[pytest.mark.slow][: (i + j) % len(options) != 0])
        for (i, name), (j, option) in turns
    ]


@pytest.mark.parametrize(("name", "rule", "length"), in_turn((1, 2, 7)))
def test_short_limits_end_where_plain_decoding_ends(name: str, rule: str, length: int) -> None:
    model = hosted(name)
    text_net(model, name, ragged(model, 3), max_new_tokens=length, **RULES[rule])


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "rule", "rows"), in_turn((1, 4)))
def test_end_of_text_inside_a_draft(name: str, rule: str, rows: int) -> None:
    model = hosted(name)
    inputs = ragged(model, rows)
    eos = eos_inside(model, inputs, **RULES[rule])
    text_net(model, name, inputs, max_new_tokens=40, eos_token_id=[eos, 1], pad_token_id=0, **RULES[rule])


EVERYWHERE = ["oracle", "probes", "taps", "draft-model"]  # together they use every feature of a model


BY_PLACE = {"bloom", "mpt", "falcon_alibi", "llama4_text", "deepseek_v32", "glm_moe_dsa"}
LATENT = {name for name, config in ARCHITECTURES.items() if "kv_lora_rank" in config}
BY_LENGTH = {  # rotations depend on the length of a text
    name
    for name, config in ARCHITECTURES.items()
    if config.get("rope_parameters", {}).get("rope_type") in ("longrope", "dynamic")
}
IMPOSSIBLE: dict[str, set[str]] = {  # the reason of a refusal, and the architectures of which it is true
    "a layer has several of each token": STREAMS,
    "some read the keys and values of others": SHARING,
    "its attention depends on the places of keys": BY_PLACE,
    "it keeps latents, and no keys": LATENT,
    "all layers attend to windows": {"gemma3_text"},
    "need the compiled pass": {"deepseek_v32", "glm_moe_dsa"} | BY_LENGTH,  # which has no indexers or such rotations
    "they do not simply follow each other": {"glm_moe_dsa"},  # layers read the choice of those before them
    "has experts": {name for name, config in ARCHITECTURES.items() if any("expert" in key for key in config)},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "architecture"),
    [(name, architecture) for name in EVERYWHERE for architecture in ARCHITECTURES]
    + [
        (name, architecture)
        for name in NAMES
        if name not in EVERYWHERE
        for architecture in turn(name, [*ARCHITECTURES], 2)
    ],
)
def test_every_architecture(name: str, architecture: str) -> None:
    narrow = architecture in NO_FP64 or name in COMPILED
    model = tiny(architecture, torch.float32 if narrow else torch.float64)
    try:
        text_net(model, name, ragged(model, 3), max_new_tokens=14, do_sample=False)  # beyond the sliding windows
    except Refused as why:
        found = next((kinds for reason, kinds in IMPOSSIBLE.items() if reason in str(why)), ())
        if architecture not in found:
            raise
        pytest.skip(str(why))


@pytest.mark.parametrize("name", EVERYWHERE)
def test_eager_attention(name: str) -> None:
    model = tiny("mistral", torch.float32, attention="eager")
    text_net(model, name, ragged(model, 3), max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("name", [*NAMES, "noise", *(pytest.param(name, marks=pytest.mark.slow) for name in PRESETS)])
def test_cost_control_changes_no_token(name: str) -> None:
    model = hosted(name)
    text_net(model, name, ragged(model, 4), control="cost", max_new_tokens=40, **RULES["seeded"])


def test_seeded_row_is_independent_of_its_neighbours() -> None:
    model = tiny()
    inputs = ragged(model, 4)
    fast = truedraft.accelerate(model, draft="prompt-lookup", control="fixed")
    together = fast.generate(**inputs, max_new_tokens=30, do_sample=True, seed=[11, 12, 13, 14])
    length = inputs["input_ids"].shape[1]
    for b, seed in enumerate((11, 12, 13, 14)):
        pad = int((inputs["attention_mask"][b] == 0).sum())
        alone = fast.generate(inputs["input_ids"][b : b + 1, pad:], max_new_tokens=30, do_sample=True, seed=[seed])
        assert torch.equal(alone[0, length - pad :], together[b, length:])


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in PRESETS)])
def test_no_drafter_needs_a_tokenizer_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nets.tokenized", truedraft.accelerate)
    model = hosted(name)
    text_net(model, name, ragged(model, 2), max_new_tokens=8, do_sample=False)
