"""Unwraps models from PEFT and `torch.compile`, where the result computes the same."""

from __future__ import annotations

from typing import Any

from truedraft.errors import Refused

PER_CALL = ("POLY", "XLORA")  # adapters that depend on a whole call, not on a layer's input alone


def unwrapped(model: Any) -> Any:
    """The model of `transformers` that computes what `model` computes when it generates.

    That of an accelerated model; the argument of `torch.compile(model)`, whose `generate` calls it as well; the base
    model of a PEFT model, whose layers contain the adapters.

    Raises:
        Refused: an adapter is not part of the layers, or the model was compiled in place.
    """
    while (inner := _inner(model)) is not model:
        model = inner
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise _compiled(model, "model.compile()", "model._compiled_call_impl = None")
    if hasattr(vars(model).get("forward") if hasattr(model, "__dict__") else None, "_torchdynamo_orig_callable"):
        raise _compiled(model, "model.forward = torch.compile(...)", "del model.forward")
    return model


def _inner(model: Any) -> Any:
    """The model inside the outermost wrapper; the model itself where there is none."""
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(model).__mro__}
    if "truedraft.Accelerated" in kinds:
        return model.model
    if "torch.OptimizedModule" in kinds:
        return model._orig_mod
    if kinds & {"peft.PeftModel", "peft.PeftMixedModel"}:
        return _adapted(model)
    return model


def _adapted(model: Any) -> Any:
    """The base model of a PEFT model, with the generation config that PEFT would give it."""
    for name, config in model.peft_config.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "is_prompt_learning", False):
            raise Refused(
                f"the adapter {name!r} of {type(model).__name__} is {kind}, which puts learnt vectors before every "
                "prompt: accelerate(model.base_model), without it, or train an adapter of layers, such as LoRA"
            )
        if kind in PER_CALL or getattr(config, "alora_invocation_tokens", None):
            what = "activated LoRA" if kind not in PER_CALL else kind
            raise Refused(
                f"the adapter {name!r} of {type(model).__name__} is {what}, which is computed from each call as a "
                "whole: use an adapter that depends on nothing but its layer's input, such as LoRA"
            )
    base = model.base_model.model
    base.generation_config = model.generation_config
    return base


def _compiled(model: Any, how: str, undo: str) -> Refused:
    return Refused(
        f"{type(model).__name__} was compiled in place ({how}), and would be compiled again for every width of a pass: "
        f"undo that ({undo}); truedraft has compiled passes of its own"
    )
