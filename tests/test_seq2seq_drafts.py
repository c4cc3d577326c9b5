"""Encoder-decoders as draft models: exact, in lockstep with the target's rows, refused where they do not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel

import models
import truedraft
from nets import PRESETS, drafter
from test_draft_model import WITH_DRAFT_MODEL
from test_seq2seq import ARCHITECTURES, IN_TURN, both, sources, tiny
from truedraft import Refused
from truedraft.drafters._compose import compose
from vocabularies import tokenized

NAMES = [*WITH_DRAFT_MODEL, *(preset for preset, (name, _) in PRESETS.items() if name in WITH_DRAFT_MODEL)]
SMALLER: dict[str, dict[str, Any]] = {
    "bart": dict(d_model=16, encoder_layers=1, decoder_layers=1),
    "t5": dict(d_model=16, num_layers=1, num_decoder_layers=1),
}


def smaller(kind: str, **other: Any) -> PreTrainedModel:
    """A smaller model with other random weights."""
    torch.manual_seed(1)
    config = CONFIG_MAPPING[kind](**{**ARCHITECTURES[kind], **SMALLER[kind], **other})
    return AutoModelForSeq2SeqLM.from_config(config).eval()


COMPOSED = ["input-guided|draft-model", "draft-model>max-gram"]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "kind", "sample"),
    [
        (name, ["bart", "t5"][(i + sample) % 2], sample)
        for i, name in enumerate([*NAMES, *COMPOSED])
        for sample in (False, True)
    ],
)
def test_every_drafter_with_a_draft_model_is_exact(name: str, kind: str, sample: bool) -> None:
    small = models.sibling(tiny(kind)) if sample else smaller(kind)
    draft = compose(name, lambda part: drafter(part, tiny(kind), small=small))  # type: ignore[arg-type,return-value]
    fast = tokenized(tiny(kind), draft=draft, control="fixed")
    expected, found = both(fast, do_sample=sample, num_return_sequences=2 if sample else 1)
    assert torch.equal(expected, found)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "sample", "control"), IN_TURN)
def test_drafts_of_the_target_itself_are_all_accepted(kind: str, sample: bool, control: str) -> None:
    """A wrong source, or unmasked padding, would show in the drafts."""
    fast = truedraft.accelerate(tiny(kind), draft=tiny(kind), control=control)
    length = dict(
        max_new_tokens=30, min_new_tokens=30, encoder_no_repeat_ngram_size=0
    )  # Blenderbot's looks across rows
    expected, found = both(fast, do_sample=sample, num_return_sequences=3 if sample else 1, **length)
    assert torch.equal(expected, found)
    if control == "fixed":
        assert fast.report().acceptance_rate == 1.0
        assert len(fast.report().passes) == math.ceil(30 / 8), "seven drafted tokens and one more in a pass"


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_unmasked_padding_is_masked_for_the_draft_model_too(kind: str) -> None:
    """Without a mask `generate` infers one from the padding; the draft model uses the same mask."""
    fast = truedraft.accelerate(tiny(kind), draft=tiny(kind), control="fixed")
    expected, found = both(fast, attention_mask=None, max_new_tokens=30, min_new_tokens=30)
    assert torch.equal(expected, found) and fast.report().acceptance_rate == 1.0


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_slots_of_sources_move_with_their_rows(kind: str) -> None:
    """Rows of different lengths: the slots of a draft model move as those of the target do."""
    fast = truedraft.accelerate(tiny(kind), draft=tiny(kind), control="fixed")
    settings = dict(do_sample=True, temperature=3.0, eos_token_id=[5, 9, 11], pad_token_id=0, num_return_sequences=2)
    expected, found = both(fast, **settings, min_new_tokens=2, max_new_tokens=60)
    assert torch.equal(expected, found)
    assert len(set((expected != 0).sum(-1).tolist())) >= 4, "rows end one by one"
    emitted = [e for p in fast.report().passes for e in p.emitted]
    wrong = sum(e.offered - e.drafted for e in emitted)
    assert wrong <= len(expected), "only tokens after the end of a row"
    assert fast.report().mean_acceptance_length > 3


def test_a_source_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small, read = smaller("t5"), 0
    encoder = small.get_encoder()
    forward = encoder.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal read
        read += len(kwargs["input_ids"])
        return forward(*args, **kwargs)

    fast = truedraft.accelerate(tiny("t5"), draft=small, control="fixed")
    monkeypatch.setattr(encoder, "forward", counted)
    fast.generate(**sources(), max_new_tokens=30, min_new_tokens=30)
    assert read == 4


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_an_assistant_model_is_accepted_as_in_transformers(kind: str, sample: bool) -> None:
    model, small = tiny(kind), models.sibling(tiny(kind))
    fast = truedraft.accelerate(model, control="fixed")
    settings = dict(max_new_tokens=30, min_new_tokens=20, do_sample=sample)
    torch.manual_seed(2)
    expected = model.generate(**sources(), **settings)
    torch.manual_seed(2)
    assert torch.equal(fast.generate(**sources(), **settings, assistant_model=small), expected)
    assert fast.report().drafter == "draft-model" and fast.report().mean_acceptance_length > 1.3
    if not sample:  # transformers supports one source at a time
        source = sources()["input_ids"][:1]
        theirs = model.generate(source, **settings, assistant_model=small)
        assert torch.equal(fast.generate(source, **settings, assistant_model=small), theirs)


def test_rows_beyond_the_draft_models_positions_are_decoded_without_drafts() -> None:
    """Ten positions: one source is longer, and nothing is drafted beyond the tenth token."""
    small = smaller("bart", max_position_embeddings=10)
    fast = truedraft.accelerate(tiny("bart"), draft=small, control="fixed")
    expected, found = both(fast)
    assert torch.equal(expected, found)
    drafted = {e.row for p in fast.report().passes for e in p.emitted if e.offered}
    assert drafted == {1, 2, 3}


def test_unsuitable_draft_models_are_refused() -> None:
    decoder = models.tiny("llama", torch.float32)
    with pytest.raises(Refused, match="is a decoder, and the model that it would draft for is an encoder-decoder"):
        truedraft.accelerate(tiny("bart"), draft=decoder)
    with pytest.raises(Refused, match="is an encoder-decoder, and the model that it would draft for is a decoder"):
        truedraft.accelerate(decoder, draft=tiny("t5"))
    with pytest.raises(Refused, match="has 33 tokens, the model 61"):
        truedraft.accelerate(tiny("t5"), draft=smaller("t5", vocab_size=33))
    fast = truedraft.accelerate(tiny("bart"), draft=smaller("bart"))
    states = torch.randn(1, 5, 32)
    with pytest.raises(Refused, match="row 0 has none in token ids"):
        fast.generate(inputs_embeds=states, max_new_tokens=4)
