"""Gives a target passes with the bits of `model.generate`, where this model has them on this machine."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from truedraft.errors import NoRoom
from truedraft.runtime.generate_pass import GeneratePass
from truedraft.runtime.tokenwise import OtherBits, SingleTokens, TokenwisePass
from truedraft.runtime.weights import NotCompilable
from truedraft.targets._base import Target
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import DraftTree, Prompt

PROMPT, CHAIN, PATH = 4, 5, 3  # tokens of the text that is compared: its prompt, a chain after it, a path of a tree


def decide_as_generate(target: Target) -> str:
    """Let a target score drafts with the bits of `model.generate`; why it does not from now on, empty where it does.

    It does where it is a decoder in bf16 on the CPU, with full attention, whose weights are in panels, and where a
    short text, read as a chain and as a path of a tree, has the logits of the same text read token by token. Then the
    text is that of `model.generate`, with no bound on rounding errors: no token is chosen by other logits. Else nothing
    is changed. Compiled passes are tried first, then the model's own forward; it costs one or two dozen forwards.
    """
    if why := _unsupported(target):
        return why
    assert isinstance(target, DecoderTarget) and target._copied is not None
    before, single, reasons = (target.runner, target.long, target.noise), SingleTokens(), []
    ids = torch.randint(target.vocabulary, (PROMPT + CHAIN + PATH,), generator=torch.Generator().manual_seed(1))
    try:
        expected = _token_by_token(target, single, ids)
        for make in (GeneratePass, partial(TokenwisePass, single.heads)):
            try:
                target.runner = make(target.model, target.layer_types, target._copied)
                target.long, target.noise = None, 0.0
                if _same_bits(target, ids, expected):
                    return ""
                reasons.append(f"the {target.runner.name} has other bits")
            except (NotCompilable, OtherBits) as error:
                reasons.append(str(error))
    except (OtherBits, NoRoom, RuntimeError, TypeError, ValueError) as error:  # also of the model's own forward
        reasons.append(str(error))
    target.runner, target.long, target.noise = before
    return "; ".join(dict.fromkeys(reasons))


def _unsupported(target: Target) -> str:
    """Why a target cannot have passes with the bits of `model.generate`; empty where it may have."""
    if type(target) is not DecoderTarget:
        return "it is no plain decoder"
    if target.dtype != torch.bfloat16:
        return f"it is in {str(target.dtype).removeprefix('torch.')}, not in bfloat16"
    if target._copied is None:
        return "its weights are not in panels"
    if set(target.layer_types) != {"full_attention"}:
        return "some of its layers have no full attention"
    return "its rotary frequencies change with the length of a text" if target._switches else ""


@torch.no_grad()
def _same_bits(target: DecoderTarget, ids: Tensor, expected: Tensor) -> bool:
    """Whether passes have the logits of single tokens, and prompts those of `model.generate`."""
    a, b, c = ids[PROMPT + CHAIN :].tolist()
    tree = DraftTree((a, c, b, a, c), (-1, 0, 0, 2, 2))
    target.reserve(1, 2 * len(ids))
    try:
        read = target.prefill([Prompt(ids[:PROMPT])]).logits[0, -1:]
        target.commit([[0]])
        first, *rest = ids[PROMPT : PROMPT + CHAIN].tolist()
        chain = target.score([DraftTree.chain(first, rest)]).logits[0]
        target.commit([range(CHAIN)])
        path = target.score([tree]).logits[0, [0, 2, 4]].clone()
        target.commit([[0, 2]])
        last = target.score([DraftTree.chain(c)]).logits[0]
    finally:
        target.cache = None
    found = torch.cat([logits.float() for logits in (read, chain, path)])
    return torch.equal(found, expected) and torch.equal(last.float(), found[-1:])


@torch.no_grad()
def _token_by_token(target: DecoderTarget, single: SingleTokens, ids: Tensor) -> Tensor:
    """(tokens, V) logits of a text after its prompt and after each further token, as `model.generate` computes them.

    Raises:
        OtherBits: there is attention that torch does not compute, or computes with a mask.
    """
    cache = DynamicCache(config=target.config)
    logits = [target.model(input_ids=ids[None, :PROMPT], past_key_values=cache, use_cache=True).logits[0, -1:]]
    with single.noting():
        for token in ids[PROMPT:, None]:
            logits.append(target.model(input_ids=token[None], past_key_values=cache, use_cache=True).logits[0])
    if single.noted != (CHAIN + PATH) * len(target.layer_types):
        raise OtherBits("there is attention that torch does not compute")
    return torch.cat(logits).float()
