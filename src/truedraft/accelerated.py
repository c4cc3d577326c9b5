"""`accelerate(model)`: a model's own `generate`, faster, with the same result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from truedraft import registry
from truedraft.accept._base import Rule
from truedraft.chance import Chance, PositionNoise, StreamNoise
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter, Plain
from truedraft.engine import Engine
from truedraft.errors import Refused
from truedraft.sampling import History, Laws
from truedraft.stats import Pass, Report, Stopwatch
from truedraft.stopping import Stops
from truedraft.targets.decoder import DecoderTarget, Prompt, check_exact
from truedraft.tree import Row

Document = str | Sequence[int] | Tensor

# Settings of generate that change what is computed and that the engine does not do.
UNSUPPORTED = {
    "num_beams": (1, "beam search is not supported"),
    "num_beam_groups": (1, "group beam search is not supported"),
    "penalty_alpha": (None, "contrastive search is not supported"),
    "dola_layers": (None, "DoLa decoding is not supported"),
    "constraints": (None, "constrained beam search is not supported"),
    "force_words_ids": (None, "constrained beam search is not supported"),
    "output_attentions": (False, "attention weights of single tokens do not exist in a pass over a tree"),
    "output_hidden_states": (False, "hidden states are not collected"),
    "token_healing": (False, "token healing is not supported"),
    "assistant_early_exit": (None, "early-exit drafting has no drafter here"),
}  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """What this call adds to `model.generate`, carried through it to the decode loop."""

    drafter: Drafter
    references: Any
    seed: int | Sequence[int] | None
    chance: Chance | None
    streamer: Any
    on_pass: Callable[[Pass], None] | None


class Accelerated:
    """A model with drafts; made by `accelerate`.

    Attributes:
        model: the model as it was given, untouched.
        target, drafter, control: the parts in play.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        draft: str | Drafter | None,
        rule: str | Rule | None,
        control: str | Control,
    ):
        self.target = DecoderTarget(model)
        self.model, self.tokenizer = model, tokenizer
        self.default_draft = draft == "auto"
        self.drafter = _drafter("prompt-lookup" if self.default_draft else draft)
        self.rule: Rule | None = registry.load("accept", rule) if isinstance(rule, str) else rule
        self.control: Control = registry.load("control", control) if isinstance(control, str) else control
        _check_vocabulary(self.drafter, tokenizer)
        check_exact(self.target)
        self._report: Report | None = None

    def report(self) -> Report:
        """Figures of the last call of `generate`.

        Raises:
            Refused: nothing was generated yet.
        """
        if self._report is None:
            raise Refused("there is nothing to report: call generate() first")
        return self._report

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        references: Sequence[Document] | Sequence[Sequence[Document]] | None = None,
        seed: int | Sequence[int] | None = None,
        chance: Chance | None = None,
        on_pass: Callable[[Pass], None] | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """`model.generate`, with its arguments and its return value, in fewer passes.

        Greedy: the tokens of `model.generate`. With `do_sample=True`: the tokens that `model.generate` samples
        under the same `torch.manual_seed`; torch's random stream stands afterwards where it would have stood.
        Ctrl-C ends generation and returns what there is.

        Args:
            inputs: (batch, length) prompt ids, as in `model.generate`; left-padded batches with their `attention_mask`.
            references: documents that the output may copy from, for drafters that use them: texts or token ids,
                for every row; or one such list per row.
            seed: draw the noise of each row from (seed, row, position) instead of torch's stream, so that a row's
                text does not depend on its neighbours; a list gives each row a seed of its own.
            chance: another source of noise.
            on_pass: called after every pass with what it emitted.
            **kwargs: whatever `model.generate` takes.

        Raises:
            Refused: a setting that cannot be honoured exactly, named before anything is computed.
        """
        drafter = self._drafter_of(kwargs, references)
        _check_arguments(kwargs)
        call = _Call(drafter, references, seed, chance, kwargs.get("streamer"), on_pass)
        kwargs = self._with_stop_strings(kwargs)
        return self.model.generate(inputs, custom_generate=self._decode, truedraft_call=call, **kwargs)  # type: ignore[operator]

    def _drafter_of(self, kwargs: dict[str, Any], references: Any) -> Drafter:
        if (length := kwargs.pop("prompt_lookup_num_tokens", None)) is not None:
            return registry.load(
                "drafters", "prompt-lookup", length=length, n=kwargs.pop("max_matching_ngram_size", None) or 2
            )
        if references is None or self.drafter.takes_references:
            return self.drafter
        if self.default_draft:
            return registry.load("drafters", "llma")
        raise Refused(
            f"references were given, and {_name(self.drafter)} does not use any: accelerate the model with draft='llma'"
        )

    def _with_stop_strings(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Stop strings as a ready criterion: `generate` forgets the tokenizer when a decode loop is given to it."""
        kwargs = dict(kwargs)
        tokenizer = kwargs.pop("tokenizer", None) or self.tokenizer
        config = kwargs.get("generation_config") or self.model.generation_config
        strings = kwargs.get("stop_strings", getattr(config, "stop_strings", None))
        if strings is None:
            return kwargs
        if tokenizer is None:
            raise Refused(f"stop_strings={strings!r} need a tokenizer: give one to accelerate() or to generate()")
        criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
        return {**kwargs, "stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        truedraft_call: _Call,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """The decode loop that `model.generate` calls once it has prepared everything."""
        call, config = truedraft_call, generation_config
        drafter = call.drafter
        if config.prompt_lookup_num_tokens is not None:
            drafter = registry.load(
                "drafters",
                "prompt-lookup",
                length=config.prompt_lookup_num_tokens,
                n=config.max_matching_ngram_size or 2,
            )
        rule = self._rule_of(config)
        prompts = _prompts(input_ids, model_kwargs)
        steps = config.max_length - input_ids.shape[1]
        self._check_lengths(prompts, steps)
        self.target.reserve(len(prompts), max(map(len, prompts)) + steps + drafter.width)
        pad = int(config._pad_token_tensor) if config._pad_token_tensor is not None else 0
        history = History(input_ids, steps, pad)
        returns = config.return_dict_in_generate
        laws = Laws(logits_processor, history, returns and config.output_scores, returns and config.output_logits)
        stops = Stops(stopping_criteria, history, laws)
        chance = call.chance or _chance(call.seed, len(prompts))
        references = self._references(call.references, len(prompts))
        rows = [
            Row(i, [] if p.ids is None else p.ids.tolist(), 0 if p.ids is None else len(p), steps, references[i])
            for i, p in enumerate(prompts)
        ]
        watch = Stopwatch()
        engine = Engine(self.target, drafter, rule, self.control, laws, stops, chance, history, watch)
        report = Report(_name(drafter), _name(rule), rule.guarantee, _name(self.control), _notes(rows, laws, stops))
        self._report, report.seconds = report, watch.seconds
        stream = _Stream(call.streamer, rows, history)
        run = watch.timed("all", lambda passes: next(passes, None))
        passes = engine.run(rows, prompts)
        try:
            while (done := run(passes)) is not None:
                report.passes.append(done)
                if call.on_pass is not None:
                    call.on_pass(done)
                stream.put()
        except KeyboardInterrupt:
            report.interrupted = True
            report.notes.append("interrupted: what had been generated until then was returned")
            warnings.warn("generation was interrupted; what had been generated is returned", stacklevel=2)
        finally:
            self.target.cache = None
        stream.end()
        return _output(rows, history, laws, returns)

    def _rule_of(self, config: GenerationConfig) -> Rule:
        mode = config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
            raise Refused(
                f"{mode.value.replace('_', ' ')} is not supported: drop its settings (num_beams, penalty_alpha, ...)"
            )
        for name, (neutral, why) in UNSUPPORTED.items():
            value = getattr(config, name, None)
            if value not in (None, neutral):
                raise Refused(f"{name}={value!r}: {why}")
        if config.cache_implementation not in (None, "dynamic"):
            raise Refused(
                f"cache_implementation={config.cache_implementation!r}: truedraft keeps a cache of its own; drop it"
            )
        if not config.use_cache:
            raise Refused("use_cache=False: truedraft needs the KV cache; drop it, the result is the same")
        rule = self.rule or registry.load("accept", "seeded" if config.do_sample else "greedy")
        if rule.samples != bool(config.do_sample):
            raise Refused(
                f"rule={_name(rule)!r} {'samples' if rule.samples else 'does not sample'}, do_sample={config.do_sample}"
            )
        return rule

    def _check_lengths(self, prompts: Sequence[Prompt], steps: int) -> None:
        longest = max(map(len, prompts))
        if min(map(len, prompts)) == 0:
            raise Refused("a prompt is empty (no token, or masked throughout): give each row at least one token")
        context, hard = self.target.context, self.target.hard_limit
        if context is not None and longest > context:
            raise Refused(f"the prompt has {longest} tokens, the model's context has {context}: shorten the prompt")
        if hard is not None and longest + steps > hard:
            raise Refused(
                f"{longest} prompt tokens and {steps} new ones exceed the model's {hard} learned positions: "
                f"set max_new_tokens to at most {hard - longest}"
            )

    def _references(self, references: Any, batch: int) -> list[tuple[tuple[int, ...], ...]]:
        if references is None:
            return [()] * batch
        if isinstance(references, str) or not isinstance(references, Sequence):
            raise Refused(f"references={type(references).__name__}: give a list of documents, each text or token ids")
        nested = bool(references) and all(
            isinstance(r, list | tuple) and not any(isinstance(t, int) for t in r) for r in references
        )
        if not nested:
            shared = tuple(self._document(d, f"references[{i}]") for i, d in enumerate(references))
            return [shared] * batch
        if len(references) != batch:
            raise Refused(f"references has lists for {len(references)} rows, the batch has {batch}")
        return [
            tuple(self._document(d, f"references[{b}][{i}]") for i, d in enumerate(row))
            for b, row in enumerate(references)
        ]

    def _document(self, document: Any, where: str) -> tuple[int, ...]:
        if isinstance(document, str):
            if self.tokenizer is None:
                raise Refused(f"{where} is text, and there is no tokenizer: give one to accelerate(), or token ids")
            return tuple(self.tokenizer(document, add_special_tokens=False)["input_ids"])
        ids = document.tolist() if isinstance(document, Tensor) else document
        if not isinstance(ids, list | tuple) or not all(type(t) is int for t in ids):
            raise Refused(
                f"{where} is {type(document).__name__}: a reference is text (str) or token ids (list of int, 1-D tensor)"
            )
        if ids and not 0 <= min(ids) <= max(ids) < self.target.vocabulary:
            raise Refused(f"{where} has token ids outside the model's vocabulary of {self.target.vocabulary}")
        return tuple(ids)


def accelerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft: str | Drafter | None = "auto",
    rule: str | Rule | None = None,
    control: str | Control = "cost",
) -> Accelerated:
    """A model whose `generate` drafts and verifies, and says what the model alone would have said.

    Args:
        model: a decoder language model of `transformers`, in eval mode; it is not changed.
        tokenizer: needed only where text is (stop strings, references as text).
        draft: a drafter, its name (`truedraft methods` lists them; knobs as in "prompt-lookup:length=20"), or None
            for plain decoding; "auto" needs no training and uses references where they are given.
        rule: an acceptance rule or its name; by default `greedy`, or `seeded` where generate samples.
        control: how much is drafted; "cost" measures what pays on this machine, "fixed" always drafts in full.

    Raises:
        Refused: the model cannot be hosted exactly, or a name is unknown.
    """
    return Accelerated(model, tokenizer, draft, rule, control)


class _Stream:
    """Feeds a streamer as `generate` does: one token per row and step, once every row has reached the step."""

    def __init__(self, streamer: Any, rows: Sequence[Row], history: History):
        self.streamer, self.rows, self.history, self.sent = streamer, rows, history, 0

    def put(self) -> None:
        if self.streamer is None:
            return
        going = [row.step for row in self.rows if not row.ended]
        reached = min(going) if going else max(row.step for row in self.rows)
        for step in range(self.sent, reached):
            self.streamer.put(self.history.ids[:, self.history.length + step].cpu())
        self.sent = reached

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


def _output(rows: Sequence[Row], history: History, laws: Laws, returns: bool | None) -> Any:
    sequences = history.batch(max(row.step for row in rows)).clone()
    if not returns:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=None if laws.scores is None else laws.steps(laws.scores),  # type: ignore[arg-type]
        logits=None if laws.logits is None else laws.steps(laws.logits),  # type: ignore[arg-type]
    )


def _prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[Prompt]:
    """Each row's prompt without its padding."""
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    source = input_ids if embeds is None else embeds
    if mask is not None:
        if not bool(mask[:, -1].all()):
            raise Refused(
                "attention_mask ends in 0: pad on the left (tokenizer.padding_side = 'left'), so prompts end the rows"
            )
        lines = [line[seen.bool()] for line, seen in zip(source, mask, strict=True)]
    else:
        lines = list(source)
    return [Prompt(ids=line) if embeds is None else Prompt(embeds=line) for line in lines]


def _chance(seed: int | Sequence[int] | None, batch: int) -> Chance:
    if seed is None:
        return StreamNoise(batch)
    if isinstance(seed, int):
        return PositionNoise([(seed, i) for i in range(batch)])
    if len(seed) != batch:
        raise Refused(f"seed has {len(seed)} entries, the batch has {batch} rows")
    return PositionNoise([(s, 0) for s in seed])


def _drafter(draft: str | Drafter | None) -> Drafter:
    if draft is None:
        return Plain()
    if isinstance(draft, str):
        return registry.load("drafters", draft)
    if isinstance(draft, Drafter):
        return draft
    raise Refused(f"draft={type(draft).__name__}: give a drafter, its name, or None for plain decoding")


def _check_vocabulary(drafter: Drafter, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if drafter.tokenizer is None:
        return
    if tokenizer is None:
        raise Refused(
            f"{_name(drafter)} has a tokenizer of its own: give accelerate() the model's, so they can be compared"
        )
    if drafter.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise Refused(
            f"the tokenizer of {_name(drafter)} ({len(drafter.tokenizer)} entries) differs from the model's "
            f"({len(tokenizer)}): use a drafter made for this model"
        )


def _check_arguments(kwargs: Mapping[str, Any]) -> None:
    for name, remedy in {
        "assistant_model": "no drafter takes a draft model yet; choose one of `truedraft methods`",
        "past_key_values": "truedraft keeps a cache of its own; give the whole prompt",
        "custom_generate": "truedraft is the decode loop",
        "position_ids": "positions follow from the attention mask",
        "synced_gpus": "one process decodes one batch",
    }.items():
        if kwargs.get(name):
            raise Refused(f"{name} is not supported: {remedy}")


def _notes(rows: Sequence[Row], laws: Laws, stops: Stops) -> list[str]:
    strangers = laws.strangers + stops.strangers
    if len(rows) == 1 or not (laws.in_step or stops.in_step):
        return []
    cause = f"{', '.join(strangers)} may look across rows" if strangers else "there is no end-of-text token"
    return [f"rows advanced together, because {cause}"]


def _name(part: object) -> str:
    module = type(part).__module__.rpartition(".")[2]
    return "plain" if isinstance(part, Plain) else module.replace("_", "-")
