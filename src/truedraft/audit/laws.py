"""Law audit: statistical tests of the rules of guarantee `distribution`, for a model on this machine.

Many texts are sampled from a prompt through the engine. The law (next-token distribution) of each of their tokens is
computed by one plain forward of the model and the processors of `transformers`, on the sampled text. A token drawn from
its law has a uniform quantile in it: the mass of the likelier tokens, plus a uniformly random share of its own. These
quantiles are independent from token to token (Rosenblatt, 1952), so a chi-square test over all of them detects any
shift between likely and unlikely tokens, with a set false-alarm rate and a computed power. A second test orders the
tokens by the ratio of draft probability to target probability (certain drafts count as 1; the order never depends on
what was drawn): it detects drafts accepted too often or too seldom. For small models the project's tests enumerate the
distribution instead, without sampling error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from truedraft.audit.tokens import Progress
from truedraft.audit.tracer import Tracer
from truedraft.drafters._base import Drafter
from truedraft.tree import Draws

KINDS: tuple[Draws, ...] = ("distinct", "last", "independent", "one", "certain")  # the hardest to verify first
BINS, ALARM, POWER = 20, 1e-3, 0.99
SETTINGS: dict[str, dict[str, float]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.9, repetition penalty 1.2": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
}


@dataclass(frozen=True)
class Law:
    """A rule under test.

    tokens: number of tokens tested.
    level: p-values below it are alarms; set so that all tests together raise a false one with probability ALARM.
    p_value: twice the smaller one of the two tests.
    bias: mass moved to (or from) the first tokens of an order that the test detects with probability POWER.
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
            f"a bias is mass moved to likely or to drafted tokens, detected with probability {POWER:g}"
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
    progress: Progress = lambda *_: None,
) -> list[Law]:
    """Test every rule of guarantee `distribution`, each with drafts of up to two kinds that it accepts.

    Args:
        rules: names; None for all of them.
        texts: texts sampled from each of the first two prompts.
        tokens: most tokens per text.
        seed: seed of the noise, which depends on row and position.
        progress: called before each test.

    Raises:
        KeyboardInterrupt: Ctrl-C; its `finished` is the list of the tests before it.
    """
    names = rules or [n for n in registry.names("accept") if registry.method("accept", n).guarantee == "distribution"]
    chosen = {rule: _chosen(registry.method("accept", rule), drafters) for rule in names}
    tests = [(rule, drafter, how) for rule, several in chosen.items() for drafter in several for how in SETTINGS]
    level = ALARM / max(len(tests), 1)
    encoded = [tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device) for prompt in prompts[:2]]
    found: list[Law] = []
    try:
        for number, (rule, drafter, how) in enumerate(tests):
            progress(f"the law of {rule} with {drafter}, {how}", number / len(tests))
            fast = accelerate(model, tokenizer, draft=drafters[drafter], rule=rule, control="fixed")
            length, top_masses, p_value = _tested(fast, encoded, SETTINGS[how], texts, tokens, seed)
            found.append(Law(rule, drafter, how, len(top_masses), length, p_value, level, _bias(top_masses, level)))
    except KeyboardInterrupt as stop:
        stop.finished = found  # type: ignore[attr-defined]
        raise
    return found


def _tested(
    fast: Any, prompts: Sequence[Tensor], values: Mapping[str, float], texts: int, tokens: int, seed: int
) -> tuple[float, Tensor, float]:
    """Of sampled texts: their mean acceptance length, the mass of the likeliest token at each place, and the p-value.

    prompts: (1, length) ids each; the other arguments are those of `law_audit`.
    """
    tracer: Any = Tracer(fast.drafter)
    fast.drafter, quantiles, length = tracer, list[Tensor](), 0.0
    for number, ids in enumerate(prompts):
        config = GenerationConfig(
            do_sample=True, max_new_tokens=tokens, top_k=0, num_return_sequences=texts, pad_token_id=0,
            eos_token_id=None, **values,
        )  # fmt: skip
        out = fast.generate(ids, generation_config=config, seed=seed + number)
        quantiles.append(_quantiles(fast.model, out, ids.shape[1], values, seed, tracer.candidates))
        length += fast.report().mean_acceptance_length / len(prompts)
    by_law, by_draft, top_masses = torch.cat(quantiles, 1)
    return length, top_masses, min(2 * _p_value(by_law), 2 * _p_value(by_draft), 1.0)


def _chosen(rule: Any, drafters: Mapping[str, Drafter]) -> list[str]:
    """Drafters that a rule accepts: for each kind of drawing the one with the smallest drafts, two at most."""
    found: dict[Draws, str] = {}
    for name, drafter in sorted(drafters.items(), key=lambda item: item[1].width):
        if drafter.draws in (rule.accepts_draws or KINDS):
            found.setdefault(drafter.draws, name)
    return [found[kind] for kind in KINDS if kind in found][:2]


@torch.no_grad()
def _quantiles(
    model: PreTrainedModel,
    ids: Tensor,
    prompt: int,
    values: Mapping[str, float],
    seed: int,
    candidates: Mapping[int, Sequence[Tensor | tuple[int, ...] | None]],
) -> Tensor:
    """(3, n) for each new token: quantiles in the model's order and in the draft's, and the mass of the likeliest."""
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
        running = [row for row in range(len(ids)) if step < len(candidates[row])]  # the other rows have ended
        if not running:
            break
        law = processors(ids[running, : prompt + step], logits[running, step]).softmax(-1).double().cpu()  # type: ignore[arg-type]
        own, share = (
            ids[running, prompt + step, None].cpu(),
            torch.rand(len(law), generator=generator, dtype=torch.float64),
        )
        drafted = torch.stack([_draft_ratio(candidates[row][step], p) for row, p in zip(running, law, strict=True)])
        found.append(torch.stack([_quantile(law, law, own, share), _quantile(law, drafted, own, share), law.amax(-1)]))
    return torch.cat(found, 1)


def _draft_ratio(candidates_of_node: Tensor | tuple[int, ...] | None, law: Tensor) -> Tensor:
    """The ratio of draft to target probability of each token, (V,); without a draft, the target probability."""
    if candidates_of_node is None:
        return law
    if isinstance(candidates_of_node, tuple):
        return torch.zeros_like(law).index_fill_(0, torch.tensor(candidates_of_node), 1.0)
    return candidates_of_node.double().cpu() / law.clamp_min(1e-300)


def _quantile(law: Tensor, order: Tensor, own: Tensor, share: Tensor) -> Tensor:
    """A row's token's quantile in an order: the mass of the tokens before it, plus a share of its ties; (rows,)."""
    at = order.gather(1, own)
    return ((law * (order > at)).sum(-1) + (law * (order == at)).sum(-1) * share).clamp(0, 1)


def _p_value(quantiles: Tensor) -> float:
    return float(chisquare(torch.histc(quantiles, BINS, 0.0, 1.0).numpy()).pvalue)


def _bias(top_masses: Tensor, level: float) -> float:
    """Mass e moved to tokens that hold `top` has noncentrality n e^2 / (top (1 - top)); the e with enough of it."""
    limit = chi2.isf(level / 2, BINS - 1)
    needed = brentq(lambda nc: ncx2.sf(limit, BINS - 1, nc) - POWER, 1e-3, 1e5)
    top = float(top_masses.mean().clamp(0.02, 0.98))
    return min(float(needed / len(top_masses) * top * (1 - top)) ** 0.5, 1.0)
