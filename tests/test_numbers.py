"""Numbers and stop strings of `generate` and of a checkpoint's generation config, against `model.generate`."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any
from urllib.request import Request, urlopen

import numpy
import pytest
import torch
from transformers import GenerationConfig, StopStringCriteria

import truedraft
from models import tiny
from served import generated, running
from test_renoise import TRACE, model_of
from truedraft import Refused
from truedraft.loading import load

IDS = torch.tensor([[5, 6, 7, 5, 6, 7]])


def outcome(generate: Any, **settings: Any) -> torch.Tensor | str:
    """The tokens, or the name of the error's class."""
    torch.manual_seed(3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return generate(IDS, **settings)
    except (TypeError, ValueError) as error:
        return type(error).__name__


TAKEN: list[dict[str, Any]] = [
    {"max_new_tokens": 9.0},
    {"max_new_tokens": 9.5},
    {"max_new_tokens": 0.5},
    {"max_new_tokens": numpy.float32(4)},
    {"max_new_tokens": torch.tensor(4)},
    {"max_length": 15.0},
    {"max_length": 15.2},
    {"max_length": numpy.float64(9)},
    {"max_new_tokens": 7.0, "num_return_sequences": 1.0},
    {"max_new_tokens": 7, "num_beams": 1.0},
    {"max_new_tokens": 7, "eos_token_id": [9.0, 5.0]},
    {"max_new_tokens": 7, "pad_token_id": 0.0, "eos_token_id": 5.0},
    {"max_new_tokens": 7, "suppress_tokens": [5.0, 6.0]},
    {"max_new_tokens": 7, "top_k": 0.0, "do_sample": True},
    {"max_new_tokens": 7, "top_k": 40.0},
    {"max_new_tokens": 7, "no_repeat_ngram_size": 0.0},
    {"max_new_tokens": 7, "temperature": 1, "top_p": 1, "do_sample": True},
    {"max_new_tokens": 7, "repetition_penalty": 1, "max_time": 500},
    {"max_new_tokens": 7, "do_sample": 1.0},
]


@pytest.mark.parametrize("own", [False, True], ids=["argument", "generation config"])
@pytest.mark.parametrize("settings", TAKEN, ids=str)
def test_numbers_that_generate_takes(settings: dict[str, Any], own: bool) -> None:
    model: Any = tiny()
    given: dict[str, Any] = {"generation_config": GenerationConfig(**settings)} if own else settings
    expected = outcome(model.generate, **given)
    assert isinstance(expected, torch.Tensor)
    got = outcome(truedraft.accelerate(model).generate, **given)
    assert isinstance(got, torch.Tensor) and torch.equal(got, expected)
    with truedraft.accelerate(model).engine(max_rows=1, max_tokens=60) as engine:
        if not settings.get("do_sample"):
            request = engine.add_request(IDS, **given)
            while engine.has_unfinished_requests():
                engine.step()
            assert request.tokens == expected[0, 6:].tolist()


NOT_TAKEN: list[tuple[dict[str, Any], str]] = [
    ({"min_new_tokens": 3.0}, "min_new_tokens=3.0: .* give 3$"),
    ({"min_length": 9.5}, "min_length=9.5: .* a whole number"),
    ({"top_k": 40.0, "do_sample": True}, "top_k=40.0: .* give 40$"),
    ({"top_k": numpy.int64(4), "do_sample": True}, "top_k=.*4.*: give 4$"),
    ({"temperature": 2, "do_sample": True}, r"temperature=2: .* a number \(float\) here: give 2.0$"),
    ({"no_repeat_ngram_size": 2.0}, "^no_repeat_ngram_size=2.0: .* give 2$"),
    ({"encoder_no_repeat_ngram_size": 2.0}, "encoder_no_repeat_ngram_size=2.0"),
    ({"repetition_penalty": 2}, "repetition_penalty=2: .* give 2.0$"),
    ({"num_return_sequences": 2.0, "do_sample": True}, "num_return_sequences=2.0: .* give 2$"),
    ({"num_beams": 2.0}, "num_beams=2.0: beam search is not supported"),
    ({"forced_eos_token_id": 3.0}, "forced_eos_token_id=3.0: .* give 3$"),
    ({"max_new_tokens": "9"}, "max_new_tokens='9' is a text: give a number"),
    ({"max_time": "5"}, "max_time='5' is a text"),
]


@pytest.mark.parametrize("own", [False, True], ids=["argument", "generation config"])
@pytest.mark.parametrize(("settings", "message"), NOT_TAKEN, ids=str)
def test_numbers_that_generate_refuses_are_named(settings: dict[str, Any], message: str, own: bool) -> None:
    """As an error of the same class; `model.generate` itself speaks of other arguments, or of none."""
    model: Any = tiny()
    settings = {"max_new_tokens": 7, "eos_token_id": 3, **settings}
    given: dict[str, Any] = settings
    if own:
        given = {"generation_config": GenerationConfig()}
        vars(given["generation_config"]).update(settings)
    assert isinstance(outcome(model.generate, **given), str)
    with pytest.raises(Refused, match=message) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truedraft.accelerate(model).generate(IDS, **given)
    assert len(str(error.value)) < 150


def test_a_number_of_the_checkpoint_is_named_as_such() -> None:
    model: Any = copy.deepcopy(tiny())
    model.generation_config.no_repeat_ngram_size = 2.0
    with pytest.raises(Refused, match=r"^model\.generation_config\.no_repeat_ngram_size=2\.0"):
        truedraft.accelerate(model).generate(IDS, max_new_tokens=5)


@pytest.mark.parametrize("length", [float("inf"), float("nan"), numpy.float32("inf")])
def test_lengths_without_an_end_are_refused(length: Any) -> None:
    """`model.generate` runs on and on under them."""
    for name in ("max_new_tokens", "max_length"):
        with pytest.raises(Refused, match=f"{name}=.*: give a whole number of tokens"):
            truedraft.accelerate(tiny()).generate(IDS, **{name: length})


def test_errors_of_the_decode_loop_keep_their_words() -> None:
    """Also where a setting that has no effect is of another type."""

    def wrong(ids: Any, scores: Any) -> Any:
        raise TypeError("of the caller's own processor")

    with pytest.raises(TypeError, match="of the caller's own processor"):
        truedraft.accelerate(tiny()).generate(IDS, max_new_tokens=5, top_k=4.0, logits_processor=[wrong])


def test_lengths_of_drafts_may_be_floats() -> None:
    fast = truedraft.accelerate(tiny())
    expected = tiny().generate(IDS, max_new_tokens=9, do_sample=False)  # type: ignore[operator]
    for given in ({"prompt_lookup_num_tokens": 3.0, "max_matching_ngram_size": 2.0}, {"num_assistant_tokens": 4.0}):
        assistant = {"assistant_model": tiny()} if "num_assistant_tokens" in given else {}
        assert torch.equal(fast.generate(IDS, max_new_tokens=9, do_sample=False, **given, **assistant), expected)
    for name in ("prompt_lookup_num_tokens", "num_assistant_tokens"):
        assistant = {"assistant_model": tiny()} if name == "num_assistant_tokens" else {}
        with pytest.raises(Refused, match=f"^{name}=3.5: give a whole number"):
            fast.generate(IDS, max_new_tokens=9, **{name: 3.5}, **assistant)


def test_lengths_of_canvases_may_be_floats() -> None:
    model, tokenizer = load("nano-diffusion")
    fast: Any = truedraft.accelerate(model, tokenizer)
    ids = tokenizer("one day", return_tensors="pt").input_ids
    expected = fast.generate(ids, max_new_tokens=32, block_length=32)
    for given in ({"max_new_tokens": 32.0}, {"max_length": 32.0 + ids.shape[1]}):
        assert torch.equal(fast.generate(ids, block_length=32, **given), expected)
    with pytest.raises(Refused, match=r"max_new_tokens=31\.5: give a whole number of at least 1"):
        fast.generate(ids, max_new_tokens=31.5)
    renoised: Any = model_of()
    given = {**TRACE, "max_new_tokens": float(TRACE["max_new_tokens"])}
    torch.manual_seed(1)
    own = renoised.generate(IDS, **given).sequences
    assert torch.equal(truedraft.accelerate(renoised).generate(IDS, seed=1, **given), own)


# ---------------------------------------------------------------- stop strings


@pytest.fixture(scope="module")
def stopping() -> tuple[Any, Any]:
    """A model whose generation config ends texts with a word, and its tokenizer."""
    model, tokenizer = load("nano")
    model.generation_config.stop_strings = ["park", "."]
    return model, tokenizer


PROMPT = "one day, a little girl named lily went"
WAYS: dict[str, dict[str, Any]] = {
    "of the checkpoint": {},
    "sampled": {"do_sample": True, "temperature": 0.9},
    "others of the call": {"stop_strings": ["play"]},
    "one text": {"stop_strings": "saw"},
    "of a generation config": {"generation_config": GenerationConfig(stop_strings=["play"], max_new_tokens=30)},
    "of the checkpoint, beside a generation config": {"generation_config": GenerationConfig(max_new_tokens=30)},
    "none, by the call": {"stop_strings": None},
    "with a criterion": {"eos_token_id": [2, 3], "min_new_tokens": 12},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draft", ["auto", None])
def test_texts_end_with_stop_strings_of_the_generation_config(
    way: str, draft: str | None, stopping: tuple[Any, Any]
) -> None:
    model, tokenizer = stopping
    inputs = dict(tokenizer([PROMPT, "the cat"], return_tensors="pt", padding=True, return_token_type_ids=False))
    settings = {"max_new_tokens": 30, "do_sample": False, **WAYS[way]}
    if "generation_config" in settings:
        settings = WAYS[way]
    torch.manual_seed(2)
    expected = model.generate(**inputs, **settings, tokenizer=tokenizer)
    torch.manual_seed(2)
    assert torch.equal(truedraft.accelerate(model, tokenizer, draft=draft).generate(**inputs, **settings), expected)
    torch.manual_seed(2)
    fast = truedraft.accelerate(model, draft=draft)
    assert torch.equal(fast.generate(**inputs, **settings, tokenizer=tokenizer), expected)
    if way.startswith("of the checkpoint"):
        with pytest.raises(Refused, match=r"stop_strings=\['park', '.'\] need a tokenizer: give one to accelerate"):
            fast.generate(**inputs, **settings)


def test_no_stop_string_at_all_is_refused(stopping: tuple[Any, Any]) -> None:
    model, tokenizer = stopping
    with pytest.raises(Refused, match=r"stop_strings=\[\]: give a text, or a list of texts"):
        truedraft.accelerate(model, tokenizer).generate(IDS, stop_strings=[])


def test_a_server_and_an_engine_end_there_too(stopping: tuple[Any, Any]) -> None:
    model, tokenizer = stopping
    fast = truedraft.accelerate(model, tokenizer)
    (expected,) = generated(fast, PROMPT, max_new_tokens=30, do_sample=False)
    assert len(expected) < 30 and tokenizer.decode(expected).endswith(("park", "."))
    with running(fast) as server:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 30, "temperature": 0}).encode()
        request = Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
        choice = json.loads(urlopen(request, timeout=60).read())["choices"][0]
    assert choice["text"] == tokenizer.decode(expected) and choice["finish_reason"] == "stop"


def test_the_vocabulary_is_read_once_for_the_same_strings(
    stopping: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds where it is large: a server would stand still for each request."""
    from truedraft.call import arguments

    model, tokenizer = stopping
    made: list[Any] = []

    class Counted(StopStringCriteria):
        def __init__(self, *given: Any) -> None:
            made.append(given)
            super().__init__(*given)

    monkeypatch.setattr(arguments, "StopStringCriteria", Counted)
    fast = truedraft.accelerate(model, tokenizer)
    strings = ["a text of this test alone", "girl"]
    first, second = (fast.generate(IDS, max_new_tokens=9, stop_strings=strings) for _ in range(2))
    assert torch.equal(first, second) and len(made) == 1


@pytest.mark.filterwarnings("ignore:.*num_beams=3")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_healing", True, "token_healing=True: token healing is not supported"),
        ("num_beams", 3, "num_beams=3: beam search is not supported"),
        ("num_return_sequences", 2, None),
        ("min_new_tokens", 4, None),
        ("forced_eos_token_id", 5, None),
        ("return_dict_in_generate", True, None),
        ("guidance_scale", 1.5, None),
    ],
)
def test_other_settings_of_a_checkpoint_leave_it_hosted(name: str, value: Any, message: str | None) -> None:
    """They are those of the call: its own, or the reason why it is refused."""
    model: Any = copy.deepcopy(tiny())
    model.generation_config.eos_token_id, model.generation_config.do_sample = 9, name == "num_return_sequences"
    setattr(model.generation_config, name, value)
    fast = truedraft.accelerate(model)
    if message is not None:
        with pytest.raises(Refused, match=message):
            fast.generate(IDS, max_new_tokens=9)
        return
    outcomes = [outcome(generate, max_new_tokens=9) for generate in (model.generate, fast.generate)]
    expected, got = (getattr(out, "sequences", out) for out in outcomes)
    assert torch.equal(got, expected)
