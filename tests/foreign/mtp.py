"""Layers for multi-token prediction stored inside a checkpoint: the naming of DeepSeek and GLM, and that of Qwen.

Depth k reads the norm of the embedding of token i + 1 + k beside the norm of the state of depth k - 1 (the target's
after its final norm at depth 0), projects both, runs a decoder block of the target's kind and a norm of its own; the
normed state feeds the target's head and the next depth. With one stored layer, which is used again and again, the pair
(own state, draft) follows as one more row. Hugging Face's order is followed: `transformers.modeling_layers.MtpModel`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, PreTrainedModel

from foreign import Foreign
from foreign.common import (
    Draws,
    H,
    V,
    Weights,
    along,
    checkpoint,
    embedding,
    features,
    head,
    opened,
    random_model,
    randomise,
    rms_norm,
    save,
    under,
)
from foreign.eagle1 import shifted

SHAPE: dict[str, Any] = dict(vocab_size=V, hidden_size=H, num_hidden_layers=3, num_attention_heads=4)
SHAPE |= dict(intermediate_size=40, moe_intermediate_size=24, num_experts_per_tok=2, max_position_embeddings=256)
SHAPE |= dict(num_key_value_heads=2, eos_token_id=None, bos_token_id=None, pad_token_id=None, rms_norm_eps=1e-4)
MOE = dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, num_mtp_layers=1)
KINDS: dict[str, dict[str, Any]] = {
    "glm4_moe": dict(head_dim=8, use_qk_norm=True) | MOE,
    "deepseek_v3": dict(num_key_value_heads=4, n_group=2, topk_group=1, kv_lora_rank=12, q_lora_rank=16, v_head_dim=8)
    | dict(qk_rope_head_dim=4, qk_nope_head_dim=6)
    | MOE,
    "qwen3_next": dict(head_dim=16, num_experts=4, shared_expert_intermediate_size=20, full_attention_interval=3)
    | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8),
}
# Names of a layer's parts, after its prefix; those of Qwen stand beside `layers.0.`
DEEPSEEK = dict(project="eh_proj", embedding="enorm", hidden="hnorm", final="shared_head.norm")
QWEN = dict(project="fc", embedding="pre_fc_norm_embedding", hidden="pre_fc_norm_hidden", final="norm")


def target_of(kind: str) -> Callable[..., PreTrainedModel]:
    """A target of three blocks of the model type `kind`."""

    def made(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        return random_model(CONFIG_MAPPING[kind](**SHAPE | KINDS[kind]), seed, dtype)

    return made


def _block(target: PreTrainedModel) -> nn.Module:
    """A decoder block of the target's class: full attention, experts as in its last block."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.first_k_dense_replace, config.layer_types = 1, 0, ["full_attention"]
    return type(target.get_decoder().layers[-1])(config, 0).to(target.dtype).eval()


def _parts(draws: Draws, target: PreTrainedModel, names: dict[str, str], depth: int) -> tuple[Weights, Weights]:
    """(projection and norms, block with its experts apart) of one depth."""
    own: Weights = {f"{names['project']}.weight": draws(f"{depth}.project", H, 2 * H)}
    own |= {f"{names[n]}.weight": draws.norm(f"{depth}.{n}", H) for n in ("embedding", "hidden", "final")}
    block = _block(target)
    randomise(block, draws.seed + 7 * depth + 1)
    weights: Weights = {}
    for name, tensor in block.state_dict().items():
        if name.endswith(".experts.gate_up_proj"):
            for at, fused in enumerate(tensor):
                apart = dict(zip(("gate", "up"), fused.chunk(2), strict=True))
                weights |= {name.replace("gate_up_proj", f"{at}.{n}_proj.weight"): t for n, t in apart.items()}
        elif name.endswith(".experts.down_proj"):
            weights |= {name.replace("down_proj", f"{at}.down_proj.weight"): t for at, t in enumerate(tensor)}
        else:
            bias = name.endswith("e_score_correction_bias")
            weights[name] = draws(f"{depth}.{name}", *tensor.shape) if bias else tensor
    return own, weights


def write_deepseek(folder: Path, target: PreTrainedModel, seed: int, *, layers: int = 1, copies: bool = True) -> Path:
    """The target's checkpoint with `layers` further ones. copies: of the target's embeddings and head in each."""
    n, weights = target.config.num_hidden_layers, {}
    for depth in range(layers):
        own, block = _parts(Draws(seed), target, DEEPSEEK, depth)
        own |= {"embed_tokens.weight": embedding(target), "shared_head.head.weight": head(target)} if copies else {}
        weights |= under(f"model.layers.{n + depth}.", own | block)
    return _within(folder, target, weights, dict(num_nextn_predict_layers=layers))


def write_qwen(folder: Path, target: PreTrainedModel, seed: int) -> Path:
    own, block = _parts(Draws(seed), target, QWEN, 0)
    return _within(folder, target, under("mtp.", own | under("layers.0.", block)), {})


def _within(folder: Path, target: PreTrainedModel, weights: Weights, settings: dict[str, Any]) -> Path:
    config, own = checkpoint(folder, target)
    return save(folder, config | settings, own | weights, "model.safetensors")


def _loaded(target: PreTrainedModel, weights: Weights) -> nn.Module:
    """The block with the stored `weights`, its experts joined."""
    block, whole = _block(target), dict(weights)
    for name in [n for n in block.state_dict() if n.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        kinds = ("gate", "up") if "gate_up" in name else ("down",)
        stem, experts = name.rpartition(".")[0], range(block.state_dict()[name].shape[0])
        rows = [torch.cat([whole.pop(f"{stem}.{e}.{n}_proj.weight") for n in kinds]) for e in experts]
        whole[name] = torch.stack(rows)
    block.load_state_dict(whole)
    return block


@torch.no_grad()
def mtp_logits(
    folder: Path, target: PreTrainedModel, tokens: Sequence[int], drafted: Sequence[int], wrong: str = ""
) -> Tensor:
    """Of both namings."""
    _, stored = opened(folder, target.dtype)
    depths = _depths(stored, target.config.num_hidden_layers)
    blocks = [_loaded(target, weights) for _, weights in depths]

    def run(depth: int, states: Tensor, later: list[int]) -> Tensor:
        own, config = depths[depth][0], target.config
        shift = 1.0 if config.model_type == "qwen3_next" and wrong != "norms about zero taken as about one" else 0.0

        def norm(x: Tensor, name: str) -> Tensor:
            return rms_norm(x, own[name] + shift, config.rms_norm_eps)

        pair = [norm(embedding(target)[later], "embedding"), norm(states, "hidden")]
        x = F.linear(torch.cat(pair[::-1] if wrong == "feature first" else pair, dim=-1), own["project"])[None]
        positions = torch.arange(len(later))[None] + 1 + depth
        mask = torch.full((len(later), len(later)), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        turned = target.get_decoder().rotary_emb(x, positions)
        x = blocks[depth](x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        x = (x[0] if isinstance(x, tuple) else x)[0]
        finals.append(norm(x[-1], "final"))
        return x if wrong == "state carried before the norm" else norm(x, "final")

    finals: list[Tensor] = []
    layer = target.config.num_hidden_layers if wrong == "feature before the norm" else -1
    states, later = features(target, tokens, [layer]), shifted([*tokens, *drafted], wrong)
    if len(depths) == 1:

        def own(states: Tensor, later: list[int]) -> tuple[Tensor, Tensor]:
            last = run(0, states, later)[-1]
            return F.linear(finals[-1], head(target)), last

        return along(own, states, later)
    for depth in range(1 + len(drafted)):
        states = run(depth, states, later[depth:][: len(states)])
    return F.linear(torch.stack(finals), head(target))


def _depths(stored: Weights, blocks: int) -> list[tuple[Weights, Weights]]:
    """(projection and norms by role, the block's weights) of every stored depth."""
    found = []
    while any(name.startswith(f"model.layers.{blocks + len(found)}.") for name in stored):
        prefix = f"model.layers.{blocks + len(found)}."
        found.append((prefix, DEEPSEEK, {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}))
    if not found:
        own = {n.removeprefix("mtp."): t for n, t in stored.items() if n.startswith("mtp.")}
        found = [("mtp.", QWEN, own)]
    depths = []
    for _, names, own in found:
        parts = {role: own[f"{name}.weight"] for role, name in names.items()}
        rest = {n for n in own if not n.startswith(("embed_tokens.", "shared_head."))}
        rest -= {f"{name}.weight" for name in names.values()}
        depths.append((parts, {re.sub(r"^layers\.0\.", "", n): own[n] for n in rest}))
    return depths


WRONG = ("feature first", "tokens not shifted", "tokens shifted by two", "feature before the norm")
WRONG = (*WRONG, "state carried before the norm")
FORMATS = [
    Foreign(
        f"mtp-{name}",
        write_deepseek,
        mtp_logits,
        "recurrent",
        variants={"published": {}, "three layers": dict(layers=3), "no copies": dict(copies=False)},
        controls={wrong: {} for wrong in WRONG},
        target=target_of(kind),
    )
    for name, kind in {"deepseek": "deepseek_v3", "glm": "glm4_moe"}.items()
] + [
    Foreign(
        "mtp-qwen",
        write_qwen,
        mtp_logits,
        "recurrent",
        controls={wrong: {} for wrong in (*WRONG, "norms about zero taken as about one")},
        target=target_of("qwen3_next"),
    )
]
