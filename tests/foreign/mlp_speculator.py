"""IBM's MLP speculator: a state moved by one token after the other, with weights of its own per step; arXiv 2404.19124.

state = GELU(ln_i(proj_i(state) + (w_e / w_s) emb_i(token))), logits = head_i(state); ln has no mean, but a shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from foreign import Foreign
from foreign.common import Draws, Weights, features, opened, rms_norm, save, under

STEPS, EPS = 3, 1e-6


def write_mlp_speculator(
    folder: Path,
    target: PreTrainedModel,
    seed: int,
    *,
    inner: int = 24,
    tied: bool = False,
    every_name: bool = True,
    scale_input: bool = False,
    prefix: str = "speculator.",
    file: str = "model.safetensors",
) -> Path:
    """inner: `inner_dim`, 0 for the target's width. tied: `tie_weights`; without `every_name` only the first name of
    a shared tensor is stored."""
    draws, width, vocabulary = Draws(seed), target.config.hidden_size, target.config.vocab_size
    settings = dict(architectures=["MLPSpeculatorPreTrainedModel"], model_type="mlp_speculator", emb_dim=width)
    settings |= dict(inner_dim=inner, n_predict=STEPS, vocab_size=vocabulary, n_candidates=5)
    settings |= dict(top_k_tokens_per_head=[5, 4, 3], tie_weights=tied, scale_input=scale_input)
    size, weights = inner or width, {}
    for i in range(STEPS):
        role = "0" if tied else str(i)
        if not tied or every_name or i == 0:
            weights[f"emb.{i}.weight"] = draws(f"emb{role}", vocabulary, size)
            weights[f"ln.{i}.weight"] = draws.norm(f"ln{role}", size)
            weights[f"ln.{i}.bias"] = draws(f"ln{role}.bias", size)
            weights[f"head.{i}.weight"] = draws(f"head{role}", vocabulary, size)
        if not tied or every_name or i < 2:
            weights[f"proj.{i}.weight"] = draws(f"proj{min(i, 1) if tied else i}", size, width if i == 0 else size)
    return save(folder, settings, under(prefix, weights), file)


def mlp_speculator_logits(
    folder: Path, target: PreTrainedModel, tokens: Sequence[int], drafted: Sequence[int], wrong: str = ""
) -> Tensor:
    settings, stored = opened(folder, target.dtype)
    weights: Weights = {name.removeprefix("speculator."): tensor for name, tensor in stored.items()}
    size, tied = settings["inner_dim"] or settings["emb_dim"], settings["tie_weights"]
    kept = 0.5 ** (0.5 / settings["n_predict"])
    mixed = ((1 - kept**2) * size / 2) ** 0.5 / kept
    layer = len(target.get_decoder().layers) if wrong == "feature before the norm" else -1
    state, rows = features(target, tokens, [layer])[-1], []
    if settings["scale_input"] and wrong != "input not scaled":
        state = rms_norm(state, 1.0, EPS) / 2**0.5
    for i, token in enumerate([tokens[-1], *drafted]):
        at = 0 if tied else i
        x = F.linear(state, weights[f"proj.{min(i, 1) if tied else i}.weight"])
        x = x + (1.0 if wrong == "embedding not scaled" else mixed) * weights[f"emb.{at}.weight"][token]
        x = x - x.mean() if wrong == "mean removed" else x
        x = rms_norm(x, weights[f"ln.{at}.weight"], EPS)
        state = F.gelu(x if wrong == "shift left out" else x + weights[f"ln.{at}.bias"])
        rows.append(F.linear(state, weights[f"head.{at}.weight"]))
    return torch.stack(rows)


WRONG = ("feature before the norm", "embedding not scaled", "mean removed", "shift left out")
FORMATS = [
    Foreign(
        "mlp-speculator",
        write_mlp_speculator,
        mlp_speculator_logits,
        "conditional",
        variants={
            "published": {},
            "tied": dict(tied=True, scale_input=True),
            "tied, first names": dict(tied=True, scale_input=True, every_name=False),
            "scaled": dict(scale_input=True),
            "width of the target": dict(inner=0),
            "torch file": dict(file="pytorch_model.bin"),
            "no prefix": dict(prefix=""),
        },
        controls={wrong: {} for wrong in WRONG} | {"input not scaled": dict(scale_input=True)},
        rows=STEPS,
    )
]
