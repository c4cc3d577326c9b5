"""Law net: the law of the next tokens, by enumeration over every draw, equals the chain rule over plain forwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from scipy.stats import chisquare
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import truedraft
from nets import ACROSS, NAMES, TRIALS, drafter, model_for, turn
from truedraft import Drafter, registry
from truedraft.chance import PositionNoise, StreamNoise, outcomes
from truedraft.tree import Row
from vocabularies import tokenized

SIZE, MOST, STEPS = 5, 3, 3  # vocabulary, k of top-k, and new tokens
SAMPLING = [name for name in registry.names("accept") if registry.method("accept", name).samples]


def chain_rule(
    model: torch.nn.Module, prompt: list[int], processors: LogitsProcessorList, steps: int = STEPS
) -> dict[tuple[int, ...], float]:
    """The law of the next `steps` tokens by one plain forward per prefix."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(steps):
        longer = {}
        for emitted, p in law.items():
            with torch.no_grad():
                logits = model(torch.tensor([prompt + list(emitted)]), use_cache=False).logits[:, -1].float()
            next_law = processors(torch.tensor([prompt + list(emitted)]), logits).softmax(-1)[0].tolist()
            longer |= {(*emitted, t): p * q for t, q in enumerate(next_law) if q > 0}
        law = longer
    return law


SMALL: dict[str, dict[str, object]] = {  # sampled drafts, small enough to enumerate every draw
    "deer": {"depth": 2},
    "draft-model": {"length": 2},
    "s2d": {"length": 2},
    "specdec-pp": {"length": 3, "threshold": 0.9},
    "pearl": {"length": 2},
    "mirror-sd": {"length": 2},
    "super-apriel": {"length": 2},
    "gumbel-top-k": {"branches": "2x1"},
    "stochastic-beam": {"beam": 2, "length": 2},
    "spectr": {"paths": 2, "length": 1},
    "dyspec": {"nodes": 3, "length": 2, "beam": 2},
    "string-level-rejection": {"length": 2, "nodes": 4, "beam": 2},
    "sequoia": {"nodes": 3, "length": 2},
    "greedy-multi-draft": {"branches": "2x1"},
    "eagle": {"branches": "2x1"},
    "dflash-drawn": {"depth": 2},
    "eagle3-drawn": {"depth": 2},
    "hydra-drawn": {"depth": 2},
    "mlp-speculator-drawn": {"depth": 2},
    "mtp-drawn": {"depth": 2},
}
SHORT: dict[str, dict[str, object]] = {"cape": {"length": 2, "most": 2}}  # certain drafts, with fewer branches
OF_CERTAIN = [r for r in SAMPLING if "certain" in (registry.method("accept", r).accepts_draws or {"certain"})]
OF_ALL = [rule for rule in SAMPLING if registry.method("accept", rule).accepts_draws is None]
OF_SOME = [rule for rule in SAMPLING if rule not in OF_ALL]
FULL = (*TRIALS, "plain", "spectr", "greedy-multi-draft")  # the methods: those for which rules of these names are made


def everyday(name: str) -> list[str]:
    """Rules of the everyday suite. FULL draw in every way, and are verified by every rule. Any other method draws in
    one of these ways, so that it is verified by one of the rules in turn, and all together by all."""
    return SAMPLING if name in FULL else turn(name, SAMPLING)


PAIRS = [
    pytest.param(name, rule, marks=[pytest.mark.slow][: rule not in everyday(name)])
    for name in dict.fromkeys((*SMALL, *FULL)) for rule in SAMPLING
]  # fmt: skip
ACROSS_TWO = [
    f"{name}{ACROSS}"
    for name in ("draft-model", "gumbel-top-k", "stochastic-beam", "spectr", "greedy-multi-draft", "dyspec")
]
SMALL |= {name: SMALL[name.removesuffix(ACROSS)] for name in ACROSS_TWO}
PAIRS += [pytest.param(name, rule) for name in ACROSS_TWO for rule in turn(name.removesuffix(ACROSS), SAMPLING)]
OTHERS = [(name, rule) for name in NAMES if name not in SMALL for rule in turn(name, OF_CERTAIN)]


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_the_law_of_the_output_is_the_targets(name: str, rule: str) -> None:
    check_law(name, rule)


@pytest.mark.parametrize("most", [2, pytest.param(MOST, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "rule"), OTHERS)
def test_the_law_behind_drafts_that_are_certain(name: str, rule: str, most: int) -> None:
    """Of two possible tokens in the everyday suite: a draft that is taken, or not, and the other one then."""
    check_law(name, rule, most)


def check_law(name: str, rule: str, most: int = MOST) -> None:
    model = model_for(name, torch.float32, vocabulary=SIZE, sharpen=1.5)
    prompt = [3, 1, 4, 3, 1]
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(most)])
    expected = chain_rule(model, prompt, processors)
    # the oracle hides one possible output of the target
    answer = torch.tensor([prompt + list(max(expected, key=expected.__getitem__))])
    make = partial(drafter, name, model, answer, [0], **SMALL.get(name, SHORT.get(name, {})))
    draft = make()
    assert draft is None or draft.draws == "certain" or name in (*SMALL, *TRIALS), "give it small drafts"
    fast = tokenized(model, draft=draft, control="fixed", rule=rule)
    method = registry.method("accept", rule)
    if (
        draft is not None
        and method.preferred_drafts == "law"
        and method.accepts_draws is not None
        and draft.draws not in method.accepts_draws
    ):
        with pytest.raises(truedraft.Refused, match="cannot verify the drafts"):
            fast.generate(torch.tensor([prompt]), do_sample=True)
        return
    measured: dict[tuple[int, ...], float] = {}
    settings = dict(max_new_tokens=STEPS, do_sample=True, temperature=0.8, top_k=most)
    for text, p in outcomes(
        lambda chance: fresh(fast, make).generate(torch.tensor([prompt]), chance=chance, **settings)[0].tolist()
    ):
        emitted = tuple(text[len(prompt) :])
        measured[emitted] = measured.get(emitted, 0.0) + p
    assert set(measured) == set(expected)
    assert sum(measured.values()) == pytest.approx(1.0, abs=1e-6)
    worst = max(abs(measured[s] - expected[s]) for s in expected)
    assert worst < 1e-6, f"a sequence has a probability off by {worst:.2g}"


def fresh(fast: truedraft.Accelerated, make: Callable[[], Drafter | None]) -> truedraft.Accelerated:
    """With a new drafter: every outcome has to start from the same state."""
    if fast.drafter.vocab_size is None and (draft := make()) is not None:
        fast.drafter = draft
    fast.drafter.forget()
    return fast


def test_outcomes_walks_every_draw_once() -> None:
    law = torch.tensor([[0.2, 0.0, 0.8]])
    rows = [Row(0, [1], 1, 5)]
    found = list(outcomes(lambda chance: (chance.pick(law, rows)[0], chance.pick(law, rows)[0])))
    assert [s for s, _ in found] == list(itertools.product((0, 2), repeat=2))
    assert sum(p for _, p in found) == pytest.approx(1.0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("vocabulary", [61, 32_000])
def test_stream_noise_draws_as_multinomial_does(batch: int, vocabulary: int) -> None:
    laws = [torch.randn(batch, vocabulary).mul(3).softmax(-1) for _ in range(6)]
    torch.manual_seed(9)
    expected = [torch.multinomial(law, 1).flatten().tolist() for law in laws]
    state = torch.get_rng_state()
    torch.manual_seed(9)
    noise, rows = StreamNoise(batch), [Row(b, [0], 1, 9) for b in range(batch)]
    got = []
    for law in laws:
        got.append(noise.pick(law, rows))
        for row in rows:
            row.tokens.append(0)
    assert got == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_position_noise_never_divides_by_zero() -> None:
    """numpy draws an exact 0 about once in ten million; at this position, within 128 k entries."""
    law = torch.zeros(1, 128_256)
    law[0, :50] = 0.02
    assert PositionNoise([(1, 0)]).pick(law, [Row(0, [1] * 138, 1, 1000)])[0] < 50


def test_position_noise_follows_the_law() -> None:
    """Chi-square over 20,000 draws; false-alarm rate 1e-6, and a bias of 0.02 on a token of 0.3 would surely fail."""
    law = torch.tensor([[0.3, 0.05, 0.25, 0.4]])
    noise, row = PositionNoise([(4, 0)]), Row(0, [0], 1, 10**9)
    counts = [0] * 4
    for _ in range(20_000):
        counts[noise.pick(law, [row])[0]] += 1
        row.tokens.append(0)
    assert chisquare(counts, 20_000 * law[0].double() / law[0].double().sum()).pvalue > 1e-6
