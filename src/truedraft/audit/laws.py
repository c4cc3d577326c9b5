"""Law audit: do rules that promise the model's law, rather than its tokens, keep that promise here?

Many texts are sampled from a prompt through the engine. The law of each of their tokens is computed by one plain
forward of the model and the processors of `transformers`, on the text as it stands. A token that follows its law has a
uniform place in it: the mass of the likelier tokens, plus a uniformly random share of its own. Such places are
independent from token to token (Rosenblatt, 1952), so a chi-square test over all of them sees any shift between likely
and unlikely tokens, with a false-alarm rate that is set and a power that is known. Small models are enumerated instead,
without sampling error, in the project's tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.optimize import brentq
from scipy.stats import chi2, chisquare, ncx2
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from truedraft import registry
from truedraft.accelerated import accelerate
from truedraft.drafters._base import Drafter
from truedraft.tree import Draws

KINDS: tuple[Draws, ...] = ("distinct", "last", "independent", "one", "certain")  # the hardest to judge first
BINS, ALARM, POWER = 20, 1e-3, 0.99
SETTINGS: dict[str, dict[str, float]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.9, repetition penalty 1.2": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
}


@dataclass(frozen=True)
class Law:
    """A rule under test.

    tokens: how many were placed in their laws.
    level: p-values below are alarms; chosen so that all tests together raise a false one with probability ALARM.
    bias: mass moved to (or from) the likeliest tokens that would have been noticed with probability POWER.
    """

    rule: str
    drafter: str
    settings: str
    tokens: int
    mean_acceptance_length: float
    p_value: float
    level: float
    bias: float

    @property
    def holds(self) -> bool:
        return self.p_value >= self.level

    @property
    def caption(self) -> str:
        return (
            f"chi-square over {BINS} bins; all tests together raise a false alarm with probability {ALARM:g}; "
            f"a bias is mass moved to the likeliest tokens, caught with probability {POWER:g}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def law_audit(
    model: PreTrainedModel,
    tokenizer: Any,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[str],
    rules: Sequence[str] | None = None,
    texts: int = 128,
    tokens: int = 12,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Law]:
    """Test every rule of guarantee `distribution`, each with drafts of two kinds where it judges as many.

    Args:
        rules: names; None for all of them.
        texts: sampled from each of the first two prompts.
        tokens: per text, at most.
        seed: of the noise, which is tied to row and position.
    """
    names = rules or [n for n in registry.names("accept") if registry.method("accept", n).guarantee == "distribution"]
    pairs = [(rule, drafter) for rule in names for drafter in _chosen(registry.method("accept", rule), drafters)]
    level = ALARM / max(len(pairs) * len(SETTINGS), 1)
    found = []
    for rule, drafter in pairs:
        fast = accelerate(model, tokenizer, draft=drafters[drafter], rule=rule, control="fixed")
        for settings, values in SETTINGS.items():
            progress(f"the law of {rule} with {drafter}, {settings}")
            places, tops, length = [], [], 0.0
            for number, prompt in enumerate(prompts[:2]):
                ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
                config = GenerationConfig(
                    do_sample=True, max_new_tokens=tokens, top_k=0, num_return_sequences=texts, pad_token_id=0,
                    eos_token_id=None, **values,
                )  # fmt: skip
                out = fast.generate(ids, generation_config=config, seed=seed + number)
                place, top = _places(model, out, ids.shape[1], values, seed)
                places.append(place)
                tops.append(top)
                length += fast.report().mean_acceptance_length / 2
            p_value, bias = _tested(torch.cat(places), torch.cat(tops), level)
            found.append(Law(rule, drafter, settings, sum(map(len, places)), length, p_value, level, bias))
    return found


def _chosen(rule: Any, drafters: Mapping[str, Drafter]) -> list[str]:
    """Drafters whose drafts a rule judges: of those that draw alike the one with the smallest drafts, two at most."""
    found: dict[Draws, str] = {}
    for name, drafter in sorted(drafters.items(), key=lambda item: item[1].width):
        if drafter.draws in (rule.takes or KINDS):
            found.setdefault(drafter.draws, name)
    return [found[kind] for kind in KINDS if kind in found][:2]


@torch.no_grad()
def _places(
    model: PreTrainedModel, ids: Tensor, prompt: int, values: Mapping[str, float], seed: int
) -> tuple[Tensor, Tensor]:
    """Every new token's place in its law, in [0, 1], and the probability of the likeliest one there."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in values:
        processors.append(RepetitionPenaltyLogitsProcessor(values["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(values["temperature"]))
    if "top_p" in values:
        processors.append(TopPLogitsWarper(values["top_p"]))
    logits = model(ids, use_cache=False).logits[:, prompt - 1 : -1].float()
    generator = torch.Generator().manual_seed(seed)
    places, tops = [], []
    for step in range(logits.shape[1]):
        law = processors(ids[:, : prompt + step], logits[:, step]).softmax(-1).double().cpu()  # type: ignore[arg-type]
        own = law.gather(1, ids[:, prompt + step, None].cpu())
        before = (law * (law > own)).sum(-1)
        alike = (law * (law == own)).sum(-1)
        places.append(before + alike * torch.rand(len(law), generator=generator, dtype=torch.float64))
        tops.append(law.amax(-1))
    return torch.cat(places).clamp(0, 1), torch.cat(tops)


def _tested(places: Tensor, tops: Tensor, level: float) -> tuple[float, float]:
    """The p-value of uniform places, and the bias that would have been caught."""
    counts = torch.histc(places, BINS, 0.0, 1.0)
    p_value = float(chisquare(counts.numpy()).pvalue)
    limit = chi2.isf(level, BINS - 1)
    needed = brentq(lambda nc: ncx2.sf(limit, BINS - 1, nc) - POWER, 1e-3, 1e5)
    # mass e moved to the likeliest tokens, which hold `top`: noncentrality n e^2 / (top (1 - top)), at its weakest
    top = float(tops.mean().clamp(0.02, 0.98))
    return p_value, min(float(needed / len(places) * top * (1 - top)) ** 0.5, 1.0)
