"""Stop strings of the server end a row where its decoded text first has one, whatever the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StoppingCriteriaList

import truedraft
from truedraft.loading import load
from truedraft.serve.config import ServeConfig
from truedraft.serve.model import ServedModel
from truedraft.serve.protocol import CompletionBody
from truedraft.serve.settings import planned
from truedraft.serve.stops import OutputText, StopStrings
from truedraft.text.pieces import Pieces

TEXTS = [
    "one day, a little girl said: stop! 🙂 naïve café",
    "the dog 🐕 ran. the cat 🐈 sat.\n\nEnd ### of it 漢字",
] * 20
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def trained(kind: str) -> Any:
    """A small tokenizer of a kind, or the embedded model's."""
    if kind == "nano":
        return load("nano")[1]
    made = Tokenizer(models.BPE(byte_fallback=kind == "words"))
    if kind == "bytes":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<end>"]
    else:  # as in Llama 2: words with the space before them, single bytes where a character is unknown
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
        alphabet, special = [], ["<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def first_end(tokenizer: Any, prompt: Sequence[int], output: Sequence[int], stops: Sequence[str]) -> int | None:
    """The number of tokens after which the whole decoded output first has a stop string; characters are whole."""
    before = len(tokenizer.decode(prompt, skip_special_tokens=True))
    for n in range(1, len(output) + 1):
        text = tokenizer.decode([*prompt, *output[:n]], skip_special_tokens=True)[before:]
        if not text.endswith(UNKNOWN) and any(stop in text for stop in stops):
            return n
    return None


def cases(tokenizer: Any) -> Iterator[tuple[list[int], list[int], list[str]]]:
    """Prompts, outputs and stop strings: parts of the output's text, and others."""
    pick = random.Random(3)
    for i in range(120):
        ids = tokenizer(pick.choice(TEXTS)).input_ids
        output = [*ids[pick.randrange(len(ids)) :], *pick.choices(range(len(tokenizer)), k=pick.choice([0, 5]))]
        text = tokenizer.decode(output, skip_special_tokens=True)
        at = [pick.randrange(max(len(text), 1)) for _ in range(pick.randint(1, 3))]
        stops = [text[start : start + pick.randint(1, 7)] for start in at]
        stops = [stop for stop in stops if stop and UNKNOWN not in stop and i % 10] + ["🦉"]  # which never comes
        if output:
            yield ids[: pick.randint(1, len(ids))], output, stops


@pytest.mark.parametrize("kind", ["nano", "bytes", "words"])
def test_a_row_ends_with_the_token_that_completes_a_stop_string(kind: str) -> None:
    tokenizer, ends = trained(kind), []
    for prompt, output, stops in cases(tokenizer):
        criterion = StopStrings(OutputText(Pieces(tokenizer, prompt, True), stops), len(prompt))
        found = None
        for n in range(1, len(output) + 1):
            ids: Any = torch.tensor([[*prompt, *output[:n]]])
            ended = bool(criterion(ids, None).item())  # type: ignore[arg-type]
            assert ended == bool(criterion(ids, None).item()), "called again after the same token"  # type: ignore[arg-type]
            if ended:
                found = n
                break
        assert found == first_end(tokenizer, prompt, output, stops), (output, stops)
        ends.append(found)
    assert None in ends and len(set(ends)) > 8, "the cases are all alike"


def test_rows_of_requests_with_stop_strings_do_not_advance_in_lockstep() -> None:
    model, tokenizer = load("nano")
    fast = truedraft.accelerate(model, tokenizer)
    ids = torch.tensor([tokenizer("one day, a little girl").input_ids])
    criterion = StopStrings(OutputText(Pieces(tokenizer, ids[0].tolist(), True), ["she"]), ids.shape[1])
    with fast.engine(max_rows=1, max_tokens=96) as engine:
        request = engine.add_request(
            ids, max_new_tokens=60, do_sample=False, stopping_criteria=StoppingCriteriaList([criterion])
        )
        stops = request._request.stops
        assert not stops.lockstep and stops.unknown_processors == []
        while engine.has_unfinished_requests():
            engine.step()
    text = tokenizer.decode(request.tokens)
    assert request.finish_reason == "stop" and text.count("she") == 1 and len(request.tokens) < 60
    assert not [note for note in request.report().notes if "StopStrings" in note]


def test_stop_strings_do_not_read_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed from it, in Python, each new set of strings would delay running streams."""
    model, tokenizer = load("nano")
    served = ServedModel(truedraft.accelerate(model, tokenizer), ServeConfig(model="nano"))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the vocabulary was read")

    monkeypatch.setattr(type(tokenizer), "get_vocab", refuse)
    body = CompletionBody.model_validate({"prompt": "one day", "stop": ["she", ". "], "n": 2, "max_tokens": 5})
    jobs = planned(served, body, [tokenizer("one day").input_ids], "", "id").jobs
    own = [job.settings["stopping_criteria"][0] for job in jobs]
    assert len({id(criterion) for criterion in own}) == 2, "each row has a criterion of its own"
