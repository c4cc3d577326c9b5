"""Stop strings of the server end a row where its decoded text first has one, whatever the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StoppingCriteriaList

import truedraft
from served import Running, running
from tokenizers_for_tests import tokenizer_of
from truedraft.loading import load
from truedraft.serve.config import ServeConfig
from truedraft.serve.model import ServedModel
from truedraft.serve.protocol import CompletionBody
from truedraft.serve.settings import planned
from truedraft.serve.stops import OutputText, Shown, StopStrings
from truedraft.text.pieces import Pieces
from truedraft.text.token_text import token_text

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


STOPS = [["<|stop|>"], ["y<|stop|>"], ["<|stop|>y"], ["y<|stop|>\n", "</s>"], ["<|stop|><|stop|>"], ["yy", "<|stop|>y"]]


def plain_end(
    parts: Sequence[str], hidden: Sequence[bool], stops: Sequence[str], keep: bool, least: int
) -> tuple[int, str]:
    """By hand: the tokens of an output up to its end, and the text that is shown."""
    for n in range(1, len(parts) + 1):
        whole = "".join(parts[:n])
        ends = [(whole.find(s, max(len("".join(parts[: n - 1])) - len(s) + 1, 0)), s) for s in stops]
        if n > least and (ends := [(at + len(s), at, s) for at, s in ends if at >= 0]):
            _, at, string = min(ends)
            kept, shown = at, []
            for part, hides in zip(parts[:n], hidden, strict=False):
                shown.append("" if hides else part[: max(kept, 0)])
                kept -= len(part)
            return n, "".join(shown) + (string if keep else "")
    return len(parts), "".join(part for part, hides in zip(parts, hidden, strict=True) if not hides)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "unigram"])
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_stop_strings_with_special_tokens_are_found_and_cut(kind: str, stops: list[str]) -> None:
    """Though the text does not show them; streamed token by token, and read at once."""
    tokenizer, pick, ended = tokenizer_of(kind), random.Random(4), 0
    texts = token_text(tokenizer)
    special, end, y, line = (tokenizer.convert_tokens_to_ids(t) for t in ("<|stop|>", "</s>", "y", "a"))
    y = y if kind != "sentencepiece" else texts.spelled("y")[0]  # type: ignore[index]
    line = (texts.spelled("\n") or [line])[0]
    for case in range(60):
        output = pick.choices([special, y, line, end], [3, 4, 2, 1], k=8)
        keep, least = case % 2 == 0, pick.choice([0, 0, 3])
        named = [t for t in (special, end) if any(texts.added[t] in s for s in stops)]
        hidden = [token in (special, end) for token in output]
        parts = [texts.bytes_of(t).decode() if not h or t in named else "" for t, h in zip(output, hidden, strict=True)]
        count, text = plain_end(parts, hidden, stops, keep, least)
        shown = Shown(tokenizer, tuple(stops), keep, least)
        criterion = StopStrings(shown.text([y]), 1)
        flags = [bool(criterion(torch.tensor([[y, *output[:n]]]), None).item()) for n in range(1, len(output) + 1)]  # type: ignore[arg-type]
        assert (flags.index(True) + 1 if True in flags else len(output)) == count, (output, stops, least)
        for step in (1, 3, count):
            reader = shown.text([y])
            read = "".join(reader.feed(output[i : min(i + step, count)]) for i in range(0, count, step)) + reader.end()
            assert read == text, (output, stops, keep, least)
            assert reader.found in (None, *stops)
        ended += count < len(output)
    assert ended > 5


@pytest.mark.parametrize("kind", ["nano", "bytes", "words"])
def test_no_stop_string_counts_before_the_least_length(kind: str) -> None:
    tokenizer, later = trained(kind), 0
    for prompt, output, stops in cases(tokenizer):
        least = len(output) // 2
        criterion = StopStrings(Shown(tokenizer, tuple(stops), least=least).text(prompt), len(prompt))
        found = None
        for n in range(1, len(output) + 1):
            if bool(criterion(torch.tensor([[*prompt, *output[:n]]]), None).item()):  # type: ignore[arg-type]
                found = n
                break
        ends = [n for n in range(least + 1, len(output) + 1) if completes(tokenizer, prompt, output, n, stops)]
        assert found == min(ends, default=None), (output, stops)
        later += first_end(tokenizer, prompt, output, stops) not in (None, found)
    assert later > 5, "some stop strings come earlier"


def completes(tokenizer: Any, prompt: Sequence[int], output: Sequence[int], n: int, stops: Sequence[str]) -> bool:
    """Whether the n-th token completes a stop string in the text of an output."""
    now, before = (
        tokenizer.decode([*prompt, *output[:k]], skip_special_tokens=True)[
            len(tokenizer.decode(prompt, skip_special_tokens=True)) :
        ].rstrip(UNKNOWN)
        for k in (n, n - 1)
    )
    return any(now.find(stop, max(len(before) - len(stop) + 1, 0)) >= 0 for stop in stops)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """nano, with one more special token, which ends no text."""
    model, tokenizer = load("nano")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|stop|>"]})
    model.resize_token_embeddings(len(tokenizer))  # type: ignore[operator]
    with running(truedraft.accelerate(model, tokenizer, control="fixed"), max_rows=4) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("given", "count", "text", "reason"), [
    ({"stop": ["<|stop|>"]}, 1, "", "<|stop|>"),
    ({"stop": "<|stop|>", "include_stop_str_in_output": True}, 1, "<|stop|>", "<|stop|>"),
    ({"stop": ["zz", "<|stop|><|stop|>"]}, 2, "", "<|stop|><|stop|>"),
    ({"stop": ["<|stop|>"], "skip_special_tokens": False}, 1, "", "<|stop|>"),
    ({"stop": ["<|stop|>"], "min_tokens": 4}, 5, "", "<|stop|>"),
    ({"stop": ["<|stop|>"], "min_tokens": 4, "skip_special_tokens": False}, 5, "<|stop|>" * 4, "<|stop|>"),
    ({"stop": ["|stop|"], "skip_special_tokens": False, "min_tokens": 2}, 3, "<|stop|>" * 2 + "<", "|stop|"),
    ({"stop": ["zz"]}, 8, "", None),
])  # fmt: skip
def test_answers_end_with_a_special_token(
    server: Running, stream: bool, given: dict[str, Any], count: int, text: str, reason: str | None
) -> None:
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    known = {name: given[name] for name in ("stop",)}
    body = {
        "model": "nano", "prompt": "one day", "max_tokens": 8, "temperature": 0, "logit_bias": {"4096": 100.0}, **known,
        "extra_body": {name: value for name, value in given.items() if name not in known}, "stream": stream,
    }  # fmt: skip
    if stream:
        chunks = [*api.completions.create(**body, stream_options={"include_usage": True})]
        last = [choice for chunk in chunks for choice in chunk.choices][-1]
        found, used = "".join(choice.text for chunk in chunks for choice in chunk.choices), chunks[-1].usage
    else:
        response = api.completions.create(**body)
        last, used, found = response.choices[0], response.usage, response.choices[0].text
    assert (used.completion_tokens, found, last.stop_reason) == (count, text, reason)
    assert last.finish_reason == ("length" if reason is None else "stop")


@pytest.mark.parametrize("given", [
    {"stop": ["e"]}, {"stop_token_ids": [*range(270, 286)]}, {"stop": ["<|stop|>"], "logit_bias": {"4096": 100.0}},
    {"logit_bias": {"0": 100.0}}, {"stop_token_ids": [4096], "logit_bias": {"4096": 100.0, "0": 90.0}},
], ids=str)  # fmt: skip
def test_the_least_length_holds_against_every_way_to_end(server: Running, given: dict[str, Any]) -> None:
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    known = {name: given[name] for name in ("stop", "logit_bias") if name in given}
    more = {name: value for name, value in given.items() if name not in known}
    for least in (1, 6, 9):
        response = api.completions.create(
            model="nano", prompt="one day", max_tokens=12, temperature=0, **known,
            extra_body={"min_tokens": least, **more},
        )  # fmt: skip
        count, reason = response.usage.completion_tokens, response.choices[0].finish_reason
        assert least <= count <= 12 and (reason == "stop" or count == 12)


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
