"""Encoder-decoders against `model.generate`: architectures, drafters, sources of different lengths, refusals."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel

import truedraft
from nets import SEED, drafter, generated
from truedraft import Refused, registry
from vocabularies import tokenized

V = 61
_BART: dict[str, Any] = dict(
    vocab_size=V, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None, init_std=0.1,
)  # fmt: skip
_T5: dict[str, Any] = dict(
    vocab_size=V, d_model=32, d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=4, d_ff=48, pad_token_id=0,
    eos_token_id=1, decoder_start_token_id=0, relative_attention_num_buckets=8, relative_attention_max_distance=20,
)  # fmt: skip
_GEMMA: dict[str, Any] = dict(
    vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, query_pre_attn_scalar=8, sliding_window=9, pad_token_id=0, eos_token_id=2, bos_token_id=1,
)  # fmt: skip
_VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
ARCHITECTURES = {
    "t5gemma": dict(encoder=_GEMMA, decoder=_GEMMA, vocab_size=V, decoder_start_token_id=1, tie_word_embeddings=False),
    "t5gemma2": dict(
        encoder={"text_config": _GEMMA, "vision_config": _VISION},
        decoder=_GEMMA,
        decoder_start_token_id=1,
        tie_word_embeddings=False,
    ),
    "pegasus_x": {**_BART, "block_size": 4},
    **dict.fromkeys(("bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "plbart"), _BART),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5),
}
LEARNT = [
    name for name in registry.names("drafters")
    if "training" in (card := registry.method("drafters", name).card).needs and "encoder-decoder" not in card.cannot
]  # fmt: skip
LEARNT += [preset for preset, (name, _) in registry.presets("drafters").items() if name in LEARNT]
FREE = [n for n in registry.names("drafters") if not set(registry.method("drafters", n).card.needs)]


@cache
def tiny(kind: str) -> PreTrainedModel:
    """With scaled weights, so that its text is not one repeated token."""
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[kind](**ARCHITECTURES[kind])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def sources() -> dict[str, torch.Tensor]:
    """Four sources of different lengths."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, V, (4, 12), generator=generator)
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 3, 5, 8)):
        if missing:
            ids[row, -missing:], mask[row, -missing:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_an_encoder_wider_than_its_decoder(side: str, runtime: str) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["t5gemma"](**{**ARCHITECTURES["t5gemma"], "encoder": {**_GEMMA, "hidden_size": 48}})
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    given = sources() if side == "right" else {name: x.flip(1) for name, x in sources().items()}
    fast = truedraft.accelerate(model, draft=drafter("gad", model), control="fixed", runtime=runtime)
    for sample in (False, True):
        expected, found = both(fast, do_sample=sample, **given)
        assert torch.equal(expected, found)


@cache
def early(model: PreTrainedModel) -> dict[str, Any]:
    """Settings with which rows do not repeat tokens and end early, at different steps."""
    settings = dict(min_new_tokens=1, suppress_tokens=[2], no_repeat_ngram_size=1)
    text = model.generate(**sources(), **settings, max_new_tokens=30, eos_token_id=V, do_sample=False)
    return {**settings, "eos_token_id": [int(text[0, 12]), int(text[1, 20])]}


def both(fast: truedraft.Accelerated, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's and the engine's output under the same seed; torch's random state must be the same afterwards."""
    settings = {"max_new_tokens": 30, "min_new_tokens": 20, **sources(), **settings}
    plain = generated(fast.model, {}, **settings)
    torch.manual_seed(SEED)
    found = fast.generate(**settings)
    assert torch.equal(torch.get_rng_state(), plain.state)
    return plain.text, found


@pytest.mark.covering(1)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_matches_generate(kind: str, sample: bool) -> None:
    for control, runtime in (("fixed", "auto"), ("cost", "auto"), ("fixed", "stock")):
        fast = truedraft.accelerate(tiny(kind), control=control, runtime=runtime)
        expected, found = both(fast, do_sample=sample)
        assert torch.equal(expected, found)
        assert fast.target.family == "encoder-decoder"
        if control == "fixed" and not sample:
            assert len(fast.report().passes) < 30, "nothing was accepted"


@pytest.mark.covering(1)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["bart", "t5"])
@pytest.mark.parametrize("draft", [*FREE, "sam?token-recycling", "suffix>token-recycling", "llma|aded"])
def test_drafters_without_requirements_match_generate(draft: str, kind: str, sample: bool) -> None:
    made = drafter(draft, tiny(kind)) if draft in FREE else draft
    fast = tokenized(tiny(kind), draft=made, control="fixed")
    expected, found = both(fast, do_sample=sample, num_return_sequences=2 if sample else 1)
    assert torch.equal(expected, found)


CONTROLS = ["fixed", "cost"]
# Each architecture greedy and sampled, and under both controls: alternately greedy or sampled under the first of them
IN_TURN = [
    (kind, sample, CONTROLS[(i + sample) % 2]) for i, kind in enumerate(ARCHITECTURES) for sample in (False, True)
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "sample", "control"), IN_TURN)
@pytest.mark.parametrize("name", LEARNT)
def test_trained_drafters_match_generate(name: str, kind: str, sample: bool, control: str) -> None:
    """With untrained weights; rows end one by one."""
    fast = tokenized(tiny(kind), draft=drafter(name, tiny(kind)), control=control)
    expected, found = both(fast, do_sample=sample, **early(tiny(kind)))
    assert torch.equal(expected, found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["bart", "t5", "m2m_100", "t5gemma"])
@pytest.mark.parametrize(
    "settings",
    [
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 2, "max_new_tokens": 25},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
        {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
        {"min_new_tokens": 1, "eos_token_id": [5, 9, 11]},
        {"decoder_input_ids": torch.tensor([[2, 7, 8, 9]] * 4)},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
    ],
    ids=lambda s: next(iter(s)),
)
def test_settings_of_generate_match(kind: str, settings: dict[str, Any]) -> None:
    fast = truedraft.accelerate(tiny(kind), control="fixed")
    expected, found = both(fast, **settings)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_a_row_does_not_depend_on_other_rows(kind: str) -> None:
    fast = truedraft.accelerate(tiny(kind))
    given = sources()
    together = fast.generate(**given, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    for b in range(4):
        length = int(given["attention_mask"][b].sum())
        alone = fast.generate(given["input_ids"][b : b + 1, :length], max_new_tokens=20, min_new_tokens=20)
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("rule", ["block", "multi-round"])
def test_rules_of_guarantee_distribution_run(rule: str) -> None:
    fast = truedraft.accelerate(tiny("bart"), rule=rule, control="fixed")
    out = fast.generate(**sources(), max_new_tokens=20, min_new_tokens=20, do_sample=True, seed=3)
    assert out.shape == (4, 21)


@pytest.mark.parametrize("drafter", ["iad", "input-guided"])
def test_a_copy_of_the_source_is_drafted_from_the_source(drafter: str) -> None:
    """A processor makes the model copy its source: all of it is drafted in the first pass."""
    fast = truedraft.accelerate(tiny("bart"), draft=drafter, control="fixed")
    source = torch.randint(3, V, (1, 24), generator=torch.Generator().manual_seed(5))
    copying = [lambda ids, scores: torch.full_like(scores, -9.0).index_fill_(1, source[0, ids.shape[1] - 1], 9.0)]
    settings = dict(max_new_tokens=24, min_new_tokens=24, do_sample=False, logits_processor=copying)
    out = fast.generate(source, **settings)
    assert out[0, 1:].tolist() == source[0].tolist()
    assert len(fast.report().passes) == 1
    assert torch.equal(out, tiny("bart").generate(source, **settings))


def test_the_output_has_the_class_of_generate() -> None:
    fast = truedraft.accelerate(tiny("t5"))
    given = dict(**sources(), max_new_tokens=8, return_dict_in_generate=True, output_scores=True)
    expected, found = tiny("t5").generate(**given), fast.generate(**given)
    assert type(found) is type(expected) and torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_model_is_unchanged() -> None:
    for kind in ("bart", "t5"):
        model = tiny(kind)
        before = {name: set(vars(module)) for name, module in model.named_modules()}
        truedraft.accelerate(model, control="fixed").generate(**sources(), max_new_tokens=8)
        assert {name: set(vars(module)) for name, module in model.named_modules()} == before


_PROPHET = dict(
    vocab_size=V, hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4,
    num_decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("prophetnet", _PROPHET, "neither from a table"),
        ("switch_transformers", {**_T5, "num_experts": 2}, "routing"),
        ("fsmt", {**_BART, "langs": ["en", "de"], "src_vocab_size": V, "tgt_vocab_size": V}, "differs from plain"),
    ],
)
def test_unsupported_models_are_refused(kind: str, config: dict[str, Any], message: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[kind](**config)).eval()
    model.generation_config.num_beams = 1
    with pytest.raises(Refused, match=message):
        truedraft.accelerate(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "beam search"),
        (
            {"decoder_input_ids": torch.full((4, 2), 2), "decoder_attention_mask": torch.tensor([[0, 1]] * 4)},
            "has gaps",
        ),
        ({"max_new_tokens": 500}, "positions"),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    fast = truedraft.accelerate(tiny("bart"))
    with pytest.raises(Refused, match=message):
        fast.generate(**{**sources(), "max_new_tokens": 4, **settings})
