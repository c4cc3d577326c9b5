"""Near-ties: counted, named in reports and benchmarks, and on request recomputed as `model.generate` computes them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import seq2seq_models
import truedraft
from drafters_for_tests import Noise, Oracle
from models import ragged, tiny
from truedraft import Refused
from truedraft.accept import _ties
from truedraft.accept._ties import NearTies
from truedraft.accept.greedy import Greedy
from truedraft.audit.tokens import noise_of
from truedraft.bench.compare import compare
from truedraft.bench.sides import transformers_side, truedraft_side
from truedraft.bench.workloads import Item, Workload
from truedraft.cli import main
from truedraft.runtime import native, tokenwise
from truedraft.runtime.linears import Product
from truedraft.runtime.panels import panels
from truedraft.runtime.processors import processor
from truedraft.runtime.tokenwise import TokenwisePass
from truedraft.runtime.weights import linear_weight
from truedraft.tree import Accepted, Row, Scores

TOKENS = 24
PROMPTS = [[3, 1, 4, 3, 1, 4, 3], [9, 2, 6, 5, 9, 2, 6, 5, 9], [8, 9, 7], [5, 5, 8, 2]]


def twins(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model in which every token has a twin with nearly the same logits: every choice is a near-tie of the dtype."""
    if dtype not in _TWINS:
        model: Any = copy.deepcopy(tiny("llama", torch.float32))
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():
            head = model.lm_head.weight.clone()
            head[1::2] = head[0:-1:2] * (1 + 1e-3 * torch.randn(head[1::2].shape, generator=g))
            model.lm_head.weight = torch.nn.Parameter(head)
        _TWINS[dtype] = model.to(dtype)
    return _TWINS[dtype]


_TWINS: dict[torch.dtype, PreTrainedModel] = {}


def generated(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, pad_token_id=0, **settings)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def drafters(answers: dict[int, list[int]]) -> dict[str, Any]:
    return {
        "none": None,
        "noise": Noise(),
        "oracle": Oracle(answers=answers),
        "auto": "auto",
    }


class RecordingGreedy(Greedy):
    """A greedy rule that records the calls of `choose`."""

    def __init__(self) -> None:
        self.chosen: list[Any] = []

    def choose(self, scores: Tensor, candidates: Any, rows: Any, chance: Any) -> list[int]:
        self.chosen.append((candidates, rows))
        return scores.argmax(-1).tolist()

    def decide_all_nodes(self, scores: Scores, rows: Any, trees: Any, laws: Any, chance: Any) -> Any:
        return scores.logits.argmax(-1).tolist()


NO_PROCESSORS: Any = SimpleNamespace(gain=1.0, again=lambda row, logits: logits)


def verify_pass(counted: Any, logits: Tensor, paths: Any, rows: Any) -> None:
    """Verify a pass with logits (rows, nodes, V) in which these paths are accepted."""
    accepted = [Accepted(tuple(path), 0, row.ended) for path, row in zip(paths, rows, strict=True)]
    scores = Scores(logits, {}, [0] * len(rows))
    tokens = counted.decide_all_nodes(scores, rows, [], NO_PROCESSORS, None)
    given: Any = SimpleNamespace(
        rows=rows, scores=scores, chance=None, tokens=tokens,
        followed=lambda found: accepted if found is tokens else None,
    )  # fmt: skip
    assert counted.verify(given) == accepted


def node(best: float, second: float) -> list[float]:
    return [0.0, second, -1.0, best, -2.0]


def test_near_tie_rate_counts_accepted_nodes() -> None:
    """A near-tie: the second is at most twice the noise below the first. Ended rows in lockstep have none."""
    near, far = node(1.0, 0.5), node(1.0, 0.4)
    running, ended_row = Row(0, [1, 2, 3, 4], 1, 9), Row(1, [1, 2, 3, 4], 1, 9, end=3)
    for paths, rows, expected in (
        ([[0]], [running], 1.0),
        ([[0, 1]], [running], 0.5),
        ([[0, 3]], [running], 1.0),
        ([[0, 2]], [running], 0.5),
        ([[0, 1, 3]], [running], 2 / 3),
        ([[0, 3], [0, 1]], [running, ended_row], 1.0),  # the second row's last token is padding
        ([[0, 1], [0, 3]], [running, ended_row], 2 / 3),
        ([[0, 1], [0]], [running, ended_row], 0.5),
    ):
        logits = torch.tensor([[near, far, far, near]] * len(rows))
        counted: Any = NearTies(RecordingGreedy(), NO_PROCESSORS, noise=0.25)
        assert counted.rate is None
        verify_pass(counted, logits, paths, rows)
        assert counted.rate == pytest.approx(expected), paths
        assert counted.inner.chosen == []
    exact: Any = NearTies(RecordingGreedy(), NO_PROCESSORS, noise=0.0)
    verify_pass(exact, torch.tensor([[node(1.0, 1.0), far]]), [[0, 1]], [running])
    assert exact.rate == 0.5


def test_near_ties_are_counted_and_rechecked_node_by_node() -> None:
    running, ended = Row(0, [1, 2], 1, 9), Row(1, [1, 2], 1, 9, end=2)
    scores = torch.tensor([node(1.0, 0.2), node(1.0, 0.9)])
    for rows, expected in (([running, ended], 0.0), ([ended, running], 1.0), ([running, running], 0.5)):
        counted: Any = NearTies(RecordingGreedy(), NO_PROCESSORS, noise=0.25)
        assert counted.choose(scores, ["a", "b"], rows, None) == [3, 3]
        assert counted.rate == expected and counted.inner.chosen == [(["a", "b"], rows)]
    rule = RecordingGreedy()
    again: Any = NearTies(rule, NO_PROCESSORS, noise=0.25, again=lambda row: torch.tensor(node(0.0, 5.0)))
    assert again.decide_all_nodes(Scores(scores[None], {}, [0]), [running], [], NO_PROCESSORS, None) is None
    assert again.choose(scores, ["a", "b"], [running, running], None) == [3, 1]
    assert rule.chosen[1] == (["b"], [running])


def test_the_largest_keys_of_many_passes_are_kept_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ties, "TOGETHER", 3)
    counted: Any = NearTies(RecordingGreedy(), NO_PROCESSORS, noise=0.25)
    row = Row(0, [1, 2], 1, 9)
    for i in range(1, 8):
        verify_pass(counted, torch.tensor([[node(1.0, 0.9 if i % 2 else 0.1)]]), [[0]], [row])
        assert len(counted._best) <= 3
    assert counted.rate == pytest.approx(4 / 7)


def test_near_ties_change_the_text_without_recheck() -> None:
    model = twins()
    fast = truedraft.accelerate(model, draft=None)
    assert any(generated(fast, p, do_sample=False) != generated(model, p, do_sample=False) for p in PROMPTS)


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}], ids=["greedy", "penalty"])
def test_recheck_gives_the_text_of_generate_with_any_drafter(settings: dict[str, Any], runtime: str) -> None:
    model, width = twins(), max(map(len, PROMPTS))
    expected = [generated(model, p, do_sample=False, **settings) for p in PROMPTS]
    padded = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    answers = {i: p + e for i, (p, e) in enumerate(zip(PROMPTS, expected, strict=True))}
    for name, draft in drafters(answers).items():
        fast = truedraft.accelerate(model, draft=draft, control="fixed", ties="recheck", runtime=runtime)
        out = fast.generate(
            padded, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, **settings
        )
        assert out[:, width:].tolist() == expected, name
        if name == "oracle":
            assert fast.report().mean_acceptance_length > 1.2
        assert generated(fast, PROMPTS[0], do_sample=False, **settings) == expected[0], f"{name}, alone"


@pytest.mark.parametrize("draft", [None, "auto"])
def test_recheck_gives_the_sample_of_generate(draft: str | None) -> None:
    model = twins()
    fast = truedraft.accelerate(model, draft=draft, control="fixed", ties="recheck")
    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        expected = generated(model, prompt, do_sample=True, temperature=0.7)
        after = torch.rand(1)
        torch.manual_seed(seed)
        assert generated(fast, prompt, do_sample=True, temperature=0.7) == expected
        assert torch.equal(torch.rand(1), after), "torch's stream is in another state"


EXACT = "llama", "qwen2", "qwen3", "smollm3", "seed_oss", "olmo2", "granite", "stablelm"


def exact(model: PreTrainedModel, draft: Any = "auto") -> Any:
    """The model accelerated with passes that have the bits of `model.generate`; skips where this machine has none."""
    fast = truedraft.accelerate(model, draft=draft, control="fixed", ties="recheck")
    if "avx512_bf16" not in processor():
        pytest.skip("torch's products of bf16 are known for processors with AVX512-BF16")
    assert fast.target.decides_as_generate
    return fast


@pytest.mark.parametrize("name", EXACT)
def test_passes_have_the_bits_of_generate(name: str) -> None:
    """Every logit of a text of many drafts, ragged in their sizes, is that of `model.generate`."""
    model = tiny(name, torch.bfloat16, 1.5)
    kept = dict(return_dict_in_generate=True, output_logits=True, max_new_tokens=60, do_sample=False, pad_token_id=0)
    for draft in (Noise(), "auto"):
        fast = exact(model, draft)
        for prompt in PROMPTS[:2]:
            expected = model.generate(torch.tensor([prompt]), **kept)  # type: ignore[operator]
            out = fast.generate(torch.tensor([prompt]), **kept)
            assert torch.equal(out.sequences, expected.sequences)
            assert torch.equal(torch.stack(out.logits), torch.stack(expected.logits).float())
        assert "to the bit" in fast.report().reference


@pytest.mark.parametrize("name", ["bloom", "mistral", "mixtral", "gpt2", "llama"])
def test_models_whose_bits_are_not_known_are_read_token_by_token(name: str) -> None:
    """Biases in attention, sliding windows, stacked experts, other matrices than linear layers; and fp32."""
    model = tiny(name, torch.float32 if name == "llama" else torch.bfloat16, 1.5)
    fast = truedraft.accelerate(model, ties="recheck")
    assert not fast.target.decides_as_generate and fast.target.noise > 0
    assert generated(fast, PROMPTS[0], do_sample=False) == generated(model, PROMPTS[0], do_sample=False)


@pytest.mark.parametrize("fault", ["attention", "products"])
def test_other_bits_are_noticed_before_they_are_used(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Rounding of one attention result in a hundred, or an order of columns that is not torch's."""
    model: Any = copy.deepcopy(tiny("llama", torch.bfloat16, 1.5))
    exact(model)
    if fault == "attention":

        def rounded(self: Any, query: Tensor, *args: Any, **given: Any) -> Tensor:
            result = right(self, query, *args, **given)
            result.view(-1)[::100] *= 1 + 2**-7
            return result

        right = TokenwisePass._attention
        monkeypatch.setattr(TokenwisePass, "_attention", rounded)
    else:
        monkeypatch.setattr(tokenwise, "_torch_like", lambda layer, panels: Skewed(panels))
    assert not truedraft.accelerate(model, ties="recheck").target.decides_as_generate


class Skewed:
    """A product with one result in a thousand off by a bit."""

    def __init__(self, panels: Any):
        self.right = Product(native.library(), panels, torch.bfloat16)

    def takes(self, x: Tensor) -> bool:
        return self.right.takes(x)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.right(x)
        y.view(-1)[::1000] *= 1 + 2**-7
        return y


def test_columns_are_added_up_as_torch_does_for_one_token() -> None:
    """Of a layer with more columns than torch adds up first; for any number of tokens."""
    exact(tiny("llama", torch.bfloat16, 1.5))
    for inner, bias in ((1536, True), (1104, False)):
        torch.manual_seed(0)
        layer = torch.nn.Linear(inner, 160, bias=bias, dtype=torch.bfloat16)
        product = tokenwise._torch_like(layer, panels(linear_weight(layer, torch.bfloat16)))
        x = torch.randn(40, inner, dtype=torch.bfloat16)
        with torch.no_grad():
            assert product is not None
            assert torch.equal(product(x), torch.cat([layer(token[None]) for token in x]))


def test_layers_without_a_known_order_are_computed_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = copy.deepcopy(tiny("qwen2", torch.bfloat16, 1.5))
    monkeypatch.setattr(tokenwise, "_torch_like", lambda layer, panels: None)
    fast = exact(model)
    assert generated(fast, PROMPTS[0], do_sample=False) == generated(model, PROMPTS[0], do_sample=False)


def test_returned_scores_are_the_rechecked_ones() -> None:
    model = twins()
    kept = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, max_new_tokens=TOKENS)
    expected = model.generate(torch.tensor([PROMPTS[0]]), do_sample=False, **kept)  # type: ignore[operator]
    out = truedraft.accelerate(model, ties="recheck").generate(torch.tensor([PROMPTS[0]]), do_sample=False, **kept)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(torch.stack(out.logits), torch.stack(expected.logits).float())
    assert torch.equal(torch.stack(out.scores), torch.stack(expected.scores).float())


def test_rechecked_scores_of_a_lockstep_batch_match_its_tokens() -> None:
    model = twins()
    fast = truedraft.accelerate(model, draft="prompt-lookup", control="fixed", ties="recheck")
    given = dict(**ragged(model, 2), max_new_tokens=12, do_sample=False, pad_token_id=0, repetition_penalty=1.2)
    expected = fast.generate(**given)
    out = fast.generate(**given, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(out.sequences, expected)
    assert torch.equal(torch.stack(out.scores, 1).argmax(-1), expected[:, -12:])


@pytest.mark.parametrize(
    ("settings", "noise"),
    [
        ({"do_sample": False}, 0.02),
        ({"do_sample": False, "repetition_penalty": 1.3}, 0.02),
        ({"do_sample": True, "temperature": 0.7}, 0.2),
    ],
    ids=["greedy", "penalty", "sampled"],
)
def test_rate_of_near_ties_follows_from_the_returned_scores(settings: dict[str, Any], noise: float) -> None:
    """By the gap of the two best of the returned scores; for sampling after subtracting the log of the noise."""
    model = tiny("llama", torch.bfloat16, 1.5)
    prompt = torch.tensor([PROMPTS[1]])
    fast = truedraft.accelerate(model, draft="auto", control="fixed")
    fast.target.noise = noise
    torch.manual_seed(4)
    fast.generate(prompt, max_new_tokens=TOKENS, **settings)
    rate = fast.report().near_ties
    torch.manual_seed(4)
    out = fast.generate(prompt, max_new_tokens=TOKENS, return_dict_in_generate=True, output_scores=True, **settings)
    scale = settings.get("repetition_penalty", 1.0) / settings.get("temperature", 1.0)
    near = 0
    for step, scores in enumerate(out.scores):
        if settings["do_sample"]:
            scores = scores - noise_of(4, step, 1, scores.shape[-1]).log()
        best, second = scores.double().topk(2).values[0].tolist()
        near += best - second <= 2 * fast.target.noise * scale
    assert 0 < near < TOKENS and rate == pytest.approx(near / TOKENS) == fast.report().near_ties


def test_near_ties_are_counted_with_noise_from_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", torch.bfloat16, 1.5)
    given = dict(**ragged(model, 3), max_new_tokens=12, do_sample=True, pad_token_id=0, eos_token_id=7)
    rates = []
    for far in (False, True):
        monkeypatch.setattr("truedraft.chance.far", lambda device, far=far: far)
        fast = truedraft.accelerate(model, draft="auto", control="fixed")
        fast.target.noise = 0.3
        torch.manual_seed(4)
        fast.generate(**given)
        rates.append(fast.report().near_ties)
    assert rates[0] == pytest.approx(rates[1]) and rates[0] > 0


def test_reports_name_the_reference_and_omit_near_ties_in_fp32() -> None:
    coarse, fine = (truedraft.accelerate(tiny("llama", d, 1.5)) for d in (torch.bfloat16, torch.float32))
    for fast in (coarse, fine):
        fast.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False)
    report = coarse.report()
    words = " ".join(str(report).split())
    assert report.near_ties and f"near-ties {report.near_ties:.1%} of the tokens" in words
    assert "plain decoding through the same pass" in words and "model.generate up to ties of bfloat16" in words
    assert report.as_dict()["near_ties"] == round(report.near_ties, 6) and report.as_dict()["reference"]
    assert fine.report().near_ties == 0 and "near-ties" not in str(fine.report())


def test_rejection_rules_report_no_near_ties() -> None:
    fast = truedraft.accelerate(tiny("llama", torch.bfloat16), draft=None, rule="multi-round")
    fast.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, do_sample=True)
    assert fast.report().near_ties is None and "the law of plain sampling" in fast.report().reference


class Counting(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        return scores


def test_unsupported_uses_of_recheck_are_refused() -> None:
    model = tiny("llama", torch.float32)
    with pytest.raises(Refused, match=r"ties='both'.*'keep'"):
        truedraft.accelerate(model, ties="both")
    with pytest.raises(Refused, match=r"ties='recheck'.*rejection"):
        truedraft.accelerate(model, rule="rejection", ties="recheck")
    with pytest.raises(Refused, match=r"ties='recheck'.*encoder-decoder"):
        truedraft.accelerate(seq2seq_models.model(), ties="recheck")
    fast = truedraft.accelerate(model, ties="recheck")
    with pytest.raises(Refused, match=r"ties='recheck'.*Counting"):
        fast.generate(torch.tensor([[1, 2]]), max_new_tokens=2, logits_processor=LogitsProcessorList([Counting()]))


def test_generate_command_has_the_ties_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "nano", "one day", "--max-new-tokens", "2", "--ties", "recheck"]) == 0
    assert main(["generate", "nano", "one day", "--ties", "never"]) == 2
    assert "--ties never" in capsys.readouterr().err


class Digits:
    """A tokenizer of numbers."""

    pad_token_id, truncation_side = 0, "left"

    def __call__(self, text: str | list[str], **_: Any) -> Any:
        lines = [[int(t) for t in line.split()] for line in ([text] if isinstance(text, str) else text)]
        from transformers import BatchEncoding

        ids = torch.tensor(lines)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


WORK = Workload("digits", tuple(Item(" ".join(map(str, p))) for p in PROMPTS), TOKENS)


def benched(model: PreTrainedModel, temperature: float = 0.0, **given: Any) -> list[Any]:
    sides = [
        transformers_side("transformers", model),
        truedraft_side("no drafts", truedraft.accelerate(model, draft=None, **given)),
        truedraft_side("noise", truedraft.accelerate(model, draft=Noise(), control="fixed", **given)),
    ]
    return compare(sides, WORK, Digits(), model.device, rounds=1, temperature=temperature)


def test_bench_compares_coarse_dtypes_with_the_same_pass_and_counts_the_rest() -> None:
    model = twins()
    fast = truedraft.accelerate(model, draft=None)
    different = sum(generated(fast, p, do_sample=False) != generated(model, p, do_sample=False) for p in PROMPTS)
    plain, none, noise = benched(model)
    assert plain.as_model and plain.as_undrafted is None and not plain.apart
    for side in (none, noise):
        assert side.differs is None and side.speed_up is not None
        assert "bug" not in side.apart and sum(side.apart.values()) == different > 0
        assert side.as_undrafted and not side.as_model and "tie" in side.apart
    rechecked = benched(model, ties="recheck")[1]
    assert rechecked.as_model and not rechecked.apart
    sampled = benched(model, 0.7)[1]
    assert sampled.differs is None and set(sampled.apart) == {"sampled"}


def test_bench_compares_with_generate_itself_in_fp32() -> None:
    assert all(f.differs is None and f.as_model and not f.apart for f in benched(tiny("llama", torch.float32)))


def test_bench_finds_a_bug_in_a_coarse_dtype_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import faults

    faults.unchecked(faults.ACCEPTED_UNVERIFIED)(monkeypatch)
    _, none, noise = benched(twins())
    assert none.differs is None and noise.differs is not None and noise.speed_up is None


def test_near_tie_rate_of_a_batch_is_the_mean_of_its_rows() -> None:
    model = tiny("llama", torch.bfloat16, 1.5)
    fast = truedraft.accelerate(model, draft="auto", control="fixed")
    inputs = ragged(model, 3)
    fast.generate(**inputs, max_new_tokens=10, do_sample=False)
    together = fast.report().near_ties
    alone = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        fast.generate(ids[mask.bool()][None], max_new_tokens=10, do_sample=False)
        alone.append(fast.report().near_ties)
    assert together == pytest.approx(sum(alone) / 3)
