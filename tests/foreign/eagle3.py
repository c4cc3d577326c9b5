"""EAGLE-3 and 3.1 in the layouts of SafeAILab, SpecForge and SGLang (`midlayer.*`) and of speculators (`layers.0.*`).

Features of several blocks of the target pass through `fc`; the first layer's attention reads the norm of the token's
embedding beside that of the state; the head has its own output matrix, mostly over a part of the vocabulary;
arXiv 2503.01840, 2605.09992 (3.1: a norm of every feature, and the normed output fed back).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from foreign import Foreign
from foreign.common import (
    Draws,
    Weights,
    along,
    attention_weights,
    causal,
    draft_vocabulary,
    embedding,
    features,
    head,
    layer,
    mlp,
    mlp_weights,
    opened,
    rms_norm,
    save,
    scattered,
    under,
)
from foreign.eagle1 import PAIRS, shifted

LAYER = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=10, intermediate_size=56, rms_norm_eps=1e-3)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)


def write_midlayer(
    folder: Path,
    target: PreTrainedModel,
    seed: int,
    *,
    draft_vocab: int | None = 41,
    hidden: int | None = None,
    bias: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    ids: Sequence[int] | None = None,
    embedded: bool = False,
    lm_head: bool = True,
    scaled: bool = False,
    prefix: str = "",
    file: str = "model.safetensors",
) -> Path:
    """draft_vocab: None is the whole vocabulary, without d2t and t2d. hidden: of the head, if not the target's. ids:
    explicit layers as SGLang writes them. embedded: own embeddings. scaled: llama3 rope scaling. prefix: of names."""
    draws, width, vocabulary = Draws(seed), hidden or target.config.hidden_size, target.config.vocab_size
    settings: dict[str, Any] = dict(hidden_size=width, vocab_size=vocabulary, num_hidden_layers=1, rope_theta=500.0)
    settings |= LAYER | dict(max_position_embeddings=2048, tie_word_embeddings=False, hidden_act="silu")
    settings |= {"rope_scaling": LLAMA3} if scaled else {}
    config = CONFIG_MAPPING["llama"](**settings)
    settings |= dict(model_type="llama", architectures=["LlamaForCausalLMEagle3"])
    settings |= {"draft_vocab_size": draft_vocab or vocabulary}
    settings |= {"target_hidden_size": target.config.hidden_size} if hidden else {}
    settings |= {key: True for key, on in dict(bias=bias, fc_norm=fc_norm, norm_output=norm_output).items() if on}
    if ids is not None:
        settings["eagle_config"] = dict(eagle_aux_hidden_state_layer_ids=list(ids), use_aux_hidden_state=True)
    weights = _weights(draws, target, config, draft_vocab, len(ids or range(3)), "midlayer.", fc_norm=fc_norm)
    if bias:
        weights["fc.bias"] = draws("fc.bias", width)
    if embedded or hidden:
        weights["embed_tokens.weight"] = draws("embed", vocabulary, width)
    if not lm_head:
        del weights["lm_head.weight"]
    return save(folder, settings, under(prefix, weights), file)


def write_speculators(
    folder: Path,
    target: PreTrainedModel,
    seed: int,
    *,
    draft_vocab: int | None = 41,
    norm_before_residual: bool = True,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    kind: str = "llama",
    layers: int = 1,
    attention_bias: bool = False,
    ids: Sequence[int] | None = (2, 4, 5),
    inputs: int = 3,
    own_embeddings: bool = False,
    changes: dict[str, Any] | None = None,
) -> Path:
    """kind: model type of the layers. layers: how many; those after the first are ordinary ones. ids: of the features
    (None: no key), of which `inputs` feed `fc`. changes: of the layers' configuration."""
    draws, width, vocabulary = Draws(seed), target.config.hidden_size, target.config.vocab_size
    shape: dict[str, Any] = dict(hidden_size=width, vocab_size=vocabulary, num_hidden_layers=layers, rope_theta=500.0)
    shape |= LAYER | dict(attention_bias=attention_bias) | (changes or {})
    config = CONFIG_MAPPING[kind](**shape)
    settings: dict[str, Any] = dict(
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        speculators_version="0.3.0",
        draft_vocab_size=draft_vocab or vocabulary,
        target_hidden_size=None,
        norm_before_residual=norm_before_residual,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
        embed_requires_grad=own_embeddings,
        tie_word_embeddings=False,
        transformer_layer_config=config.to_diff_dict(),  # keys of transformers' defaults are left out
        speculators_config=speculators_config("eagle3", 3),
    )
    settings |= {} if ids is None else {"eagle_aux_hidden_state_layer_ids": list(ids)}
    bias, qk_norm = "qkvo" if attention_bias else "", kind == "qwen3"
    weights = _weights(draws, target, config, draft_vocab, inputs, "layers.0.", bias, qk_norm, fc_norm)
    for at in range(1, layers):
        own = {"input_layernorm.weight": draws.norm(f"{at}.input", width)} | mlp_weights(draws, f"{at}.", config)
        own |= attention_weights(draws, f"{at}.", config, width, bias, qk_norm)
        weights |= under(f"layers.{at}.", own)
    if norm_before_fc:
        weights["input_norm.weight"] = draws.norm("input_norm", inputs * width)
    table = draws("embed", vocabulary, width) if own_embeddings else embedding(target).float()
    return save(folder, settings, weights | {"embed_tokens.weight": table}, "model.safetensors")


def speculators_config(algorithm: str, count: int) -> dict[str, Any]:
    """The nested record of the proposal and of the target."""
    proposal = dict(proposal_type="greedy", speculative_tokens=count, accept_tolerance=0.0, verifier_accept_k=1)
    verifier = dict(name_or_path="target", architectures=["LlamaForCausalLM"])
    found = dict(algorithm=algorithm, proposal_methods=[proposal], default_proposal_method="greedy")
    return found | dict(verifier=verifier)


def _weights(
    draws: Draws,
    target: PreTrainedModel,
    config: PretrainedConfig,
    draft_vocab: int | None,
    inputs: int,
    prefix: str,
    bias: str = "",
    qk_norm: bool = False,
    fc_norm: bool = False,
) -> Weights:
    """What both layouts store, the first layer under `prefix`."""
    width, vocabulary, source = config.hidden_size, config.vocab_size, target.config.hidden_size
    own = attention_weights(draws, "", config, 2 * width, bias, qk_norm) | mlp_weights(draws, "", config)
    own |= {f"{name}.weight": draws.norm(name, width) for name in ("input_layernorm", "hidden_norm")}
    found = {"fc.weight": draws("fc", width, inputs * source), "norm.weight": draws.norm("norm", width)}
    found["lm_head.weight"] = draws("lm_head", draft_vocab or vocabulary, width)
    if fc_norm:
        found |= {f"fc_norm.{i}.weight": draws.norm(f"fc_norm{i}", source) for i in range(inputs)}
    if draft_vocab:
        found["d2t"], found["t2d"] = draft_vocabulary(draws, draft_vocab, vocabulary)
    return found | under(prefix, own)


def eagle3_logits(
    folder: Path, target: PreTrainedModel, tokens: Sequence[int], drafted: Sequence[int], wrong: str = ""
) -> Tensor:
    """Of both layouts."""
    settings, weights = opened(folder, target.dtype)
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    nested = settings.get("transformer_layer_config", settings)
    config = CONFIG_MAPPING[nested["model_type"]](**{k: v for k, v in nested.items() if k != "architectures"})
    table = embedding(target) if wrong == "embeddings of the target" else weights.get("embed_tokens.weight")
    table = embedding(target) if table is None else table
    output = head(target) if wrong == "head of the target" else weights.get("lm_head.weight", head(target))
    normed = settings.get("norm_before_residual", False) ^ (wrong == "residual at the other side of the norm")
    fed_normed = settings.get("norm_output", False) ^ (wrong == "other side of the norm fed back")

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, weights[f"{name}.weight"], config.rms_norm_eps)

    def own(states: Tensor, later: list[int]) -> tuple[Tensor, Tensor]:
        state = norm(states, "layers.0.hidden_norm")
        pair = [norm(table[later], "layers.0.input_layernorm"), state]
        x = torch.cat(pair[::-1] if wrong == "feature first" else pair, dim=-1)
        x = (state if normed else states) + causal(x, weights, "layers.0.", config)
        x = mlp(x, weights, "layers.0.", config)
        for at in range(1, config.num_hidden_layers):
            x = layer(x, weights, f"layers.{at}.", config)
        last = norm(x[-1], "norm")
        logits = scattered(F.linear(last, output)[None], _kept(weights, len(output), wrong), target.config.vocab_size)
        return logits[0], last if fed_normed else x[-1]

    true = _fused(target, tokens, settings, weights, config.rms_norm_eps, wrong)
    return along(own, true, shifted([*tokens, *drafted], wrong))


def _kept(weights: Weights, count: int, wrong: str) -> Tensor:
    """The target's id of every draft id: stored as an offset."""
    if "d2t" not in weights:
        return torch.arange(count)
    return weights["d2t"] if wrong == "d2t as absolute ids" else weights["d2t"] + torch.arange(count)


def _fused(
    target: PreTrainedModel,
    tokens: Sequence[int],
    settings: dict[str, Any],
    weights: Weights,
    eps: float,
    wrong: str,
) -> Tensor:
    """(m, H): the target's features, normed where the head has norms for them, through `fc`."""
    count = weights["fc.weight"].shape[1] // target.config.hidden_size
    layers = feature_layers(settings, len(target.get_decoder().layers))[:count]
    layers = [at + 1 for at in layers] if wrong == "layers one later" else layers
    layers = layers[::-1] if wrong == "layers from high to low" else layers
    layers = [-1 if at == 8 else at for at in layers] if wrong == "last block after the norm" else layers
    parts = features(target, tokens, layers)
    if "fc_norm.0.weight" in weights and wrong != "norms before fc left out":
        chunks = enumerate(parts.chunk(count, dim=-1))
        parts = torch.cat([rms_norm(part, weights[f"fc_norm.{i}.weight"], eps) for i, part in chunks], dim=-1)
    if "input_norm.weight" in weights and wrong != "norms before fc left out":
        parts = rms_norm(parts, weights["input_norm.weight"], eps)
    return F.linear(parts, weights["fc.weight"], None if wrong == "bias of fc left out" else weights.get("fc.bias"))


def feature_layers(settings: dict[str, Any], blocks: int) -> list[int]:
    """Layers as `features` counts them. Explicit ids of SGLang are those of blocks whose output is read if the first
    is 1, else layers; those of speculators are layers; without ids the second, the middle and the third from the end.
    """
    nested = settings.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if nested is not None:
        return [at + 1 for at in nested] if nested[0] == 1 else nested
    return settings.get("eagle_aux_hidden_state_layer_ids") or [2, blocks // 2, blocks - 3]


COMMON = (*PAIRS, "layers one later", "layers from high to low", "d2t as absolute ids")
COMMON = (*COMMON, "residual at the other side of the norm", "other side of the norm fed back")
FORMATS = [
    Foreign(
        "eagle3",
        write_midlayer,
        eagle3_logits,
        "recurrent",
        variants={
            "published": {},
            "torch file": dict(file="pytorch_model.bin"),
            "prefix": dict(prefix="model."),
            "whole vocabulary": dict(draft_vocab=None),
            "head of the target": dict(draft_vocab=None, lm_head=False),
            "3.1": dict(fc_norm=True, norm_output=True),
            "bias": dict(bias=True),
            "ids of outputs": dict(ids=(1, 3, 6)),
            "ids with the last block": dict(ids=(4, 6, 8)),
            "five layers": dict(ids=(1, 2, 3, 5, 7)),
            "narrower": dict(hidden=24),
            "own embeddings": dict(embedded=True),
            "scaled rope": dict(scaled=True),
        },
        controls={wrong: {} for wrong in COMMON}
        | {
            "bias of fc left out": dict(bias=True),
            "norms before fc left out": dict(fc_norm=True),
            "embeddings of the target": dict(embedded=True),
            "head of the target": dict(draft_vocab=None),
            "last block after the norm": dict(ids=(4, 6, 8)),
        },
    ),
    Foreign(
        "eagle3-speculators",
        write_speculators,
        eagle3_logits,
        "recurrent",
        variants={
            "published": {},
            "residual before the norm": dict(norm_before_residual=False),
            "norm before fc": dict(norm_before_fc=True),
            "3.1": dict(fc_norm=True, norm_output=True, norm_before_residual=False),
            "qwen3": dict(kind="qwen3"),
            "more layers": dict(layers=3),
            "more layers of qwen3": dict(layers=2, kind="qwen3", norm_output=True),
            "default layers": dict(ids=None),
            "ids with the last block": dict(ids=(1, 4, 8)),
            "id of the training target": dict(ids=(2, 4, 5, 8)),
            "five layers": dict(ids=(1, 2, 3, 5, 7), inputs=5),
            "whole vocabulary": dict(draft_vocab=None),
            "own embeddings": dict(own_embeddings=True),
            "biases": dict(attention_bias=True),
            "biases of qwen3": dict(attention_bias=True, kind="qwen3"),
            "defaults": dict(changes=dict(rms_norm_eps=1e-6, rope_theta=10000.0)),
            "scaled rope": dict(changes=dict(rope_scaling=LLAMA3)),
        },
        controls={wrong: {} for wrong in COMMON}
        | {
            "norms before fc left out": dict(norm_before_fc=True),
            "embeddings of the target": dict(own_embeddings=True),
            "head of the target": dict(draft_vocab=None),
            "last block after the norm": dict(ids=(1, 4, 8)),
        },
    ),
]
