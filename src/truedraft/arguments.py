"""What callers bring to `generate`, read and checked before anything is computed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from truedraft.chance import Chance, PositionNoise, StreamNoise
from truedraft.errors import Refused
from truedraft.stores.references import References, Text
from truedraft.targets.decoder import BLANK, DecoderTarget
from truedraft.targets.seq2seq import states_of
from truedraft.tree import Prompt

Document = str | Sequence[int] | Tensor

# Arguments of generate that have no meaning here, each with its remedy.
ARGUMENTS = {
    "assistant_tokenizer": "draft models with another tokenizer are not supported yet; drop it if they share one",
    "past_key_values": "truedraft keeps a cache of its own; give the whole prompt",
    "custom_generate": "truedraft is the decode loop",
    "position_ids": "positions follow from the attention mask",
    "synced_gpus": "one process decodes one batch",
}
# Settings that change what is computed and that the engine does not do: the neutral value, and why not.
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
    "use_cache": (True, "truedraft needs the KV cache; drop it, the result is the same"),
    "cache_implementation": ("dynamic", "truedraft keeps a cache of its own; drop it"),
    "cache_config": (None, "truedraft keeps a cache of its own; drop it"),
    "compile_config": (None, "truedraft has compiled passes of its own; drop it"),
    "prefill_chunk_size": (None, "prompts are read in one piece"),
}
# What `generate` itself hands to a decode loop.
INPUTS = {
    "attention_mask",
    "decoder_attention_mask",
    "encoder_outputs",
    "inputs_embeds",
    "logits_to_keep",
    "next_sequence_length",
    "past_key_values",
    "position_ids",
    "use_cache",
}
OPTIONS = vars(GenerationConfig()).keys()
MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION}


def check_arguments(target: DecoderTarget, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises Refused for an argument of `generate` that is not supported, or a prompt that the model cannot read."""
    _check_neutral(kwargs)
    for name, remedy in ARGUMENTS.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise Refused(f"{name} is not supported: {remedy}")
    if target.model.config.is_encoder_decoder:
        _check_source(target, inputs, kwargs)
    else:
        _check_text(target, inputs, kwargs)


def _check_source(target: DecoderTarget, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises Refused unless an encoder-decoder is given sources and beginnings of a form that it reads as meant."""
    model, states, read = target.model, None, None
    if (encoded := kwargs.get("encoder_outputs")) is not None:
        states = read = states_of(encoded)
        if not isinstance(states, Tensor) or states.dim() != 3:
            raise Refused(f"encoder_outputs begins with {_form(states)}: give states of (rows, tokens, width)")
    ids = _prompt_ids(inputs, kwargs)
    if ids is not None and model.get_encoder().main_input_name == "input_ids":
        _check_ids("input_ids", ids, len(model.get_encoder().get_input_embeddings().weight))
        read = ids if states is None else states
    if (mask := kwargs.get("attention_mask")) is not None and read is not None:
        _check_mask("attention_mask", mask, read.shape[:2])
    if (begun := kwargs.get("decoder_input_ids")) is not None:
        _check_ids("decoder_input_ids", begun, len(model.get_decoder().get_input_embeddings().weight))
        if (mask := kwargs.get("decoder_attention_mask")) is not None:
            _check_mask("decoder_attention_mask", mask, begun.shape)


def _check_text(target: DecoderTarget, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises Refused unless a decoder is given a text alone, in a form that its own `generate` reads as meant."""
    known = inspect.signature(target.model.forward).parameters.keys()
    for name in sorted(kwargs.keys() & known - INPUTS - BLANK - OPTIONS - {"input_ids"}):
        if kwargs[name] is not None:
            raise Refused(f"{name}: only texts are drafted; leave it out, or call the model's own generate")
    ids, embeds, mask = _prompt_ids(inputs, kwargs), kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
    table: Any = target.model.get_input_embeddings().weight
    if ids is not None:
        _check_ids("input_ids", ids, len(table), embeds is None)
    if embeds is not None:
        _check_embeds(embeds, table.shape[1])
        if ids is not None and mask is None and ids.shape[1] not in (0, embeds.shape[1]):
            raise Refused(
                f"input_ids has {ids.shape[1]} tokens and inputs_embeds {embeds.shape[1]}: give one of them, or the "
                "attention_mask of the embeddings"
            )
    prompt = ids if embeds is None else embeds
    if mask is not None and prompt is None:
        raise Refused("attention_mask was given without a prompt: give the input_ids or inputs_embeds that it masks")
    if mask is not None and prompt is not None:
        _check_mask("attention_mask", mask, prompt.shape[:2])
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise Refused("attention_mask has numbers besides 0 and 1: give 1 for tokens and 0 for padding")


def _prompt_ids(inputs: Any, kwargs: Mapping[str, Any]) -> Any:
    return next((g for g in (inputs, kwargs.get("input_ids"), kwargs.get("inputs")) if g is not None), None)


def _check_ids(name: str, ids: Any, vocabulary: int, needed: bool = True) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not len(ids):
        raise Refused(f"{name} is {_form(ids)}: give token ids, a tensor of integers of (rows, tokens)")
    if needed and not ids.numel():
        raise Refused(f"{name} is empty: give each row at least one token")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise Refused(f"{name} has tokens outside the model's vocabulary of {vocabulary}")


def _check_embeds(embeds: Any, width: int) -> None:
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or not embeds.is_floating_point():
        raise Refused(f"inputs_embeds is {_form(embeds)}: give floats of (rows, tokens, {width})")
    if embeds.shape[2] != width:
        raise Refused(f"inputs_embeds is {embeds.shape[2]} wide, the embeddings of the model are {width}")


def _check_mask(name: str, mask: Any, form: Sequence[int]) -> None:
    if not isinstance(mask, Tensor) or mask.shape != form:
        raise Refused(f"{name} is {_form(mask)}: give one number for each token, {tuple(form)}")


def _form(value: Any) -> str:
    """What a value is, as users see it."""
    return f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_settings(config: GenerationConfig) -> None:
    """Raises Refused for a setting that the engine cannot honour exactly."""
    _check_neutral(vars(config))
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise Refused(f"{mode.value.replace('_', ' ')} is not supported: drop the settings that ask for it")


def _check_neutral(values: Mapping[str, Any]) -> None:
    for name, (neutral, why) in SETTINGS.items():
        value = values.get(name)
        if value is not None and value != neutral:
            raise Refused(f"{name}={value!r}: {why}")


def prompts_of(
    input_ids: Tensor, model_kwargs: Mapping[str, Any], window: int | None, sources: Tensor | None = None
) -> list[Prompt]:
    """Each row's prompt without its padding.

    window: of a model with sliding windows, which count masked positions too.
    sources: of an encoder-decoder, as `sources_of` finds them; one may stand for several rows in a row.

    Raises:
        Refused: a row is padded on the right, or empty; or the model was given an input that only it understands.
    """
    foreign = sorted(k for k, v in model_kwargs.items() if v is not None and v != {} and k not in INPUTS)
    if foreign:
        raise Refused(f"{', '.join(foreign)}: model inputs besides input_ids or inputs_embeds are not supported")
    if (encoded := model_kwargs.get("encoder_outputs")) is not None:
        return _behind_sources(input_ids, encoded, model_kwargs, sources)
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    source = input_ids if embeds is None else embeds
    if source.shape[1] == 0 or (mask is not None and not bool(mask.any(-1).all())):
        raise Refused("a prompt is empty (no token, or masked throughout): give each row at least one token")
    lines: list[Tensor] = list(source)
    if mask is not None:
        if not bool(mask[:, -1].all()):
            raise Refused("attention_mask ends in 0: pad on the left (tokenizer.padding_side = 'left')")
        if window is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
            raise Refused(
                "attention_mask has gaps, which this model's sliding windows count: mask only padding on the left"
            )
        lines = [line[seen.bool()] for line, seen in zip(source, mask, strict=True)]
    return [Prompt(ids=line) if embeds is None else Prompt(embeds=line) for line in lines]


def _behind_sources(
    input_ids: Tensor, encoded: Any, model_kwargs: Mapping[str, Any], sources: Tensor | None
) -> list[Prompt]:
    """Prompts of an encoder-decoder: what its decoder begins with, and what its encoder made of the source."""
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is not None and (mask.shape != input_ids.shape or not bool(mask.all())):
        raise Refused("decoder_attention_mask has gaps: give decoder_input_ids of one length, without padding")
    states = encoded.last_hidden_state
    heard = model_kwargs.get("attention_mask")
    if heard is None:
        heard = states.new_ones(states.shape[:2])
    if heard.shape != states.shape[:2]:
        raise Refused(f"attention_mask is for {heard.shape[1]} positions, the source has {states.shape[1]}")
    heard = (heard != 0).long()
    if not bool(heard.any(-1).all()):
        raise Refused("a source is empty (masked throughout): give each row at least one token")
    texts: list[tuple[int, ...]] = [()] * len(heard)
    if sources is not None and sources.shape[1] == heard.shape[1]:
        lines = sources.repeat_interleave(len(heard) // len(sources), 0)
        texts = [tuple(line[h.bool()].tolist()) for line, h in zip(lines, heard, strict=True)]
    given = zip(input_ids, states, heard, texts, strict=True)
    return [Prompt(ids=ids, states=s, heard=h, source=text) for ids, s, h, text in given]


def with_stop_strings(
    kwargs: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Stop strings as a ready criterion: `generate` forgets the tokenizer when a decode loop is given to it.

    Raises:
        Refused: there is no tokenizer.
    """
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None) or tokenizer
    config = kwargs.get("generation_config") or model.generation_config
    strings = kwargs.get("stop_strings") or config.stop_strings or model.generation_config.stop_strings
    if not strings:
        return kwargs
    if tokenizer is None:
        raise Refused(f"stop_strings={strings!r} need a tokenizer: give one to accelerate() or to generate()")
    criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
    return {**kwargs, "stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}


def sources_of(inputs: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """(batch, length) token ids of the sources that `generate` is given, with padding; None where they are no text."""
    ids = _prompt_ids(inputs, kwargs)
    return ids if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() else None


def check_lengths(target: DecoderTarget, longest: int, steps: int) -> None:
    """Raises Refused where a prompt does not fit the model's context, or the output its learned positions."""
    context, hard = target.context, target.hard_limit
    if context is not None and longest > context:
        raise Refused(f"the prompt has {longest} tokens, the model's context has {context}: shorten the prompt")
    if hard is not None and longest + steps - 1 > hard:  # the last token is not read any more
        raise Refused(
            f"{longest} prompt tokens and {steps} new ones exceed the model's {hard} learned positions: "
            f"set max_new_tokens to at most {hard - longest + 1}"
        )


def chance_of(seed: int | Sequence[int] | None, batch: int) -> Chance:
    """Where the noise of sampling comes from: torch's stream, or (seed, row, position)."""
    if seed is None:
        return StreamNoise(batch)
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if len(seed) != batch:
            raise Refused(f"seed has {len(seed)} entries, the batch has {batch} rows")
        return PositionNoise([(_seed(s), 0) for s in seed])
    return PositionNoise([(_seed(seed), i) for i in range(batch)])


def _seed(value: Any) -> int:
    if not isinstance(value, Integral) or not 0 <= int(value) < 2**64:
        raise Refused(f"seed={value!r}: give an integer from 0 to 2**64 - 1, or a list with one for each row")
    return int(value)


def namespaces_of(given: Any, batch: int) -> list[str]:
    """Each row's namespace.

    Raises:
        Refused: neither a text nor one text for each row.
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
        Refused: not documents, text without a tokenizer, ids outside the vocabulary, or lists for another batch.
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


def behind(prompts: Sequence[Prompt], given: Sequence[References | tuple[()]]) -> list[References | tuple[()]]:
    """The source of each row, if it has one, before the documents that it was given."""
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
