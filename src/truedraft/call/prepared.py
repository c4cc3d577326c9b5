"""The request of a call, from what `model.generate` has prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from truedraft.accept._base import ArgmaxRule, ProbingRule, Rule
from truedraft.accept._ties import NearTies
from truedraft.call.arguments import (
    Assistant,
    chance_of,
    check_lengths,
    namespaces_of,
    references_of,
    with_sources,
)
from truedraft.call.rechecking import reference_of
from truedraft.chance import Chance
from truedraft.drafters._base import Drafter
from truedraft.drafters._compose import name_of
from truedraft.errors import Refused
from truedraft.logprobs import Logprobs, PromptScores
from truedraft.request import Request
from truedraft.sampling import History, Laws
from truedraft.stats import Pass
from truedraft.stopping import Stops, ends_of, longest
from truedraft.targets._base import Target
from truedraft.tree import Row


@dataclass(frozen=True)
class Call:
    """Arguments of a call beyond those of `model.generate`, which passes them on to the decode loop."""

    references: Any = None
    assistant: Assistant | None = None
    seed: int | Sequence[int] | None = None
    chance: Chance | None = None
    namespace: str | Sequence[str] = ""
    streamer: Any = None
    on_pass: Callable[[Pass], None] | None = None
    on_read: Callable[[int, int], None] | None = None
    sources: Tensor | None = None
    logprobs: int | None = None  # of the likeliest tokens at each place of a single row; None for no log-probabilities
    prompt_logprobs: int | None = None  # the same of its prompt


@dataclass(frozen=True)
class Prepared:
    """The arguments with which `model.generate` calls a decode loop."""

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    inputs: Mapping[str, Any]

    @property
    def returns(self) -> bool:
        """Whether the call returns an output object instead of token ids."""
        return bool(self.config.return_dict_in_generate)


def request_of(
    prepared: Prepared,
    call: Call,
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None,
    drafter: Drafter,
    rule: Rule,
    ties: str,
    reserve: Callable[[int, int], None],
) -> Request:
    """The request of a call: its rows, bound to their parts.

    Args:
        ties: see `accelerate`.
        reserve: called with the numbers of rows and of tokens per row; reserves the cache for these, and for the nodes
            of a pass.

    Raises:
        Refused: a setting that cannot be honoured exactly, or a prompt that does not fit the context or memory.
    """
    input_ids, config = prepared.input_ids, prepared.config
    if isinstance(rule, ProbingRule) and not target.branching:
        raise Refused(
            f"rule={name_of(rule)!r} reads probes in addition to drafts, and {type(target.model).__name__} scores "
            "single chains only, because it has states: use another rule"
        )
    rule.bind(target.model, tokenizer)
    target.check_taps(rule.needs)
    drafter.read(tokenizer)
    prompts = target.prompts_of(input_ids, prepared.inputs, call.sources)
    batch, most = len(prompts), max(map(len, prompts))
    steps = longest(prepared.criteria) - input_ids.shape[1]
    check_lengths(target, most, steps)
    target.check_lengths(prompts, steps)
    references = references_of(call.references, batch, tokenizer, target.vocabulary)
    if drafter.takes_references and target.shared_vocabulary:
        references = with_sources(prompts, references)
    namespaces = namespaces_of(call.namespace, batch)
    chance = call.chance or chance_of(call.seed, batch)
    reserve(batch, most + steps)
    target.check_room(prompts)

    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    prompt_ids = [[] if p.ids is None else p.ids.tolist() for p in prompts]
    ends = ends_of(prepared.criteria)
    rows = [
        Row(i, ids, len(ids), steps, references[i], ends, namespace=namespaces[i], given=prompts[i])
        for i, ids in enumerate(prompt_ids)
    ]
    history = History(input_ids, steps, pad, rows)
    returns = prepared.returns
    logprobs = None if call.logprobs is None else Logprobs(rows[0], call.logprobs)
    laws = Laws(
        prepared.processors, history, returns and config.output_scores, returns and config.output_logits, logprobs
    )
    rule.begin_call(laws)
    stops = Stops(prepared.criteria, history, laws)
    again = reference_of(ties, target, batch, most + steps, laws)
    verifier: Any = NearTies(rule, laws, target.noise, again) if isinstance(rule, ArgmaxRule) else rule
    scores = None if call.prompt_logprobs is None else PromptScores(prompts[0].ids, call.prompt_logprobs)
    return Request(rows, prompts, drafter, verifier, laws, stops, chance, history, scores)
