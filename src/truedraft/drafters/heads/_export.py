"""EAGLE-3 heads in the layout that vLLM and SGLang load: `LlamaForCausalLMEagle3`, as SpecForge writes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from truedraft.drafters.heads._head import Head
from truedraft.errors import Refused

IDS = "eagle_aux_hidden_state_layer_ids"
PLAIN = {
    "norm_before_residual": False,
    "fuse_norm": "",
    "fuse_bias": False,
    "head_norms": False,
    "embeddings": False,
    "output_head": True,
}


def files_of(head: Head, engine: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors of a head for an engine, "vllm" or "sglang".

    vLLM numbers tapped layers as `Taps` does. SGLang takes explicit ids for blocks whose outputs are read where the
    first id is 1, and in its later versions for layers elsewhere.

    Raises:
        Refused: the layout has no place for something that the head has.
    """
    record, config = head.record(), head.config
    others = [name for name, value in PLAIN.items() if record[name] != value]
    if record["blocks"] != 1 or others:
        raise Refused(f"--format {engine}: its layout is for heads of one plain layer, and this one has {record}")
    if head.draft_token_ids is None:
        raise Refused(
            f"--format {engine}: a head with the target's whole vocabulary would be given the target's output head "
            "there: train one with fewer, `eagle3:vocabulary=N`"
        )
    layers = list(head.layers)
    if engine == "sglang" and layers[0] == 1:
        raise Refused(
            "--format sglang: it takes ids that begin with 1 for other layers: train one that begins elsewhere"
        )
    ids = [layer - 1 for layer in layers] if engine == "sglang" and layers[0] == 2 else layers
    rope = config.rope_parameters
    written = dict(
        architectures=["LlamaForCausalLMEagle3"], model_type="llama", vocab_size=head.vocabulary,
        draft_vocab_size=len(head.draft_token_ids), target_hidden_size=record["feature_size"], num_hidden_layers=1,
        norm_output=record["norm_output"], tie_word_embeddings=False, bias=False,
        rope_theta=rope["rope_theta"], rope_scaling=None if rope["rope_type"] == "default" else rope,
        torch_dtype=str(head.dtype).removeprefix("torch."), truedraft={"layers": layers},
        eagle_config={IDS: ids, "use_aux_hidden_state": True}, **{IDS: ids},
        **{name: value for name, value in record["layer"].items() if name not in ("rope_theta", "rope_parameters")},
    )  # fmt: skip
    weights = {name: w.contiguous() for name, w in head.state_dict().items() if name != "draft_token_ids"}
    member = torch.zeros(head.vocabulary, dtype=torch.bool)
    member[head.draft_token_ids.cpu()] = True
    weights |= {"d2t": head.draft_token_ids.cpu() - torch.arange(len(head.draft_token_ids)), "t2d": member}
    return written, weights
