"""What the families share: tiny targets, random weights by role, folders, the target's features, one plain layer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

V, H, HEADS, KV_HEADS, WIDTH, BLOCKS = 97, 32, 4, 2, 40, 8
Weights = dict[str, Tensor]
Norm = Callable[[Tensor, str], Tensor]


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A target of eight blocks with an untied head and random norm weights."""
    shape = dict(vocab_size=V, hidden_size=H, num_hidden_layers=BLOCKS, num_attention_heads=HEADS)
    shape |= dict(num_key_value_heads=KV_HEADS, intermediate_size=WIDTH, max_position_embeddings=256)
    shape |= dict(eos_token_id=None, tie_word_embeddings=False) | changes
    return random_model(CONFIG_MAPPING["llama"](**shape), seed, dtype)


def random_model(config: PretrainedConfig, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal model of a configuration, every parameter random by its name and the seed."""
    model = (
        AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        .eval()
        .to(dtype)
    )
    randomise(model, seed)
    return model


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Set every parameter by its name and the seed; norms about 1, matrices scaled by their input width."""
    draws = Draws(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            kind = draws.norm if "norm" in name and name.endswith("weight") else draws
            parameter.copy_(kind(name, *parameter.shape))


@dataclass(frozen=True)
class Draws:
    """Random tensors in float32, each given by the seed and its role alone: layouts that share roles share weights."""

    seed: int

    def __call__(self, role: str, *shape: int) -> Tensor:
        """Normal: matrices of scale 1/sqrt(input width), embeddings 1, vectors 0.3."""
        scale = 1.0 if "emb" in role else 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        return torch.randn(shape, generator=self._generator(role)) * scale

    def norm(self, role: str, width: int) -> Tensor:
        """Weights of a norm, uniform in 0.5 .. 1.5."""
        return torch.rand(width, generator=self._generator(role)) + 0.5

    def order(self, role: str, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator(role))

    def _generator(self, role: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {role}".encode()))


def attention_weights(
    draws: Draws, role: str, config: PretrainedConfig, inputs: int, bias: str = "", qk_norm: bool = False
) -> Weights:
    """`self_attn.*` of a layer whose attention reads `inputs` channels, `bias` on those of q, k, v, o that it names;
    roles begin with `role`."""
    size = config.head_dim
    wide, narrow = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes = {"q": (wide, inputs), "k": (narrow, inputs), "v": (narrow, inputs), "o": (config.hidden_size, wide)}
    found = {f"self_attn.{n}_proj.weight": draws(f"{role}{n}", *shape) for n, shape in shapes.items()}
    found |= {f"self_attn.{n}_proj.bias": draws(f"{role}{n}.bias", shapes[n][0]) for n in bias}
    if qk_norm:
        found |= {f"self_attn.{n}_norm.weight": draws.norm(f"{role}{n}_norm", size) for n in "qk"}
    return found


def mlp_weights(draws: Draws, role: str, config: PretrainedConfig) -> Weights:
    """`post_attention_layernorm` and `mlp.*` of a layer."""
    wide, narrow = config.intermediate_size, config.hidden_size
    return {
        "post_attention_layernorm.weight": draws.norm(f"{role}post", narrow),
        "mlp.gate_proj.weight": draws(f"{role}gate", wide, narrow),
        "mlp.up_proj.weight": draws(f"{role}up", wide, narrow),
        "mlp.down_proj.weight": draws(f"{role}down", narrow, wide),
    }


def under(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: tensor for name, tensor in weights.items()}


def draft_vocabulary(draws: Draws, count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(d2t offsets (count,) int64, t2d membership (vocabulary,) bool) of `count` random kept ids."""
    kept = draws.order("vocabulary", vocabulary)[:count].sort().values
    t2d = torch.zeros(vocabulary, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(count), t2d


def save(folder: Path, config: dict[str, Any], weights: Weights, file: str) -> Path:
    """Write config.json and the weights; a file that does not end in .safetensors is one of torch."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if file.endswith(".safetensors"):
        save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, folder / file)
    else:
        torch.save(weights, folder / file)
    return folder


def checkpoint(folder: Path, target: PreTrainedModel) -> tuple[dict[str, Any], Weights]:
    """Write the target's own checkpoint; (its config.json, its weights as stored)."""
    target.save_pretrained(folder)
    target.config.dtype = target.dtype  # saving leaves only its name there
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def opened(folder: Path, dtype: torch.dtype) -> tuple[dict[str, Any], Weights]:
    """(config.json, weights), floating-point weights as `dtype`."""
    (file,) = [f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin", ".pt")]
    raw = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    weights = {name: t.to(dtype) if t.is_floating_point() else t for name, t in raw.items()}
    return json.loads((folder / "config.json").read_text()), weights


@torch.no_grad()
def features(target: PreTrainedModel, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """(len(tokens) - 1, len(layers) * H): of all tokens but the last (pending) one, by one plain forward.

    Layer k is the residual stream after k blocks; the number of blocks is the last one's raw output, read by a hook,
    and -1 is that after the final norm (the last of transformers' hidden states).
    """
    blocks, raw = target.get_decoder().layers, []
    hook = blocks[-1].register_forward_hook(
        lambda _, __, out: raw.append(out[0] if isinstance(out, tuple) else out)  # type: ignore[func-returns-value]
    )
    states = target(torch.tensor([list(tokens[:-1])]), output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    assert len(states) == len(blocks) + 1
    return torch.cat([raw[0][0] if layer == len(blocks) else states[layer][0] for layer in layers], dim=-1)


def embedding(target: PreTrainedModel) -> Tensor:
    return target.get_input_embeddings().weight.detach()


def head(target: PreTrainedModel) -> Tensor:
    return target.get_output_embeddings().weight.detach()


def rms_norm(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, config: PretrainedConfig) -> Tensor:
    """x (heads, rows, size) turned by the angles of `config`; halves of the channels are the pairs."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(config)  # for rescaled frequencies; the angles are taken in the type of x
    angles = positions.to(x.dtype)[:, None] * rope.inv_freq.to(x.dtype)[None]
    cos, sin = (f(angles) * rope.attention_scaling for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(
    queries: Tensor, keys: Tensor, weights: Weights, prefix: str, config: PretrainedConfig, start: int, seen: Tensor
) -> Tensor:
    """Attention of the rows `queries` (m, C), of positions start, start + 1, .., over the rows `keys` (n, C), of
    positions 0 .. n - 1; `seen` (m, n) bool. Biases and norms of queries and keys apply where `weights` has them."""

    def projected(name: str, x: Tensor) -> Tensor:
        found = F.linear(x, weights[f"{prefix}{name}_proj.weight"], weights.get(f"{prefix}{name}_proj.bias"))
        found = found.view(len(x), -1, config.head_dim)
        if f"{prefix}{name}_norm.weight" in weights:
            found = rms_norm(found, weights[f"{prefix}{name}_norm.weight"], config.rms_norm_eps)
        return found.transpose(0, 1)

    q = rotated(projected("q", queries), torch.arange(start, start + len(queries)), config)
    k, v = rotated(projected("k", keys), torch.arange(len(keys)), config), projected("v", keys)
    groups = len(q) // len(k)
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q @ k.transpose(1, 2) / config.head_dim**0.5).masked_fill(~seen, float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return F.linear(mixed, weights[f"{prefix}o_proj.weight"], weights.get(f"{prefix}o_proj.bias"))


def causal(x: Tensor, weights: Weights, prefix: str, config: PretrainedConfig) -> Tensor:
    """Causal attention of the rows x (n, C) among themselves, of positions 0 .. n - 1."""
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return attention(x, x, weights, f"{prefix}self_attn.", config, 0, seen)


def mlp(x: Tensor, weights: Weights, prefix: str, config: PretrainedConfig) -> Tensor:
    """x plus the gated MLP of its norm."""
    y = rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up, down = (weights[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def layer(x: Tensor, weights: Weights, prefix: str, config: PretrainedConfig) -> Tensor:
    """An ordinary causal decoder layer."""
    y = rms_norm(x, weights[f"{prefix}input_layernorm.weight"], config.rms_norm_eps)
    return mlp(x + causal(y, weights, prefix, config), weights, prefix, config)


def scattered(logits: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """logits (rows, Vd) of the target's `ids` (Vd,) as (rows, vocabulary), -inf elsewhere."""
    found = torch.full((len(logits), vocabulary), float("-inf"), dtype=logits.dtype)
    found[:, ids] = logits
    return found


def along(own: Callable[[Tensor, list[int]], tuple[Tensor, Tensor]], true: Tensor, later: list[int]) -> Tensor:
    """Draft logits (1 + drafted, V) of a head that reads pairs (state, token after it) and feeds its own states back.

    `own(states (m, C), tokens (m))` recomputes the whole sequence and returns (logits (V,), state) of its last row;
    `true` (m, C) are the target's states, `later` the m tokens after them and then the drafted ones.
    """
    states, rows = true, []
    for count in range(len(true), len(later) + 1):
        logits, last = own(states, later[:count])
        rows.append(logits)
        states = torch.cat([states, last[None]])
    return torch.stack(rows)
