"""The arguments of `generate`: parsed and checked before anything is computed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from truedraft.call.numbers import check_numbers, setting
from truedraft.card import shown
from truedraft.chance import Chance, PositionNoise, StreamNoise
from truedraft.errors import Note, Refused
from truedraft.stores.references import References, Text
from truedraft.targets._base import Target
from truedraft.targets.inputs import prompt_ids
from truedraft.tree import Prompt

Document = str | Sequence[int] | Tensor

# Arguments of generate that are not supported, each with its remedy.
ARGUMENTS = {
    "past_key_values": "truedraft keeps a cache of its own; give the whole prompt",
    "cache_params": "truedraft keeps a cache of its own; give the whole prompt",
    "custom_generate": "truedraft is the decode loop",
    "position_ids": "positions follow from the attention mask",
    "synced_gpus": "one process decodes one batch",
}
# Settings that the engine does not support: the neutral value, and the reason.
SETTINGS = {
    "num_beams": (1, "beam search is not supported; num_beams=1 searches greedily"),
    "num_beam_groups": (1, "group beam search is not supported"),
    "penalty_alpha": (None, "contrastive search is not supported"),
    "dola_layers": (None, "DoLa decoding is not supported"),
    "constraints": (None, "constrained beam search is not supported"),
    "force_words_ids": (None, "constrained beam search is not supported"),
    "output_attentions": (False, "attention weights of single tokens do not exist in a pass over a tree"),
    "output_hidden_states": (False, "hidden states are not collected"),
    "token_healing": (False, "token healing is not supported"),
    "assistant_early_exit": (None, "early-exit drafting has no drafter here"),
    "use_cache": (True, "truedraft needs the KV cache; give use_cache=True, the result is the same"),
    "cache_implementation": ("dynamic", "truedraft keeps a cache of its own; drop it"),
    "cache_config": (None, "truedraft keeps a cache of its own; drop it"),
    "compile_config": (None, "truedraft has compiled passes of its own; drop it"),
    "prefill_chunk_size": (None, "prompts are read in one piece"),
}
EARLY = ("num_beams", "token_healing")  # those on which `generate` acts before it calls a decode loop
MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION}


def check_arguments(target: Target, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises Refused for an argument of `generate` that is not supported, or a prompt that the model cannot read."""
    _check_neutral({**kwargs, **{name: setting(name, kwargs, target.model) for name in EARLY}})
    for name, remedy in ARGUMENTS.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise Refused(f"{name} is not supported: {remedy}")
    check_numbers(kwargs, target.model)
    _check_mode(target.model, kwargs)
    target.check_inputs(inputs, kwargs)


def _check_mode(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
    """Raises Refused where a model that writes more than text (Janus, those that speak) is to write something else; its
    own `generate` takes every mode but "text" for that, None too."""
    mode, own = (
        kwargs.get("generation_mode", "text"),
        getattr(type(model), "generate", None) != GenerationMixin.generate,
    )
    if mode != "text" and (own or mode is not None):
        raise Refused(
            f"generation_mode={shown(mode)}: truedraft decodes text, and lacks the heads and the guided passes that "
            "other outputs need; leave it out, or call the model's own generate"
        )


def check_settings(config: GenerationConfig) -> None:
    """Raises Refused for a setting that the engine cannot honour exactly."""
    _check_neutral(vars(config))
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise Refused(f"{mode.value.replace('_', ' ')} is not supported: drop the settings that ask for it")


def note_beams(model: PreTrainedModel) -> None:
    """Warns with a Note where a model's generation config searches with beams, as many translation models do."""
    beams = getattr(getattr(model, "generation_config", None), "num_beams", None) or 1
    if beams != 1:
        text = (
            f"its generation config has num_beams={beams}, and beam search is not supported: "
            "model.generation_config.num_beams = 1 sets greedy search for good, num_beams=1 for a call"
        )
        warnings.warn(f"{type(model).__name__}: {text}", Note, stacklevel=3)


def _check_neutral(values: Mapping[str, Any]) -> None:
    for name, (neutral, why) in SETTINGS.items():
        value = values.get(name)
        if value is not None and value != neutral:
            raise Refused(f"{name}={value!r}: {why}")


def for_decode_loop(
    kwargs: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """The arguments of a call of `generate` whose decode loop is truedraft's: with a cache, which some models are
    configured without, unless the caller declines it; and with stop strings as a criterion.

    Raises:
        Refused: there are stop strings and no tokenizer.
    """
    config = kwargs.get("generation_config")
    default = model.generation_config.use_cache
    if kwargs.get("use_cache") is None and getattr(config, "use_cache", None) in (None, default):
        kwargs = {**kwargs, "use_cache": True}
    return with_stop_strings(kwargs, model, tokenizer)


def with_stop_strings(
    kwargs: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """The arguments with stop strings as a criterion: `generate` passes no tokenizer on to a decode loop.

    Raises:
        Refused: there is no tokenizer, or no token of it completes a string.
    """
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None) or tokenizer
    strings = setting("stop_strings", kwargs, model)
    if strings is None:
        return kwargs
    if tokenizer is None:
        raise Refused(f"stop_strings={strings!r} need a tokenizer: give one to accelerate() or to generate()")
    listed = [strings] if isinstance(strings, str) else strings
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(s, str) and s for s in listed):
        raise Refused(f"stop_strings={strings!r}: give a text, or a list of texts, none of them empty")
    try:
        criteria = [*(kwargs.get("stopping_criteria") or []), _criterion(tokenizer, len(tokenizer), tuple(listed))]
    except ValueError as error:
        raise Refused(f"stop_strings={strings!r}: {error}") from error
    return {**kwargs, "stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


@lru_cache(maxsize=8)
def _criterion(tokenizer: PreTrainedTokenizerBase, size: int, strings: tuple[str, ...]) -> StopStringCriteria:
    """The criterion of stop strings, which keeps no state between calls; it reads the whole vocabulary, which takes
    seconds where that is large."""
    return StopStringCriteria(tokenizer, [*strings])


@dataclass(frozen=True)
class Assistant:
    """`assistant_model` of a call, and its tokenizer, if that is given."""

    model: Any
    tokenizer: PreTrainedTokenizerBase | None


def assistant_of(kwargs: dict[str, Any]) -> Assistant | None:
    """The draft model that a call names, removed from its arguments.

    Raises:
        Refused: a tokenizer of it that is none, or without a model.
    """
    model, tokenizer = kwargs.pop("assistant_model", None), kwargs.pop("assistant_tokenizer", None)
    if tokenizer is not None and (model is None or not isinstance(tokenizer, PreTrainedTokenizerBase)):
        raise Refused(
            f"assistant_tokenizer={shown(tokenizer)}: give the tokenizer of an assistant_model, with that model"
        )
    return None if model is None else Assistant(model, tokenizer)


def sources_of(inputs: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """(batch, length) token ids of the sources of a call, with padding; None where they are not token ids."""
    ids = prompt_ids(inputs, kwargs)
    return ids if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() else None


def check_lengths(target: Target, longest: int, steps: int) -> None:
    """Raises Refused where a prompt does not fit the model's context, or the output its learned positions."""
    context, hard = target.context, target.hard_limit
    if context is not None and longest > context:
        raise Refused(f"the prompt has {longest} tokens, the model's context has {context}: shorten the prompt")
    if hard is not None and longest + steps - 1 > hard:  # the last token is never read
        raise Refused(
            f"{longest} prompt tokens and {steps} new ones exceed the model's {hard} learned positions: "
            f"set max_new_tokens to at most {hard - longest + 1}"
        )


def chance_of(seed: int | Sequence[int] | None, batch: int) -> Chance:
    """The source of the noise of sampling: torch's stream, or a function of (seed, row, position).

    Raises:
        Refused: a seed is no integer from 0 to 2**64 - 1, or there is not one for each row.
    """
    if seed is None:
        return StreamNoise(batch)
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if len(seed) != batch:
            raise Refused(f"seed has {len(seed)} entries, the batch has {batch} rows")
        return PositionNoise([(_seed(s), 0) for s in seed])
    return PositionNoise([(_seed(seed), i) for i in range(batch)])


def noise_of(seed: int, sequence: int) -> Chance:
    """The noise of one row of `chance_of(seed, batch)`.

    Raises:
        Refused: the seed is no integer from 0 to 2**64 - 1, or the row is no integer from 0 on.
    """
    if isinstance(sequence, bool) or not isinstance(sequence, Integral) or sequence < 0:
        raise Refused(f"sequence={sequence!r}: give an integer of 0 or more")
    return PositionNoise([(_seed(seed), int(sequence))])


def _seed(value: Any) -> int:
    if not isinstance(value, Integral) or not 0 <= int(value) < 2**64:
        raise Refused(f"seed={value!r}: give an integer from 0 to 2**64 - 1, or a list with one for each row")
    return int(value)


def namespaces_of(given: Any, batch: int) -> list[str]:
    """Each row's namespace.

    Raises:
        Refused: neither a string nor one string for each row.
    """
    if isinstance(given, str):
        return [given] * batch
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        raise Refused(f"namespace={given!r}: give a text, or a list with one for each row")
    if len(given) != batch:
        raise Refused(f"namespace has {len(given)} entries, the batch has {batch} rows")
    return list(given)


def references_of(
    references: Any, batch: int, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int
) -> list[References | tuple[()]]:
    """Each row's documents; text is tokenized as it is read.

    Raises:
        Refused: not documents, text without a tokenizer, ids outside the vocabulary, or not one list for each row.
    """
    if references is None:
        return [()] * batch
    if isinstance(references, str) or not isinstance(references, Sequence):
        raise Refused(f"references={type(references).__name__}: give a list of documents, each text or token ids")
    if not (references and all(_is_list_of_documents(r) for r in references)):
        shared = [_document(d, f"references[{i}]", tokenizer, vocabulary) for i, d in enumerate(references)]
        return [References(shared)] * batch
    if len(references) != batch:
        raise Refused(f"references has lists for {len(references)} rows, the batch has {batch}")
    return [
        References([_document(d, f"references[{b}][{i}]", tokenizer, vocabulary) for i, d in enumerate(row)])
        for b, row in enumerate(references)
    ]


def with_sources(prompts: Sequence[Prompt], given: Sequence[References | tuple[()]]) -> list[References | tuple[()]]:
    """Each row's documents, with its source, if it has one, as the first."""
    return [
        References([prompt.source, *(documents.documents if isinstance(documents, References) else ())])
        if prompt.source
        else documents
        for prompt, documents in zip(prompts, given, strict=True)
    ]


def _is_list_of_documents(value: Any) -> bool:
    return isinstance(value, list | tuple) and not any(isinstance(t, Integral) for t in value)


def _document(
    document: Any, where: str, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int
) -> Text | tuple[int, ...]:
    if isinstance(document, str):
        if tokenizer is None:
            raise Refused(f"{where} is text, and there is no tokenizer: give one to accelerate(), or token ids")
        return Text(document, tokenizer, vocabulary)
    ids = document.tolist() if isinstance(document, Tensor) else document
    if not isinstance(ids, list | tuple) or not all(isinstance(t, Integral) for t in ids):
        kind = type(document).__name__
        raise Refused(f"{where} is {kind}: a reference is text (str) or token ids (list of int, 1-D tensor)")
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise Refused(f"{where} has token ids outside the model's vocabulary of {vocabulary}")
    return tuple(int(t) for t in ids)
