"""Layouts of published checkpoints that no method here reads, recognised by what their folders hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """A layout, told apart by the name of a tensor or by an entry of config.json.

    name: as messages show it.
    tensors: pattern of a tensor that no layout read here has.
    kinds: `architectures` of `config.json`, or the `speculators_model_type`.
    fields: keys that only its config.json has.
    """

    name: str
    tensors: str = "(?!)"
    kinds: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def holds(self, names: Iterable[str], config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is in it. names: of its tensors, without a `model.` prefix."""
        given = config.get("architectures")
        kinds = [*(given if isinstance(given, list) else [given]), config.get("speculators_model_type")]
        if any(kind in kinds for kind in self.kinds) or any(field in config for field in self.fields):
            return True
        pattern = re.compile(self.tensors)
        return any(pattern.fullmatch(name) for name in names)


UNREAD = (
    Layout("P-EAGLE", "mask_hidden", ("PEagleSpeculator", "PEagleDraftModel", "peagle")),
    Layout("DeepSpec's EAGLE-3", kinds=("Qwen3Eagle3Model",)),
    Layout("EAGLE-3 with latent attention", kinds=("Eagle3DeepseekV2ForCausalLM",)),
    Layout("EAGLE-3 of several layers by SGLang", r"additional_layers\..+"),
    Layout("EAGLE by early releases of speculators", r"fusion_fc\..+"),
    Layout("GRIFFIN", r"fc\.fc\..+"),
    Layout("Medusa by TensorRT-LLM", r"medusa_heads\.\d+\.(medusa_layers\..+|lm_head\.weight)"),
    Layout("ReDrafter", r"rnn_[uw]\..+"),
    Layout("Arctic's LSTM speculator", r"(speculator\.)?(forget_emb|forget_proj|projs)\..+"),
    Layout("DFlash 2", r"candidate_selector\..+"),
    Layout("DSpark", r"markov_head\..+", ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "dspark")),
    Layout("Domino", r"prefix_gru\..+"),
    Layout("Gemma's assistant", r"(pre|post)_projection\.weight"),
    Layout("PARD-2", fields=("pard2_target_layers",)),  # has a pard_token too
    Layout("PARD", fields=("pard_token",)),
    Layout("UNO", fields=("uno_mask_token_id",)),
)


def unread_layout(names: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """The name of the layout of a checkpoint that nothing here reads; None where it is none of these."""
    return next((layout.name for layout in UNREAD if layout.holds(names, config)), None)
