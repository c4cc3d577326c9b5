"""Text net: greedy and seeded output is that of `model.generate`, whatever drafts."""

from __future__ import annotations

import pytest
import torch

from models import ARCHITECTURES, NO_FP64, ragged, tiny
from nets import DRAFTERS, PROCESSORS, REGISTERED, RULES, eos_inside, text_net


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_says_what_the_model_says(name: str, rule: str, rows: int, processors: str) -> None:
    model = tiny()
    inputs = ragged(model, rows)
    settings = PROCESSORS[processors]
    if rule == "greedy" and processors == "warpers":
        pytest.skip("greedy decoding takes no warpers")
    fresh = {
        k: (lambda k=k: settings()[k]) if k in ("logits_processor", "stopping_criteria") else v
        for k, v in settings().items()
    }
    report = text_net(model, name, inputs, max_new_tokens=40, **{**RULES[rule], **fresh})
    if name == "oracle" and processors != "stranger":
        assert report.mean_acceptance_length > 1.5
    if name == "plain":
        assert report.acceptance_rate is None


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_lengths_end_where_plain_decoding_ends(name: str, rule: str, length: int) -> None:
    model = tiny()
    text_net(model, name, ragged(model, 3), max_new_tokens=length, **RULES[rule])


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_end_of_text_inside_a_draft(name: str, rule: str, rows: int) -> None:
    model = tiny()
    inputs = ragged(model, rows)
    eos = eos_inside(model, inputs, **RULES[rule])
    text_net(model, name, inputs, max_new_tokens=40, eos_token_id=[eos, 1], pad_token_id=0, **RULES[rule])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", [*REGISTERED, "oracle"])
def test_every_architecture(architecture: str, name: str) -> None:
    model = tiny(architecture, torch.float32 if architecture in NO_FP64 else torch.float64)
    text_net(model, name, ragged(model, 3), max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("name", [*REGISTERED, "oracle"])
def test_eager_attention(name: str) -> None:
    model = tiny("mistral", torch.float32, attention="eager")
    text_net(model, name, ragged(model, 3), max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("name", [*REGISTERED, "noise"])
def test_the_cost_control_changes_no_token(name: str) -> None:
    model = tiny()
    text_net(model, name, ragged(model, 4), control="cost", max_new_tokens=60, **RULES["seeded"])


def test_a_row_does_not_depend_on_its_neighbours_when_seeded_by_position() -> None:
    import truedraft

    model = tiny()
    inputs = ragged(model, 4)
    fast = truedraft.accelerate(model, draft="prompt-lookup", control="fixed")
    together = fast.generate(**inputs, max_new_tokens=30, do_sample=True, seed=[11, 12, 13, 14])
    length = inputs["input_ids"].shape[1]
    for b, seed in enumerate((11, 12, 13, 14)):
        pad = int((inputs["attention_mask"][b] == 0).sum())
        alone = fast.generate(inputs["input_ids"][b : b + 1, pad:], max_new_tokens=30, do_sample=True, seed=[seed])
        assert torch.equal(alone[0, length - pad :], together[b, length:])
