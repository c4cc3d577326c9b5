"""A larger model with the text of a small one: a drafter's real acceptance, beside passes that cost what real ones do.

Widths are padded with zeros, and blocks that add nothing lie between the original ones. With d the original width and
D the stretched one, the residual stream is the original's, on the same scale, in its first d components, and zero
behind them. An RMSNorm then divides by sqrt(d / D) times what it did, so that its weights are multiplied by sqrt(d / D)
and its epsilon by d / D; its output again is the original's, followed by zeros. `stretched_features` is this map of
features, `LayerMap` that of layers; a module that reads features of the original reads those of the stretched model
when its weights are padded by `padded_weight`, `padded_bias` and `padded_norm`, and its epsilon by `padded_epsilon`.
Norms over each head keep their width, but configurations have one epsilon for all norms: there `rescaled` multiplies
what they normalise, the weights of q_proj and k_proj, by sqrt(d / D) too, which their quotient cancels exactly.

All matrices are dense and of full size, and no inner projection has a part that is zero: the further heads and neurons
are copies of the original ones, and what they compute is multiplied by zeros of the output projections.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from truedraft.errors import Refused
from truedraft.views._base import Reduction
from truedraft.views._layers import listed, text_of

Module = TypeVar("Module", bound=nn.Module)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # model types whose blocks have the modules named below
INNER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # they read the residual stream, after a norm
OUTPUT = ("o_proj", "down_proj")  # they add to it
NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
OF_A_HEAD = ("q_norm", "k_norm")
TABLES = ("embed_tokens", "lm_head")
WIDTHS = ("hidden_size", "feature_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rank")
PROMPTS, LENGTH, TOKENS = 3, 8, 32  # of the check: rows of random tokens, their length, and greedy tokens behind each


@dataclass(frozen=True)
class LayerMap:
    """Which layer of a stretched model holds the features of each layer of the original.

    Layer k is the residual stream after k blocks: 0 is the embeddings, the number of blocks the last block's output
    before the final norm; -1 is that after the final norm. `layers[k]` is the stretched model's layer with the same
    features, padded; `layers[-1]` is -1, and the last layer is mapped to the last.
    """

    original: int  # blocks
    stretched: int  # blocks; at least as many

    def __getitem__(self, layer: int) -> int:
        """Raises Refused: the original has no such layer."""
        if not -1 <= layer <= self.original:
            raise Refused(f"layer {layer}: the original model has layers 0 to {self.original}, and -1 after its norm")
        return -1 if layer == -1 else layer * self.stretched // self.original

    def source(self, block: int) -> tuple[int, bool]:
        """The original block whose weights a stretched block has, and whether it adds what that block adds."""
        source = next(k for k in range(self.original) if self[k + 1] > block)
        return source, self[source + 1] == block + 1

    def spread(self, left_out: Reduction) -> Reduction:
        """What is left out of the original, left out of all blocks with the weights of the same blocks."""
        sources = [self.source(block)[0] for block in range(self.stretched)]
        attention, feed_forward = (
            frozenset(block for block, source in enumerate(sources) if source in half)
            for half in (left_out.attention, left_out.feed_forward)
        )
        return Reduction(attention, feed_forward)


@dataclass(frozen=True)
class Stretch:
    """How a model was stretched, and its measured equality with the original: attribute `stretch` of the model."""

    source: PreTrainedModel  # the original
    layers: LayerMap
    original: int  # width of the original's residual stream
    hidden: int  # width of the stretched model's
    difference: float  # largest absolute difference of logits in the check
    same_text: bool  # whether both chose the same greedy tokens; always so in fp32 and fp64

    def head(self, head: Module, rebuilt: Callable[[dict[str, Any]], Module]) -> Module:
        """A learned head of the original as one of the stretched model, with the same drafts at the cost of its size.

        Rows of matrices, and the columns behind each vector that they read, are padded with zeros.

        Args:
            head: with `record`, the configuration from which `rebuilt` makes an untrained head of the larger size.

        Raises:
            Refused: its width is not that of the original.
        """
        larger = rebuilt(self.enlarged(head.record()))  # type: ignore[operator]
        own, found = head.state_dict(), {}
        rescales = any(name.endswith("q_norm.weight") for name in own)
        for name, empty in larger.state_dict().items():
            module, weight = name.split(".")[-2:][0], own[name]
            parts = 1 if module in OUTPUT else max(weight.shape[-1] // self.original, 1)
            if weight.shape == empty.shape:
                found[name] = weight
            elif weight.ndim == 2:
                normed = rescales and module in ("q_proj", "k_proj")
                scaled = rescaled(weight, self.original, self.hidden) if normed else weight
                found[name] = padded_weight(scaled, len(empty), empty.shape[1], parts)
            elif "norm" in name:
                found[name] = padded_norm(weight, len(empty), parts)
            else:
                found[name] = padded_bias(weight, len(empty))
        larger.load_state_dict(found)
        return larger

    def enlarged(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The record of a head with the sizes of the stretched model."""
        found = dict(record)
        for name, value in record.items():
            if isinstance(value, Mapping):
                found[name] = self.enlarged(value)
            elif name == "layers":
                found[name] = tuple(self.layers[layer] for layer in value)
            elif name == "skip":
                found[name] = text_of(self.layers.spread(listed(value)))
            elif name == "rms_norm_eps":
                found[name] = padded_epsilon(value, self.original, self.hidden)
            elif name == "hidden_size" and value != self.original:
                raise Refused(f"a head of hidden size {value} cannot be stretched: the target's is {self.original}")
            elif name in WIDTHS:
                found[name] = -(-value * self.hidden // self.original)
        return found


def stretched(model: PreTrainedModel, *, layers: int, hidden: int, prompts: Tensor | None = None) -> PreTrainedModel:
    """A model of `layers` blocks and width `hidden` with the text of `model`, in its class, dtype and device.

    Heads, key-value heads and the feed-forward width grow by the ratio hidden / width (the last rounded up); the size
    of a head, the vocabulary and the groups of queries per key-value head stay. Both models' greedy tokens and logits
    are compared in the model's own dtype; the result has the figures as its attribute `stretch`, a `Stretch`.

    Norm weights (and, with norms over each head, the weights of queries and keys) are rounded once more, unless the
    ratio is a power of 4: then sqrt(d / D) is a power of two, and exact in bf16 as in any dtype. In bf16 and fp16 the
    text may differ where two tokens nearly tie, by other orders of summation and, at other ratios, by these rounded
    weights: `stretch.same_text` tells.

    Args:
        layers: decoder blocks, at least the model's own; those that are added add zero to the residual stream.
        hidden: width of the residual stream, at least the model's own and such that key-value heads come out whole.
        prompts: (rows, length) token ids whose greedy continuations are compared; by default random tokens.

    Raises:
        Refused: a model of another family, quantised or with further modules; `layers` or `hidden` as above; or, in
            fp32 and fp64, other greedy tokens.
    """
    _check_model(model)
    config = stretched_config(model.config, layers=layers, hidden=hidden)
    _check_prompts(prompts, config.vocab_size)
    mapped, width = LayerMap(model.config.num_hidden_layers, layers), model.config.hidden_size
    with no_init_weights():
        larger: Any = type(model)(config)
    larger.load_state_dict(_weights(model, larger, mapped, width, hidden), assign=True)
    larger.tie_weights()
    larger.model.rotary_emb = copy.deepcopy(model.get_decoder().rotary_emb)  # in the dtype that the model has it in
    larger.generation_config = copy.deepcopy(model.generation_config)
    larger = larger.to(model.device).train(model.training)
    difference, same_text = _compared(model, larger, prompts)
    if not same_text and model.dtype in (torch.float32, torch.float64):
        raise Refused(
            f"hidden={hidden}, layers={layers}: the stretched model chooses other tokens than the original (logits "
            f"differ by up to {difference:.2g}): choose a hidden of 4 or 16 times {width}, which rounds least"
        )
    larger.stretch = Stretch(model, mapped, width, hidden, difference, same_text)
    return larger


def stretched_config(config: Any, *, layers: int, hidden: int) -> Any:
    """The configuration of the stretched model.

    Raises:
        Refused: `layers` or `hidden` is not one that `stretched` accepts.
    """
    larger = copy.deepcopy(config)
    _check_layers(layers, config.num_hidden_layers)
    _check_hidden(hidden, config.hidden_size, config.num_key_value_heads)
    _enlarge(larger, LayerMap(config.num_hidden_layers, layers), hidden)
    return larger


def stretched_features(features: Tensor, hidden: int, parts: int = 1) -> Tensor:
    """The stretched model's features where these are the original's: the same numbers, with zeros behind.

    It holds for every layer, the residual stream after any number of blocks and that after the final norm alike, on
    the scale of the original; `LayerMap` says which layer of the stretched model has them.

    Args:
        features: (..., parts * d), the features of `parts` layers side by side.
        hidden: total width of the result, parts * D; each part is followed by its own D - d zeros.
    """
    separate = features.unflatten(-1, (parts, -1))
    return functional.pad(separate, (0, hidden // parts - separate.shape[-1])).flatten(-2)


def padded_weight(weight: Tensor, out: int, inner: int, parts: int = 1) -> Tensor:
    """The weight of a linear layer that reads padded features and writes padded features: zeros behind its own.

    Args:
        weight: (out features, in features); of an embedding or output head, its vocabulary is the first.
        out: features that the result writes.
        inner: features that the result reads, those of all parts.
        parts: vectors that the layer reads side by side, each padded alone; 2 for one over [embedding, feature].
    """
    return functional.pad(stretched_features(weight, inner, parts), (0, 0, 0, out - len(weight)))


def padded_bias(bias: Tensor, out: int) -> Tensor:
    """The bias of a linear layer whose output is padded to `out` features."""
    return functional.pad(bias, (0, out - len(bias)))


def padded_norm(weight: Tensor, hidden: int, parts: int = 1) -> Tensor:
    """The weight of an RMSNorm over padded features, whose output is the original's and zeros behind.

    Args:
        weight: (d,), multiplied by sqrt(d / hidden); over several parts, d is the width of all.
        hidden: width D of the padded features, those of all parts.
        parts: vectors that it is one norm of, side by side, each padded alone.
    """
    return stretched_features(rescaled(weight, len(weight), hidden), hidden, parts)


def rescaled(weight: Tensor, width: int, hidden: int) -> Tensor:
    """A tensor times sqrt(width / hidden), computed in fp64 and rounded to its dtype; exact at ratios of 4 and 16."""
    return (weight.double() * math.sqrt(width / hidden)).to(weight.dtype)


def padded_epsilon(epsilon: float, width: int, hidden: int) -> float:
    """The epsilon that belongs to `padded_norm`: the mean square over `hidden` is width / hidden of that before."""
    return epsilon * width / hidden


def _check_model(model: PreTrainedModel) -> None:
    """Raises Refused for a model whose blocks are not those of a dense Llama with plain weights."""
    config, kind = model.config, type(model)
    if config.model_type not in FAMILIES or not kind.__name__.endswith("ForCausalLM"):
        raise Refused(
            f"model: a {kind.__name__} of type {config.model_type!r} cannot be stretched: give a language model of "
            f"type {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]}"
        )
    if any(type(p.data) is not Tensor or not p.is_floating_point() for p in model.parameters()):
        raise Refused("model: quantised weights cannot be stretched: stretch the model first, then quantise it")


def _check_layers(layers: int, own: int) -> None:
    if layers < own:
        raise Refused(f"layers={layers} must be at least {own}, the model's own number: stretching only adds blocks")


def _check_hidden(hidden: int, own: int, heads: int) -> None:
    """Raises Refused for a width that is below the model's own, or with which its key-value heads are not whole."""
    step = own // math.gcd(own, heads)
    if hidden < own:
        raise Refused(f"hidden={hidden} must be at least {own}, the model's own width: the nearest is {own}")
    if hidden % step:
        below = hidden // step * step
        raise Refused(
            f"hidden={hidden} would leave part of a key-value head: the nearest widths are {below} and {below + step}"
        )


def _check_prompts(prompts: Tensor | None, vocabulary: int) -> None:
    if prompts is None:
        return
    if prompts.ndim != 2 or not prompts.numel():
        raise Refused(f"prompts has shape {tuple(prompts.shape)}: give token ids of shape (rows, length)")
    if int(prompts.min()) < 0 or int(prompts.max()) >= vocabulary:
        raise Refused(f"prompts has ids outside of the vocabulary: give ids from 0 to {vocabulary - 1}")


def _enlarge(config: Any, layers: LayerMap, hidden: int) -> None:
    """Set the sizes of the stretched model in a configuration of the original."""
    width = config.hidden_size
    config.rms_norm_eps = padded_epsilon(config.rms_norm_eps, width, hidden)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(config, name, -(-getattr(config, name) * hidden // width))
    config.hidden_size, config.num_hidden_layers = hidden, layers.stretched
    if (types := getattr(config, "layer_types", None)) is not None:
        config.layer_types = [types[layers.source(block)[0]] for block in range(layers.stretched)]


def _weights(model: PreTrainedModel, larger: Any, layers: LayerMap, width: int, hidden: int) -> dict[str, Tensor]:
    """The weights of the stretched model by name.

    Raises:
        Refused: the original has weights that no weight of the stretched model is made of, or lacks some.
    """
    own, found, read = model.state_dict(), {}, set()
    head_norms = any(name.endswith("q_norm.weight") for name in own)
    for name, empty in larger.state_dict().items():
        parts = name.split(".")
        adds = True
        if parts[1] == "layers":
            source, adds = layers.source(int(parts[2]))
            parts[2] = str(source)
        read.add(origin := ".".join(parts))
        if origin in own:
            normed = head_norms and parts[-2] in ("q_proj", "k_proj")
            weight = rescaled(own[origin], width, hidden) if normed else own[origin]
            found[name] = _stretched_weight(parts[-2], weight, empty.shape, adds)
    if others := sorted(own.keys() ^ read):
        raise Refused(f"model: a {type(model).__name__} with changed modules cannot be stretched ({others[0]})")
    return found


def _stretched_weight(module: str, weight: Tensor, shape: torch.Size, adds: bool) -> Tensor:
    """A weight or bias of a module; adds: whether the block adds to the residual stream."""
    if module in INNER:
        return _tiled(weight, shape)
    if module in NORMS:
        return padded_norm(weight, shape[0])
    if module in OF_A_HEAD:
        return weight.clone()
    if module in OUTPUT and not adds:
        return weight.new_zeros(shape)
    assert module in (*OUTPUT, *TABLES)
    return padded_weight(weight, *shape) if weight.ndim == 2 else padded_bias(weight, *shape)


def _tiled(weight: Tensor, shape: torch.Size) -> Tensor:
    """A tensor repeated along every dimension up to a shape; rows behind the first repeat heads and neurons."""
    repeated = weight.repeat(*(-(-size // own) for size, own in zip(shape, weight.shape, strict=True)))
    return repeated[tuple(map(slice, shape))].contiguous()


@torch.no_grad()
def _compared(model: PreTrainedModel, larger: PreTrainedModel, prompts: Tensor | None) -> tuple[float, bool]:
    """The largest difference of logits over greedy text of `model`, and whether both choose that text."""
    if prompts is None:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(model.config.vocab_size, (PROMPTS, LENGTH), generator=generator)
    ids = prompts.to(model.device)
    for _ in range(TOKENS):
        logits: Tensor = model(ids, use_cache=False, logits_to_keep=1).logits
        ids = torch.cat((ids, logits.argmax(-1)), 1)
    expected, found = (m(ids, use_cache=False).logits.double() for m in (model, larger))
    behind = prompts.shape[1] - 1
    same_text = torch.equal(expected.argmax(-1)[:, behind:], found.argmax(-1)[:, behind:])
    return float((expected - found).abs().max()), same_text
