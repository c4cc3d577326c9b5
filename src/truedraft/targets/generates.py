"""Gives a target passes with the bits of `model.generate`, where this model has them on this machine."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from truedraft.runtime.tokenwise import TokenwisePass
from truedraft.targets._base import Target
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import DraftTree, Prompt

PROMPT, CHAIN, PATH = 4, 5, 3  # tokens of the text that is compared: its prompt, a chain after it, a path of a tree


def decide_as_generate(target: Target) -> bool:
    """Let a target score drafts with the bits of `model.generate`; whether it does from now on.

    It does where it is a decoder in bf16 on the CPU, with full attention, whose weights are in panels, and where a
    short text, read as a chain and as a path of a tree, has the logits of the same text read token by token. Then the
    text is that of `model.generate`, with no bound on rounding errors: no token is chosen by other logits. Else nothing
    is changed. It costs about a dozen forwards.
    """
    if type(target) is not DecoderTarget or target.dtype != torch.bfloat16:
        return False
    copied, full = target._copied, set(target.layer_types) == {"full_attention"}
    if copied is None or not full:
        return False
    before = target.runner, target.long, target.noise
    try:
        target.runner = runner = TokenwisePass(target.model, target.layer_types, copied)
        target.long, target.noise = None, 0.0
        if not target._switches and _same_bits(target, runner):
            return True
    except Exception:  # not compilable, attention in another form, inputs that only `generate` passes
        pass
    target.runner, target.long, target.noise = before
    return False


@torch.no_grad()
def _same_bits(target: DecoderTarget, runner: TokenwisePass) -> bool:
    """Whether passes have the logits of single tokens, and prompts those of `model.generate`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(target.vocabulary, (PROMPT + CHAIN + PATH,), generator=generator)
    expected = _token_by_token(target, runner, ids)
    if runner.noted != (CHAIN + PATH) * len(target.layer_types):
        return False  # there is attention that torch does not compute
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
        single = target.score([DraftTree.chain(c)]).logits[0]
    finally:
        target.cache = None
    return torch.equal(torch.cat([read, chain, path]), expected) and torch.equal(single, path[2:])


def _token_by_token(target: DecoderTarget, runner: TokenwisePass, ids: Tensor) -> Tensor:
    """(tokens, V) logits of a text after its prompt and after each further token, as `model.generate` computes them."""
    cache = DynamicCache(config=target.config)
    logits = [target.model(input_ids=ids[None, :PROMPT], past_key_values=cache, use_cache=True).logits[0, -1:]]
    with runner.single():
        for token in ids[PROMPT:, None]:
            logits.append(target.model(input_ids=token[None], past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(logits)
