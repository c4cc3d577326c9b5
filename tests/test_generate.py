"""Arguments of `generate`: supported ones as in `transformers`, others refused in one sentence."""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LogitsProcessor, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

import truedraft
from drafters_for_tests import Noise
from models import ARCHITECTURES, ragged, tiny
from nets import RULES, Counting, text_net
from truedraft import Refused, registry
from truedraft.stats import shares


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


pytestmark = pytest.mark.pythons


@pytest.fixture(scope="module")
def fast() -> truedraft.Accelerated:
    return truedraft.accelerate(tiny(), control="fixed")


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_scores_and_logits_equal_transformers(rows: int, sample: bool, fast: truedraft.Accelerated) -> None:
    inputs = ragged(tiny(), rows)
    kwargs: dict[str, Any] = dict(
        max_new_tokens=25, return_dict_in_generate=True, output_scores=True, output_logits=True, do_sample=sample,
        repetition_penalty=1.2, eos_token_id=[11, 12, 13], pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    expected = tiny().generate(**inputs, **kwargs)
    torch.manual_seed(1)
    got = fast.generate(**inputs, **kwargs)
    assert torch.equal(got.sequences, expected.sequences)
    length = inputs["input_ids"].shape[1]
    for own, theirs in ((got.scores, expected.scores), (got.logits, expected.logits)):
        assert len(own) == len(theirs)
        ended = torch.zeros(rows, dtype=torch.bool)
        for t, (a, b) in enumerate(zip(own, theirs, strict=True)):
            assert torch.allclose(a[~ended], b[~ended], atol=1e-4)
            assert rows == 1 or torch.allclose(a[ended], b[ended], atol=1e-4)
            ended |= torch.isin(expected.sequences[:, length + t], torch.tensor([11, 12, 13]))


@pytest.mark.parametrize("rows", [1, 3])
def test_streamer_receives_the_steps_of_transformers(rows: int, fast: truedraft.Accelerated) -> None:
    inputs, own, theirs = ragged(tiny(), rows), Recorder(), Recorder()
    kwargs: dict[str, Any] = dict(max_new_tokens=20, do_sample=False, eos_token_id=[11, 12], pad_token_id=0)
    tiny().generate(**inputs, streamer=theirs, **kwargs)
    fast.generate(**inputs, streamer=own, **kwargs)
    assert own.got == theirs.got and own.ended == theirs.ended == 1


def test_prompt_of_embeddings(fast: truedraft.Accelerated) -> None:
    ids = torch.tensor([[5, 6, 7, 5, 6], [0, 0, 8, 9, 8]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    embeds = tiny().get_input_embeddings()(ids)
    kwargs: dict[str, Any] = dict(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=15, do_sample=False)
    assert torch.equal(fast.generate(**kwargs), tiny().generate(**kwargs))


def test_arguments_of_generate_keep_working() -> None:
    model, inputs = tiny(), ragged(tiny(), 3)
    text_net(model, "oracle", inputs, generation_config=GenerationConfig(max_new_tokens=12, do_sample=True, top_k=9))
    text_net(model, "noise", inputs, max_new_tokens=15, num_return_sequences=1, suppress_tokens=[3, 4], do_sample=False)
    text_net(model, "noise", inputs, max_length=40, min_length=38, do_sample=False)
    text_net(
        model, "noise", inputs, max_new_tokens=9, sequence_bias=[[[5], 4.0]], forced_eos_token_id=7, do_sample=True
    )


@pytest.mark.parametrize("own", [False, True], ids=["settings", "its own generation config"])
def test_a_model_configured_without_a_cache_has_one(own: bool) -> None:
    model = tiny("mpt", torch.float32)
    assert model.generation_config.use_cache is False
    settings = {"generation_config": copy.deepcopy(model.generation_config)} if own else {}
    for rule in RULES.values():
        text_net(model, "oracle", ragged(model, 3), max_new_tokens=20, **{"do_sample": False, **rule}, **settings)


def test_return_sequences_share_a_prompt(fast: truedraft.Accelerated) -> None:
    inputs = ragged(tiny(), 2)
    kwargs: dict[str, Any] = dict(max_new_tokens=15, do_sample=True, num_return_sequences=3)
    torch.manual_seed(4)
    expected = tiny().generate(**inputs, **kwargs)
    torch.manual_seed(4)
    assert torch.equal(fast.generate(**inputs, **kwargs), expected)


def test_prompt_lookup_num_tokens_chooses_the_drafter(fast: truedraft.Accelerated) -> None:
    plain = truedraft.accelerate(tiny(), draft=None, control="fixed")
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    out = plain.generate(ids, max_new_tokens=10, prompt_lookup_num_tokens=4, do_sample=False)
    assert plain.report().drafter == "prompt-lookup"
    assert torch.equal(out, tiny().generate(ids, max_new_tokens=10, do_sample=False))


def test_references_are_copied_from() -> None:
    model = tiny()
    ids = torch.tensor([[5, 6, 7]])
    answer = model.generate(ids, max_new_tokens=40, do_sample=False)
    fast = truedraft.accelerate(model, control="fixed")
    for references in ([answer[0]], [answer[0].tolist(), [9, 9]], [[answer[0].tolist()]]):
        assert torch.equal(fast.generate(ids, max_new_tokens=40, do_sample=False, references=references), answer)
        assert fast.report().mean_acceptance_length > 4


def test_report_names_all_of_a_calls_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = truedraft.accelerate(tiny()), 0.02

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            time.sleep(slow / 10)

        def end(self) -> None:
            time.sleep(slow)

    began = time.perf_counter()
    fast.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False, streamer=Streamer())
    seconds, spent = fast.report().seconds, time.perf_counter() - began
    assert seconds["all"] < seconds["call"] < spent
    parts = shares(seconds)
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["outside"] * seconds["call"] > 2 * slow, "the streamer receives tokens between steps"
    line = dict(fast.report().described())["time"]
    assert sum(int(share) for share in re.findall(r"(\d+)%", line)) == 100
    assert {"target", "verify", "outside"} <= {*re.findall("[a-z]+", line)}


def test_coupling_processor_receives_ended_rows_padded() -> None:
    class Centred(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores - 0.7 * scores.mean(0, keepdim=True)

    model, inputs = tiny(), ragged(tiny(), 3)
    for name in ("oracle", "noise", "prompt-lookup"):
        kwargs: dict[str, Any] = dict(logits_processor=[Centred()], eos_token_id=[11, 12, 13, 14], pad_token_id=0)
        report = text_net(model, name, inputs, max_new_tokens=40, do_sample=True, **kwargs)
        assert report.notes and "Centred" in report.notes[0]


def test_longer_length_criterion_of_the_user_replaces_the_limit() -> None:
    kwargs: dict[str, Any] = dict(max_new_tokens=6, stopping_criteria=[MaxLengthCriteria(30)], do_sample=False)
    text_net(tiny(), "oracle", ragged(tiny(), 2), **kwargs)


def test_gaps_in_a_mask_are_removed_or_refused() -> None:
    inputs = {"input_ids": torch.arange(3, 23)[None], "attention_mask": torch.ones(1, 20, dtype=torch.long)}
    inputs["attention_mask"][0, 8:12] = 0
    expected = tiny().generate(**inputs, max_new_tokens=12, do_sample=False)
    got = truedraft.accelerate(tiny(), draft=None).generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, expected)
    with pytest.raises(Refused, match="gaps"):
        truedraft.accelerate(tiny("mistral")).generate(**inputs, max_new_tokens=4)


def test_changes_of_the_model_apply_at_the_next_call() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**ARCHITECTURES["llama"])).eval()
    fast = truedraft.accelerate(model, draft="prompt-lookup", control="fixed")
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 6, 7, 5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=20, do_sample=False), expected)
    model.train()
    with pytest.raises(Refused, match="training mode"):
        fast.generate(ids, max_new_tokens=4)


def test_nested_call_and_foreign_root_are_refused(fast: truedraft.Accelerated) -> None:
    with pytest.raises(Refused, match="a call inside a call"):
        fast.generate(_IDS, max_new_tokens=4, do_sample=False, on_pass=lambda _: fast.generate(_IDS, max_new_tokens=2))

    class Foreign(Noise):
        def propose(self, rows: Any, budget: Any) -> list[truedraft.DraftTree]:
            return [truedraft.DraftTree.chain(row.tokens[-1] + 1) for row in rows]

    with pytest.raises(ValueError, match="pending token"):
        truedraft.accelerate(tiny(), draft=Foreign()).generate(_IDS, max_new_tokens=4, do_sample=False)


_IDS = torch.tensor([[5, 6, 7]])
BAD: dict[str, tuple[Callable[[truedraft.Accelerated], Any], str]] = {
    "beam search": (lambda f: f.generate(_IDS, num_beams=3, max_new_tokens=4), "beam search"),
    "contrastive search": (
        lambda f: f.generate(_IDS, penalty_alpha=0.6, top_k=4, max_new_tokens=4),
        "contrastive search",
    ),
    "attention weights": (
        lambda f: f.generate(_IDS, output_attentions=True, return_dict_in_generate=True, max_new_tokens=4),
        "output_attentions",
    ),
    "no cache": (lambda f: f.generate(_IDS, use_cache=False, max_new_tokens=4), "use_cache=False"),
    "no cache in a configuration of the caller's": (
        lambda f: f.generate(_IDS, GenerationConfig(use_cache=False), max_new_tokens=4),
        "use_cache=False",
    ),
    "another cache": (
        lambda f: f.generate(_IDS, cache_implementation="static", max_new_tokens=4),
        "cache_implementation",
    ),
    "draft model of another vocabulary": (
        lambda f: f.generate(_IDS, assistant_model=tiny(vocabulary=13), max_new_tokens=4),
        "13 tokens",
    ),
    "no draft model": (lambda f: truedraft.accelerate(tiny(), draft="draft-model"), "needs a draft model"),
    "unknown draft model": (lambda f: truedraft.accelerate(tiny(), draft="draft-model:model=/no/such"), "/no/such"),
    "draft model's tokenizer": (
        lambda f: f.generate(_IDS, assistant_model=tiny(), assistant_tokenizer=1, max_new_tokens=4),
        "assistant_tokenizer",
    ),
    "two ways of drafting": (
        lambda f: f.generate(_IDS, assistant_model=tiny(), prompt_lookup_num_tokens=3, max_new_tokens=4),
        "assistant_model and prompt_lookup_num_tokens",
    ),
    "zero temperature": (lambda f: f.generate(_IDS, do_sample=True, temperature=0.0, max_new_tokens=4), "temperature"),
    "right padding": (
        lambda f: f.generate(_IDS, attention_mask=torch.tensor([[1, 1, 0]]), max_new_tokens=4),
        "pad on the left",
    ),
    "empty prompt": (lambda f: f.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=4), "empty"),
    "long prompt": (lambda f: f.generate(torch.full((1, 200), 5), max_new_tokens=4), "context has 128"),
    "stop strings without a tokenizer": (
        lambda f: f.generate(_IDS, stop_strings=["a"], max_new_tokens=4),
        "need a tokenizer",
    ),
    "reference of another type": (
        lambda f: f.generate(_IDS, references=[{"a": 1}], max_new_tokens=4),
        r"references\[0\] is dict",
    ),
    "reference as one string": (lambda f: f.generate(_IDS, references="text", max_new_tokens=4), "list of documents"),
    "reference text without a tokenizer": (
        lambda f: f.generate(_IDS, references=["a"], max_new_tokens=4),
        "no tokenizer",
    ),
    "reference outside the vocabulary": (
        lambda f: f.generate(_IDS, references=[[5, 999]], max_new_tokens=4),
        "vocabulary of 61",
    ),
    "references for other rows": (lambda f: f.generate(_IDS, references=[[[5]], [[6]]], max_new_tokens=4), "2 rows"),
    "seeds for other rows": (lambda f: f.generate(_IDS, seed=[1, 2], do_sample=True, max_new_tokens=4), "2 entries"),
    "unknown setting": (lambda f: f.generate(_IDS, max_new_token=4), "max_new_token"),
    "positions of the caller": (lambda f: f.generate(_IDS, position_ids=_IDS, max_new_tokens=4), "position_ids"),
    "token healing": (lambda f: f.generate(_IDS, token_healing=True, max_new_tokens=4), "token_healing"),
    "another model input": (
        lambda f: truedraft.accelerate(tiny("gpt2")).generate(_IDS, token_type_ids=_IDS, max_new_tokens=4),
        "token_type_ids",
    ),
    "a seed that is none": (lambda f: f.generate(_IDS, seed=1.5, do_sample=True, max_new_tokens=4), r"seed=1\.5"),
    "a knob of another type": (
        lambda f: truedraft.accelerate(tiny(), draft="prompt-lookup:n=abc"),
        "give a whole number, 1 to 1,024",
    ),
    "a control that is none": (lambda f: truedraft.accelerate(tiny(), control=3), "control=3"),
    "references twice": (
        lambda f: f.generate(_IDS, references=[[5]], prompt_lookup_num_tokens=3, max_new_tokens=4),
        "select different drafters",
    ),
    "report before anything": (lambda f: truedraft.accelerate(tiny()).report(), "nothing to report"),
    "unknown drafter": (lambda f: truedraft.accelerate(tiny(), draft="promt-lookup"), "did you mean 'prompt-lookup'"),
    "unknown knob": (lambda f: truedraft.accelerate(tiny(), draft="prompt-lookup:lenght=3"), "did you mean 'length'"),
    "unreadable knob": (lambda f: truedraft.accelerate(tiny(), draft="prompt-lookup:5"), "knob=value"),
    "drafter of another type": (lambda f: truedraft.accelerate(tiny(), draft=5), "draft=5"),
    "unknown rule": (lambda f: truedraft.accelerate(tiny(), rule="greddy"), "did you mean 'greedy'"),
    "rule against the setting": (
        lambda f: truedraft.accelerate(tiny(), rule="greedy").generate(_IDS, do_sample=True, max_new_tokens=4),
        "rule='greedy'",
    ),
    "references without a use": (
        lambda f: truedraft.accelerate(tiny(), draft="token-recycling").generate(
            _IDS, references=[[5]], max_new_tokens=4
        ),
        "draft='auto'",
    ),
    "past the learned positions": (
        lambda f: truedraft.accelerate(tiny("gpt2")).generate(_IDS, max_new_tokens=400),
        "max_new_tokens to at most 126",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_input_is_refused_in_one_sentence(case: str, fast: truedraft.Accelerated) -> None:
    call, message = BAD[case]
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message) as error:
        warnings.simplefilter("ignore")
        call(fast)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("sample", [False, True])
def test_nan_logits_are_reported(sample: bool) -> None:
    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(**ARCHITECTURES["llama"])).eval()
    fast = truedraft.accelerate(model)
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(Refused, match="NaN"):
        fast.generate(_IDS, max_new_tokens=4, do_sample=sample)


def test_refused_call_leaves_no_state() -> None:
    fast = truedraft.accelerate(tiny(), rule="block")
    with pytest.raises(truedraft.Refused, match="Counting"):
        fast.generate(_IDS, do_sample=True, max_new_tokens=4, logits_processor=[Counting()])
    assert fast.generate(_IDS, do_sample=True, max_new_tokens=4).shape[1] > _IDS.shape[1]


def test_drafter_with_another_tokenizer_is_refused() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def tokenizer_of(*entries: str) -> PreTrainedTokenizerFast:
        vocabulary = {w: i for i, w in enumerate(entries)}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")))

    draft = registry.load("drafters", "prompt-lookup")
    draft.tokenizer = tokenizer_of("a", "b")
    with pytest.raises(Refused, match="tokenizer of prompt-lookup"):
        truedraft.accelerate(tiny(), tokenizer_of("a", "c"), draft=draft)
    with pytest.raises(Refused, match="tokenizer of its own"):
        truedraft.accelerate(tiny(), None, draft=draft)
    truedraft.accelerate(tiny(), tokenizer_of("a", "b"), draft=draft)
