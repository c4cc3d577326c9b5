"""A model's own decoding of a few short texts, which passes are compared with; remembered while the model is unchanged.

Most of the time of hosting a model goes into its own `generate`. What that says does not depend on how the model is
hosted, so that a model which is accelerated several times, with other drafters, is asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from truedraft.runtime.fingerprint import fingerprint
from truedraft.runtime.seq2seq import EncoderOutput
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.inputs import OPTIONS
from truedraft.targets.quirks import STATES_OUTSIDE
from truedraft.tree import Prompt

TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}  # settings that prompts depend on


@dataclass
class OwnDecoding:
    """What a model says of texts.

    state: of the model, as of `_state`.
    logits: by texts, those of plain decoding at their last tokens, (texts, last, V), fp32.
    ignorable: inputs besides tokens that have no effect where they are all zeros; None until that is known.
    continues: whether its forward over a cache continues texts as plain decoding does; None until that is known.
    """

    state: list[object]
    logits: dict[str, Tensor] = field(default_factory=dict)
    ignorable: frozenset[str] | None = None
    continues: bool | None = None

    def of(self, texts: Sequence[Sequence[int]], make: Callable[[], Tensor]) -> Tensor:
        if (key := repr(texts)) not in self.logits:
            self.logits[key] = make()
        return self.logits[key]


_REMEMBERED: WeakKeyDictionary[nn.Module, OwnDecoding] = WeakKeyDictionary()


def own_decoding(model: nn.Module) -> OwnDecoding:
    """What is remembered of a model: nothing where it has changed, in its weights too."""
    state = _state(model)
    if (found := _REMEMBERED.get(model)) is None or found.state != state:
        found = _REMEMBERED[model] = OwnDecoding(state)
    return found


def forget(model: nn.Module) -> None:
    """Forget what is remembered of a model."""
    _REMEMBERED.pop(model, None)


def _state(model: nn.Module) -> list[object]:
    """Its fingerprint, and how often each weight was written to, as torch counts: writing to `.data` is not counted."""
    weights = [*model.parameters(), *model.buffers()]
    return [*fingerprint(model), *(0 if weight.is_inference() else weight._version for weight in weights)]


def plain_logits(target: DecoderTarget, texts: Sequence[list[int]], prompts: Sequence[Prompt], last: int) -> Tensor:
    """Logits of plain decoding at the last tokens of texts, (texts, last, V), fp32; of an encoder-decoder with the
    sources of the prompts."""
    model, device = target.model, target.device
    if prompts[0].states is None:
        return generated_logits(model, texts, last, device).float()
    rows = []
    for text, prompt in zip(texts, prompts, strict=True):
        states = EncoderOutput(last_hidden_state=prompt.states[None])  # type: ignore[index]
        ids = torch.tensor([text], device=device)
        rows.append(model(encoder_outputs=states, decoder_input_ids=ids, use_cache=False).logits[0, -last:])
    return torch.stack(rows).float()


def generated_logits(
    model: Any, texts: Sequence[list[int]], last: int, device: torch.device, blank: str | None = None
) -> Tensor:
    """Logits of `generate` at the last tokens of texts, which are forced one by one after padded prompts.

    blank: an input to pass zeros for.
    """
    if len(texts) > 1 and model.config.model_type in STATES_OUTSIDE:
        return torch.cat([generated_logits(model, [text], last, device, blank) for text in texts])
    longest = max(map(len, texts))
    pad = next(i for i in range(longest) if i not in texts[0])
    ids = torch.tensor([[pad] * (longest - len(text)) + text for text in texts], device=device)
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts], device=device)
    scores: list[Tensor] = []

    def decode(_: Any, input_ids: Tensor, *criteria: Any, **given: Any) -> Tensor:
        for n in range(longest - last + 1, longest + 1):
            step = {"next_sequence_length": 1 if scores else None, "is_first_iteration": not scores}
            out = model(**model.prepare_inputs_for_generation(ids[:, :n], **step, **given), return_dict=True)
            scores.append(out.logits[:, -1])
            given = model._update_model_kwargs_for_generation(out, given, is_encoder_decoder=False)
        return input_ids

    begun = longest - last + 1
    zeros = {} if blank is None else {blank: torch.zeros_like(ids[:, :begun])}
    settings = {**_without_effect(model), "max_length": longest, "use_cache": True}
    settings |= {"num_beams": 1, "num_return_sequences": 1}
    model.generate(
        ids[:, :begun], attention_mask=mask[:, :begun], custom_generate=decode, **settings, **zeros
    )  # fmt: skip
    return torch.stack(scores, 1)


def _without_effect(model: Any) -> dict[str, Any]:
    """The settings of a model's own generation config that choose tokens, lengths or ends, as if it had none: some of
    them need what only a call has, as stop strings need a tokenizer."""
    return dict.fromkeys(OPTIONS & model.generation_config.to_diff_dict().keys() - TOKENS)
