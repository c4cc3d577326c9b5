"""Writers of quantised checkpoints, and what their weights are by the format's own code or description.

GPTQ and AWQ are packed here number by number, after their descriptions; compressed-tensors and GGUF by their packages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from truedraft import assets
from truedraft.loading import load_tokenizer

GROUP = 64
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Parts = dict[str, Tensor]
Quantiser = Callable[[Tensor, torch.Generator], tuple[Parts, Tensor]]  # the parts of a weight, and what they stand for


@cache
def plain(tied: bool = False, layers: int = 2, hidden: int = 256) -> PreTrainedModel:
    """A tiny Llama with the vocabulary of nano, whose rows are whole blocks of any type of GGUF."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=None,
        pad_token_id=0, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model


def with_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    """A plain model with some of its weights replaced."""
    config = type(model.config).from_dict({**model.config.to_dict(), "tie_word_embeddings": False})
    other = type(model)(config).eval()
    missing, unexpected = other.load_state_dict({**model.state_dict(), **weights}, strict=False)
    assert not missing and not unexpected
    return other


def write_folder(
    folder: Path, model: PreTrainedModel, quantised: Quantiser, settings: dict[str, Any], dtype: str = "float16"
) -> dict[str, Tensor]:
    """Save a model with the weights of its layers quantised, and its head plain; returns what these stand for."""
    model.save_pretrained(folder)
    random = torch.Generator().manual_seed(3)
    tensors, weights = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts, weights[name] = quantised(tensor, random)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": value.contiguous() for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype, "quantization_config": settings}))
    load_tokenizer("nano").save_pretrained(folder)
    return weights


def codes_of(weight: Tensor, bits: int, symmetric: bool, group_of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (out, in), scales of 16 bits (out, groups) and zero points (out, groups) of a weight."""
    most, groups = (1 << bits) - 1, int(group_of.max()) + 1
    columns = [weight[:, group_of == g] for g in range(groups)]
    low, high = (torch.stack([f(c, 1) for c in columns], 1) for f in (torch.amin, torch.amax))
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).clamp_min(1e-4).half()
    zeros = torch.full_like(low, 1 << (bits - 1)) if symmetric else (-low / scales.float()).round().clamp(1, most)
    codes = (weight / scales.float()[:, group_of] + zeros[:, group_of]).round().clamp(0, most)
    return codes.long(), scales, zeros.long()


def stands_for(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return ((codes - zeros[:, group_of]).double() * scales.double()[:, group_of]).float()


def _in_words(numbers: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """(rows, n) to (rows, n * bits / 32) int32: the number at place i of a word is the order[i]-th of its numbers."""
    words = numbers.numpy().astype(numpy.uint32).reshape(len(numbers), -1, len(order))
    places = [words[..., which] << numpy.uint32(bits * i) for i, which in enumerate(order)]
    return torch.from_numpy(numpy.bitwise_or.reduce(places).view(numpy.int32))


def gptq(bits: int = 4, symmetric: bool = True, act_order: bool = False, version: int = 1) -> Quantiser:
    def quantised(weight: Tensor, random: torch.Generator) -> tuple[Parts, Tensor]:
        group_of = torch.arange(weight.shape[1]) // GROUP
        if act_order:
            group_of = group_of[torch.randperm(len(group_of), generator=random)]
        codes, scales, zeros = codes_of(weight, bits, symmetric, group_of)
        order = tuple(range(32 // bits))
        parts = {
            "qweight": _in_words(codes, bits, order).T,
            "qzeros": _in_words((zeros - int(version == 1)).T, bits, order),
            "scales": scales.T,
            "g_idx": group_of.int(),
        }
        return parts, stands_for(codes, scales, zeros, group_of)

    return quantised


def gptq_settings(bits: int = 4, version: int = 1, **given: Any) -> dict[str, Any]:
    layout = {1: "gptq", 2: "gptq_v2"}[version]
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": layout, **given}


def awq(weight: Tensor, random: torch.Generator) -> tuple[Parts, Tensor]:
    group_of = torch.arange(weight.shape[1]) // GROUP
    codes, scales, zeros = codes_of(weight, 4, False, group_of)
    qweight, qzeros = (_in_words(numbers.T, 4, AWQ_ORDER) for numbers in (codes, zeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T}, stands_for(codes, scales, zeros, group_of)


AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def scheme(bits: int = 4, strategy: str = "group", symmetric: bool = True, **given: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    return {"targets": ["Linear"], "weights": weights | ({"group_size": GROUP} if strategy == "group" else {}), **given}


def compressed_settings(layout: str = "pack-quantized", **given: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": scheme(**given)}}


def compressed(
    layout: str = "pack-quantized", bits: int = 4, strategy: str = "group", symmetric: bool = True
) -> Quantiser:
    """By the package's own functions, with scales in fp32, so that it computes in fp32."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    compressor = BaseCompressor.get_value_from_registry(layout)
    described = QuantizationScheme(**scheme(bits, strategy, symmetric))

    def quantised(weight: Tensor, random: torch.Generator) -> tuple[Parts, Tensor]:
        width = weight.shape[1]
        group_of = torch.arange(width) // (GROUP if strategy == "group" else width)
        _, scales, zeros = codes_of(weight, bits, symmetric, group_of)
        if strategy == "tensor":
            scales = scales.max().view(1)
        state = {"weight": weight, "weight_scale": scales.float()}
        if not symmetric:
            state["weight_zero_point"] = (zeros - (1 << (bits - 1))).to(torch.int8)
        parts = compressor.compress(state, described)
        return parts, compressor.decompress(parts, described)["weight"]

    return quantised


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str,
    others: dict[str, str] | None = None,
    divisors: Tensor | None = None,
    **fields: str,
) -> dict[str, Tensor]:
    """Save a model as llama.cpp does, its matrices in blocks of a type; returns what these stand for.

    others: types of single matrices, by the ends of their names.
    divisors: of the frequencies of rotary embeddings.
    fields: further metadata, with __ for a dot.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, value in fields.items():
        writer.add_string(name.replace("__", "."), value)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = {}
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        to = names.get_name(name.removesuffix(".weight")) + ".weight"
        heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
        split = next((n for end, n in heads.items() if name.endswith(end)), 0)
        matrix = _halves_apart(tensor, split) if split else tensor
        if tensor.ndim == 1:
            writer.add_tensor(to, matrix.numpy())
            continue
        own = next((k for end, k in (others or {}).items() if name.endswith(end)), kind)
        type_ = gguf.GGMLQuantizationType[own]
        blocks = blocks_of(matrix.numpy(), own)
        writer.add_tensor(to, blocks, raw_dtype=type_)
        restored = torch.from_numpy(gguf.dequantize(blocks, type_).copy())
        weights[name] = _halves_together(restored, split) if split else restored
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    _finish(writer)
    return weights


def write_gpt2(path: Path) -> dict[str, Tensor]:
    """Save a random GPT-2 as llama.cpp does; returns its matrices by their names there."""
    import gguf

    torch.manual_seed(4)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=4096, n_embd=64, n_layer=1, n_head=2))
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(1024)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(256)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-5)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 1)
    weights = {}
    for name, tensor in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        to = f"{names.get_name(stem)}.{end}"
        transposed = tensor.ndim == 2 and ".h." in name
        matrix = (tensor.T if transposed else tensor).contiguous().numpy()
        if not transposed:
            writer.add_tensor(to, matrix)
            continue
        blocks = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(to, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        weights[to] = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0).copy())
    _finish(writer)
    return weights


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks_of(matrix: Any, kind: str) -> Any:
    """By the package, or random ones of a like size where it cannot make them."""
    import gguf

    type_ = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quantize(matrix, type_)
    except NotImplementedError:
        columns, size = gguf.GGML_QUANT_SIZES[type_]
        random = numpy.random.default_rng(matrix.shape[0])
        blocks = random.integers(0, 256, (matrix.shape[0], matrix.shape[1] // columns, size), dtype=numpy.uint8)
        for at in HALVES[kind]:
            sizes = random.uniform(0.5, 1.0, blocks.shape[:2]) * SPREAD[kind]
            blocks[..., at : at + 2] = sizes.astype(numpy.float16)[..., None].view(numpy.uint8)
        return blocks.reshape(len(matrix), -1)


# bytes at which blocks have numbers of 16 bits, and what these are so that weights are about as large as a tenth
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
HALVES |= {"IQ4_NL": (0,), "IQ4_XS": (0,), "IQ3_S": (0,)}
SPREAD = {"Q2_K": 5e-3, "Q3_K": 2e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 5e-5}
SPREAD |= {"IQ4_NL": 1e-3, "IQ4_XS": 5e-5, "IQ3_S": 5e-4}


def _halves_apart(matrix: Tensor, heads: int) -> Tensor:
    """As llama.cpp has queries and keys: the numbers that rotate together are neighbours."""
    return matrix.view(heads, 2, -1, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape).contiguous()


def _halves_together(matrix: Tensor, heads: int) -> Tensor:
    return matrix.view(heads, -1, 2, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape).contiguous()


def _add_tokenizer(writer: Any) -> None:
    """That of nano."""
    whole = json.loads((assets.path("nano") / "tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    special = {token["id"] for token in whole["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in whole["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([3 if i in special else 1 for i in range(len(vocabulary))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_eos_token_id(0)
