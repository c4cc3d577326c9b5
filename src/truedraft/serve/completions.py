"""`/v1/completions`: prompts of text or token ids, one or many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from truedraft.serve.errors import ApiError
from truedraft.serve.formats import CompletionFormat, Echo, Format
from truedraft.serve.model import ServedModel
from truedraft.serve.protocol import CompletionBody
from truedraft.serve.settings import Plan, planned


def prepare(model: ServedModel, body: CompletionBody, namespace: str, id: str) -> tuple[Plan, Format]:
    """The rows of a request, and the format of its response.

    Raises:
        ApiError: a parameter cannot be honoured.
    """
    given = prompts_of(body)
    if len(given) > model.config.max_prompts:
        raise ApiError(400, f"prompt has {len(given)} entries, this server allows {model.config.max_prompts}", "prompt")
    special = body.add_special_tokens is not False
    prompts = [
        model.encoded(one, special) if isinstance(one, str) else checked_ids(model, one, "prompt") for one in given
    ]
    plan = planned(model, body, prompts, namespace, id)
    echoes = [echo_of(model, plan, one, ids) for one, ids in zip(given, prompts, strict=True)] if body.echo else ()
    return plan, CompletionFormat(id, int(time.time()), model.name, plan, bool(body.return_tokens), echoes=echoes)


def echo_of(model: ServedModel, plan: Plan, given: str | list[int], ids: Sequence[int]) -> Echo:
    """What precedes a completion: the prompt as it was given, and its tokens where log-probabilities are listed."""
    text = given if isinstance(given, str) else str(model.tokenizer.decode(given))
    return Echo(text, () if plan.logprobs is None else plan.listing.given(ids, text))


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a request; a list of integers is one prompt."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt is an empty list: give a text, token ids, or a list of these", "prompt")
    if isinstance(given[0], int):
        return [given]
    return list(cast(Sequence[str | list[int]], given))


def checked_ids(model: ServedModel, ids: Sequence[int], param: str) -> list[int]:
    """Token ids of a request.

    Raises:
        ApiError: one is outside of the vocabulary.
    """
    if ids and max(ids) >= (size := model.fast.target.vocabulary):
        raise ApiError(400, f"{param} has token id {max(ids)}, the model has {size} tokens", param)
    return list(ids)
