"""Law audit: do rules that promise the model's law, rather than its tokens, keep that promise here?

Many texts are sampled from a prompt through the engine. The law of each of their tokens is computed by one plain
forward of the model and the processors of `transformers`, on the text as it stands. A token that follows its law has a
uniform place in it: the mass of the likelier tokens, plus a uniformly random share of its own. Such places are
independent from token to token (Rosenblatt, 1952), so a chi-square test over all of them sees any shift between likely
and unlikely tokens, with a false-alarm rate that is set and a power that is known. A second test orders the tokens by
how much more the draft liked them than the model does (by its law, or by what it held for certain, never by what was
drawn): it sees drafts kept too often or too seldom. Small models are enumerated instead, without sampling error, in
the project's tests.
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
from truedraft.audit.tracer import Tracer
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
    p_value: the smaller of the two tests', times two.
    bias: mass moved to (or from) the first tokens of an order that would have been noticed with probability POWER.
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
            f"a bias is mass moved to likely or to drafted tokens, caught with probability {POWER:g}"
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
    combinations = [(rule, drafter) for rule in names for drafter in _chosen(registry.method("accept", rule), drafters)]
    level = ALARM / max(len(combinations) * len(SETTINGS), 1)
    encoded = [tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device) for prompt in prompts[:2]]
    found = []
    for rule, drafter in combinations:
        fast = accelerate(model, tokenizer, draft=drafters[drafter], rule=rule, control="fixed")
        tracer: Any = Tracer(fast.drafter)
        fast.drafter = tracer
        for settings, values in SETTINGS.items():
            progress(f"the law of {rule} with {drafter}, {settings}")
            placed: list[Tensor] = []
            length = 0.0
            for number, ids in enumerate(encoded):
                config = GenerationConfig(
                    do_sample=True, max_new_tokens=tokens, top_k=0, num_return_sequences=texts, pad_token_id=0,
                    eos_token_id=None, **values,
                )  # fmt: skip
                out = fast.generate(ids, generation_config=config, seed=seed + number)
                placed.append(_places(model, out, ids.shape[1], values, seed, tracer.candidates))
                length += fast.report().mean_acceptance_length / len(encoded)
            by_law, by_draft, tops = torch.cat(placed, 1)
            p_value = min(2 * _p_value(by_law), 2 * _p_value(by_draft), 1.0)
            found.append(Law(rule, drafter, settings, len(tops), length, p_value, level, _bias(tops, level)))
    return found


def _chosen(rule: Any, drafters: Mapping[str, Drafter]) -> list[str]:
    """Drafters whose drafts a rule judges: of those that draw alike the one with the smallest drafts, two at most."""
    found: dict[Draws, str] = {}
    for name, drafter in sorted(drafters.items(), key=lambda item: item[1].width):
        if drafter.draws in (rule.accepts_draws or KINDS):
            found.setdefault(drafter.draws, name)
    return [found[kind] for kind in KINDS if kind in found][:2]


@torch.no_grad()
def _places(
    model: PreTrainedModel,
    ids: Tensor,
    prompt: int,
    values: Mapping[str, float],
    seed: int,
    candidates: Mapping[int, Sequence[Tensor | tuple[int, ...] | None]],
) -> Tensor:
    """(3, n) for every new token: its places by the model's order and by the draft's, and the mass that is first."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in values:
        processors.append(RepetitionPenaltyLogitsProcessor(values["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(values["temperature"]))
    if "top_p" in values:
        processors.append(TopPLogitsWarper(values["top_p"]))
    logits = model(ids, use_cache=False).logits[:, prompt - 1 : -1].float()
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(logits.shape[1]):
        going = [row for row in range(len(ids)) if step < len(candidates[row])]  # the others have ended
        if not going:
            break
        law = processors(ids[going, : prompt + step], logits[going, step]).softmax(-1).double().cpu()  # type: ignore[arg-type]
        own, share = (
            ids[going, prompt + step, None].cpu(),
            torch.rand(len(law), generator=generator, dtype=torch.float64),
        )
        drafted = torch.stack([_liking(candidates[row][step], p) for row, p in zip(going, law, strict=True)])
        found.append(torch.stack([_place(law, law, own, share), _place(law, drafted, own, share), law.amax(-1)]))
    return torch.cat(found, 1)


def _liking(offered: Tensor | tuple[int, ...] | None, law: Tensor) -> Tensor:
    """How much more a draft liked each token than the model does; where there was none, how much the model does."""
    if offered is None:
        return law
    if isinstance(offered, tuple):
        return torch.zeros_like(law).index_fill_(0, torch.tensor(offered), 1.0)
    return offered.double().cpu() / law.clamp_min(1e-300)


def _place(law: Tensor, order: Tensor, own: Tensor, share: Tensor) -> Tensor:
    """The mass of the tokens before a row's own, and a share of those that are level with it; (rows,)."""
    at = order.gather(1, own)
    return ((law * (order > at)).sum(-1) + (law * (order == at)).sum(-1) * share).clamp(0, 1)


def _p_value(places: Tensor) -> float:
    return float(chisquare(torch.histc(places, BINS, 0.0, 1.0).numpy()).pvalue)


def _bias(tops: Tensor, level: float) -> float:
    """Mass e moved to tokens that hold `top` has noncentrality n e^2 / (top (1 - top)); the e with enough of it."""
    limit = chi2.isf(level / 2, BINS - 1)
    needed = brentq(lambda nc: ncx2.sf(limit, BINS - 1, nc) - POWER, 1e-3, 1e5)
    top = float(tops.mean().clamp(0.02, 0.98))
    return min(float(needed / len(tops) * top * (1 - top)) ** 0.5, 1.0)
