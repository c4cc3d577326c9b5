"""The layers for multi-token prediction of a checkpoint, as a head: their modules and the layouts that they have."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.drafters.heads._checkpoint import loaded
from truedraft.drafters.heads._head import Head, begin_program, layer_program
from truedraft.drafters.heads._layers import Attend, HeadLayer, Rotary, layer_config, rotary_of
from truedraft.drafters.heads._published import KINDS, fields_of, text_config
from truedraft.drafters.heads._stored import stored
from truedraft.errors import Refused, why
from truedraft.runtime.program import Program
from truedraft.runtime.weights import NotCompilable

DEEPSEEK = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}
QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's; not read
MOST = 16  # of such layers in a checkpoint
Weights = dict[str, Tensor]


class MtpModule(nn.Module):
    """One depth: embedding and feature, each normalised, side by side through a linear layer and a decoder layer.

    Args:
        size: H. norm: a norm of the states' kind. block: the decoder layer.
    """

    def __init__(self, size: int, norm: nn.Module, block: nn.Module):
        super().__init__()
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False, dtype=next(norm.parameters()).dtype)
        self.block = block

    def forward(self, embeds: Tensor, features: Tensor, rotary: Rotary, attend: Any) -> Tensor:
        """The states before the final norm."""
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(features)], -1))
        if isinstance(self.block, HeadLayer):
            return self.block(x, rotary, attend)
        hidden = ~attend.nodes.mask
        mask = x.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(x.dtype).min)
        found = self.block(x, attention_mask=mask, position_embeddings=rotary, past_key_values=attend)
        return found[0] if isinstance(found, tuple) else found


class MtpHead(Head):
    """Layers for multi-token prediction, of the target's kind, with its embeddings and output head.

    Module k of several drafts the token k + 2 after the feature: it reads, of every token, the state of module k - 1
    at the token before it. A single module reads its own states in place of features, at any depth.

    Args:
        record: layers (that before or after the target's final norm), depths (number of modules), layer (fields of the
            configuration of plain layers, None for layers of the target's class), head_norms (of plain layers' queries
            and keys), raw_states (whether the next depth reads states before the module's final norm).
        blocks: the decoder layers; by default untrained.
    """

    def __init__(self, record: dict[str, Any], model: PreTrainedModel, blocks: Sequence[nn.Module] = ()):
        plain = record["layer"]
        super().__init__(model, layer_config(**plain) if plain else text_config(model))
        self._record, self.layers, self._raw = record, tuple(record["layers"]), record["raw_states"]
        if plain:
            norm: nn.Module = nn.RMSNorm(self.size, self.config.rms_norm_eps)
            blocks = blocks or [HeadLayer(self.config, norms=record["head_norms"]) for _ in range(record["depths"])]
            self.rotary = rotary_of(self.config)
        else:
            decoder: Any = model.get_decoder()
            norm = decoder.norm
            blocks = blocks or type(decoder)(_layers_config(model, record["depths"])).layers
            self.rotary = lambda like, positions: decoder.rotary_emb(like, positions)  # not a submodule
        self.depths = nn.ModuleList(MtpModule(self.size, norm, block) for block in blocks)

    def record(self) -> dict[str, Any]:
        return self._record

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [module.block for module in self.depths]  # type: ignore[misc]

    @property
    def cached_layers(self) -> int:
        """Keys and values of each module, and the states that the next one reads of the token before."""
        return 2 * len(self.depths) - 1

    def allocate(self, cache: RowCache) -> None:
        count = len(self.depths)
        like = self.depths[0].eh_proj.weight.new_zeros(1, 1, self.size)  # type: ignore[operator, union-attr]
        for layer in cache.layers[count:]:
            layer.lazy_initialization(like[None], like[None, ..., :0])
        position = torch.zeros(1, 1, dtype=torch.long, device=like.device)
        with torch.no_grad():
            for layer, block in zip(cache.layers, self.blocks, strict=False):
                if self._record["layer"]:
                    layer.allocate(self.config.num_key_value_heads, self.config.head_dim, like.dtype, like.device)
                else:  # their sizes depend on the class, so they are those that a token writes
                    rotary = self.rotary(like, position)
                    block(like, attention_mask=None, position_embeddings=rotary, past_key_values=_Sizes(layer))

    def placed(self, device: torch.device, dtype: torch.dtype) -> Self:
        if self._record["layer"]:
            return super().placed(device, dtype)
        return self.to(device).eval()  # as loaded: a few of its weights are fp32 beside a target of any type

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, embeds: Tensor, features: Tensor, rotary: Rotary, attends: Sequence[Attend]) -> Tensor:
        count, at = len(self.depths), cast(Any, attends)
        if count == 1:
            raw = self.depths[0](embeds, features, rotary, at[0])
            return raw if self._raw else self.depths[0].norm(raw)  # type: ignore[operator]
        depth, states = at[0].nodes.depth, torch.zeros_like(features)
        for k, module in enumerate(self.depths):
            if k:
                features = at[count + k - 1].shifted(features)
            raw = module(embeds, features, rotary, at[k].from_position(k))  # of the first k tokens it has no states
            normed = module.norm(raw)  # type: ignore[operator]
            states = torch.where((depth == k)[..., None], normed, states)
            features = raw if self._raw else normed
        return states

    def logits(self, states: Tensor) -> Tensor:
        if self._raw and len(self.depths) == 1:
            states = self.depths[0].norm(states)  # type: ignore[operator]
        return self.output_head(states)

    def compile(self, program: Program) -> None:
        if not self._record["layer"] or len(self.depths) > 1:
            raise NotCompilable("its layers are of the target's class, or it has several")
        p, module = program, self.depths[0]
        begin_program(p, self)
        p.buffer("pair", 2 * self.size)
        p.part("feature", "pair", self.size)
        p.buffer("logits", self.vocabulary)
        p.rms_norm("embeds", "pair", module.enorm)
        p.rms_norm("features", "feature", module.hnorm)
        p.linear("pair", "x", module.eh_proj)
        p.outputs.append(len(p.ops) - 1)
        layer_program(p, 0, module.block, self.config, "h")  # type: ignore[arg-type]
        p.end(self, lambda src, dst: p.rms_norm(src, dst, module.norm))
        p.fed_back = 1 if self._raw else -1


class _Sizes:
    """Stands for a cache of `transformers`; allocates a layer for what is written."""

    def __init__(self, layer: Any):
        self._layer = layer

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self._layer.lazy_initialization(key, value)
        return key, value


def read(source: str, model: PreTrainedModel, before_norm: bool, raw_states: bool) -> MtpHead:
    """The head in a checkpoint of a target.

    Args:
        source: a folder, or a name on the hub.
        before_norm: whether it reads the target's states before the final norm.
        raw_states: see `MtpHead`.

    Raises:
        Refused: there is none, or it is not for this target.
    """
    config: Any = text_config(model)
    first = config.num_hidden_layers
    layers = rf"(?:model\.)?(?:language_model\.)?layers\.(?:{'|'.join(map(str, range(first, first + MOST)))})\..+"
    layout, depths = _layouts(stored("mtp", source, re.compile(rf"{layers}|mtp\..+")), first)
    if not depths:
        raise Refused(
            f"mtp: {source!r} has no layers for multi-token prediction (no model.layers.{first}.eh_proj.weight, no "
            "mtp.fc.weight): choose another drafter, or give the folder of a checkpoint that has them, mtp:FOLDER"
        )
    own = {f"depths.{k}.{role}.weight": w for k, (found, _) in enumerate(depths) for role, w in found.items()}
    given = {f"layers.{k}.{name}": w for k, (_, block) in enumerate(depths) for name, w in block.items()}
    plain = config.model_type in KINDS
    record = dict(
        layers=(first if before_norm else -1,), depths=len(depths), raw_states=raw_states, source=layout,
        layer=_plain_fields(config, given) if plain else None, head_norms="layers.0.self_attn.q_norm.weight" in given,
        convention=f"{'before' if before_norm else 'after'} the final norm",
    )  # fmt: skip
    blocks = () if plain else _loaded_blocks(given, model, len(depths), source)
    weights = (
        given if plain else {f"layers.{k}.{n}": w for k, b in enumerate(blocks) for n, w in b.state_dict().items()}
    )
    inside = {re.sub(r"^layers\.(\d+)\.", r"depths.\1.block.", name): w for name, w in weights.items()}
    return loaded(MtpHead(record, model, blocks), own | inside, source)


def _layouts(weights: Weights, first: int) -> tuple[str, list[tuple[Weights, Weights]]]:
    """The name of the layout, and of each depth its projection and norms by role, and its decoder layer's weights."""
    by_depth: dict[int, Weights] = {}
    qwen: Weights = {}
    for name, w in weights.items():
        if name.startswith("mtp."):
            qwen[name.removeprefix("mtp.")] = w
        else:
            place, _, rest = name.partition("layers.")[2].partition(".")
            by_depth.setdefault(int(place) - first, {})[rest] = w
    if "fc.weight" in qwen:
        return "Qwen", [_parts(qwen, QWEN, "layers.0.")]
    depths = [by_depth[k] for k in sorted(by_depth)]
    return "DeepSeek", [_parts(found, DEEPSEEK, "") for found in depths if "eh_proj.weight" in found]


def _parts(weights: Weights, names: Mapping[str, str], prefix: str) -> tuple[Weights, Weights]:
    own = {role: weights[f"{n}.weight"] for role, n in names.items() if f"{n}.weight" in weights}
    rest = weights.keys() - {f"{n}.weight" for n in names.values()} - set(COPIES)
    return own, {name.removeprefix(prefix): weights[name] for name in rest}


def _plain_fields(config: Any, given: Mapping[str, Tensor]) -> dict[str, Any]:
    places = {"attention_bias": "self_attn.q_proj", "output_bias": "self_attn.o_proj", "mlp_bias": "mlp.gate_proj"}
    return fields_of(config) | {field: f"layers.0.{place}.bias" in given for field, place in places.items()}


def _layers_config(model: PreTrainedModel, count: int) -> Any:
    """The configuration of a decoder whose layers are those for multi-token prediction: full attention, and experts
    where the target has them. Its other parts are as small as can be."""
    config: Any = copy.deepcopy(text_config(model))
    config.num_hidden_layers, config.vocab_size = count, 1
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    config.quantization_config = None
    if getattr(config, "layer_types", None):
        config.layer_types = getattr(config, "mtp_layer_types", None) or ["full_attention"] * count
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = getattr(config, "mtp_mlp_layer_types", None) or config.mlp_layer_types[-1:] * count
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return config


def _loaded_blocks(given: Weights, model: PreTrainedModel, count: int, source: str) -> Sequence[nn.Module]:
    """Decoder layers of the target's class, loaded by `transformers`, which joins experts that are stored apart.

    Raises:
        Refused: weights are missing, foreign, or of another shape.
    """
    decoder: Any = model.get_decoder()
    config = _layers_config(model, count)
    rest = {"embed_tokens.weight": torch.zeros(1, config.hidden_size), "norm.weight": torch.ones(config.hidden_size)}
    try:
        built, info = type(decoder).from_pretrained(
            None, config=config, state_dict=given | rest, dtype=model.dtype, attn_implementation="sdpa",
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as e:  # of a class without such layers, or of weights that it cannot join: anything
        raise Refused(f"mtp: {source!r} has no layers of the target's kind: {' '.join(why(e).split())[:200]}") from e
    for fault, key in (
        ("lacks", "missing_keys"),
        ("has foreign", "unexpected_keys"),
        ("has others", "mismatched_keys"),
    ):
        if names := sorted(map(str, info[key])):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise Refused(f"mtp: {source!r} {fault} {', '.join(names[:3])}{more}: it does not fit this target")
    return list(built.layers)
