"""Models made targets, and compared with their own forward before they are trusted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from truedraft.errors import Refused
from truedraft.runtime.lean import LeanPass
from truedraft.targets.decoder import DecoderTarget, check_hosted
from truedraft.targets.seq2seq import Seq2SeqTarget
from truedraft.targets.stock import StockPass
from truedraft.tree import DraftTree, Prompt


def hosted(model: Any, runtime: str = "auto", strict: bool = False) -> DecoderTarget:
    """A target that was compared with the model's own forward on this machine.

    Args:
        runtime: see DecoderTarget.
        strict: only with passes whose results do not depend on their width.

    Raises:
        Refused: the model cannot be hosted exactly, or not strictly.
    """
    check_hosted(model)
    kind = Seq2SeqTarget if model.config.is_encoder_decoder else DecoderTarget
    target = kind(model, runtime)
    try:
        check_exact(target)
    except Refused:
        if type(target.runner) is StockPass:
            raise
        why = f"the {target.runner.name} did not reproduce the model's forward"
        target = kind(model, "stock")
        target.why_stock = why
        check_exact(target)
    if strict and not isinstance(target.runner, LeanPass):
        why = target.why_stock or (
            "runtime='stock' was asked for" if runtime == "stock" else "this model is not on the CPU"
        )
        raise Refused(f"strict=True needs the compiled pass, whose results do not depend on its width, and {why}")
    return target


@torch.no_grad()
def check_exact(target: DecoderTarget) -> None:
    """Compare a tree pass with plain forwards of its paths, on this model and machine, before it is trusted.

    Sets `target.noise`, the largest difference met between the logits of both, and at least a rounding of the largest.

    Raises:
        Refused: the model's own arithmetic does not survive trees (a mask or position that it ignores).
    """
    model, vocabulary = target.model, target.vocabulary
    generator = torch.Generator().manual_seed(0)
    ids = [int(i) for i in torch.randint(1, vocabulary, (9,), generator=generator)]
    ids = [i - 1 if i == model.config.pad_token_id else i for i in ids]  # some count no positions for padding
    prompt, tree = ids[:4], DraftTree((ids[4], *ids[5:9]), (-1, 0, 0, 1, 2))
    befores = [prompt, []]
    target.reserve(2, 16)
    prompts = [target.prompt(torch.tensor([*before, ids[4]], device=target.device)) for before in befores]
    target.prefill(prompts)
    scores = target.score([tree, tree]).logits.float()
    target.cache = None
    target.noise = 0.0
    for row, before in enumerate(befores):
        for leaf in (3, 4):
            path = tree.path(leaf)
            plain = torch.tensor([before + [tree.tokens[i] for i in path]], device=target.device)
            expected = _plain(model, plain, prompts[row])[0, -len(path) :].float()
            spread = expected.std(-1).mean().clamp_min(1e-6)
            off = (scores[row, list(path)] - expected).abs().max()
            rounding = torch.finfo(target.dtype).eps * expected.abs().max()
            target.noise = max(target.noise, off.item(), rounding.item())
            error = (off / spread).item()
            tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.25
            if not error <= tolerance:
                raise Refused(
                    f"{type(model).__name__} cannot be hosted exactly: a tree pass differs from plain forwards by "
                    f"{error:.2g} standard deviations of the logits (allowed {tolerance}): it ignores mask or positions"
                )


def _plain(model: Any, ids: Tensor, prompt: Prompt) -> Tensor:
    """The model's own logits, behind the prompt's source if it has one."""
    if prompt.states is None:
        return model(ids, use_cache=False).logits
    states = BaseModelOutput(last_hidden_state=prompt.states[None])
    return model(encoder_outputs=states, decoder_input_ids=ids, use_cache=False).logits
