"""Layers for multi-token prediction inside checkpoints: against plain references, and against `transformers`' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator

from foreign import FORMATS
from foreign.common import llama, opened, save
from foreign.mtp import mtp_logits, write_deepseek, write_qwen
from test_head_formats import CHAIN, LATER, TOKENS, TREE, Driven, Paths, assert_close
from truedraft import Refused, accelerate, registry
from truedraft.cli import main
from truedraft.drafters.heads._mtp import MtpHead, read
from truedraft.runtime.heads import CompiledHeadPass, HeadPass, TorchHeadPass, head_pass

NAMES = ("mtp-deepseek", "mtp-glm", "mtp-qwen")
HOSTED = NAMES[:2]  # models with linear attention are not
VARIANTS = [(name, variant) for name in NAMES for variant in FORMATS[name].variants]
SETTINGS = ("feature before the norm", "state carried before the norm")  # errors of readers, or knobs
CONTROLS = [(name, wrong) for name in NAMES for wrong in FORMATS[name].controls if wrong not in SETTINGS]
DTYPES = [(torch.float32, 2e-4), (torch.float64, 1e-5)]


def written(name: str, folder: Path, dtype: torch.dtype = torch.float32, **variant: Any) -> PreTrainedModel:
    target = FORMATS[name].target(dtype=dtype)
    FORMATS[name].write(folder, target, 0, **variant)
    return target


def head_of(folder: Path, target: PreTrainedModel, before_norm: bool = False, raw_states: bool = False) -> MtpHead:
    head = read(str(folder), target, before_norm, raw_states)
    return head.placed(target.device, target.dtype)


def paths_of(head: MtpHead, paths: Paths) -> Paths:
    """Those that it drafts: of several modules, each drafts one level."""
    return [path for path in paths if len(head.depths) == 1 or len(path) < len(head.depths)]


def reference(folder: Path, target: PreTrainedModel, paths: Paths, more: Sequence[int] = (), wrong: str = "") -> Tensor:
    return torch.stack([mtp_logits(folder, target, [*TOKENS, *more], path, wrong=wrong)[-1] for path in paths])


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_drafts_are_those_of_the_published_law(
    name: str, variant: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """A chain, a tree, and trees after rounds in which none of the drafted tokens was accepted."""
    target = written(name, tmp_path, dtype, **FORMATS[name].variants[variant])
    head = head_of(tmp_path, target)
    driven, chain, tree = Driven(head, TorchHeadPass(head), target), paths_of(head, CHAIN), paths_of(head, TREE)
    assert_close(driven.logits(chain), reference(tmp_path, target, chain), tolerance)
    for more in (LATER, [*LATER, LATER[0]]):
        driven.append(more[len(driven.row.tokens) - len(TOKENS) :])
        assert_close(driven.logits(tree), reference(tmp_path, target, tree, more), tolerance)


@pytest.mark.parametrize("variant", [{}, {"layers": 3}])
def test_short_prompts_draft_by_the_published_law(variant: dict, tmp_path: Path) -> None:
    """Modules that draft further have fewer tokens to attend to than there are places."""
    target = written("mtp-glm", tmp_path, torch.float64, **variant)
    head = head_of(tmp_path, target)
    for count in (2, 3):
        driven = Driven(head, TorchHeadPass(head), target)
        driven.reader.end(driven.row)
        driven.row.tokens = TOKENS[:count]
        driven.reader.start([driven.row], 40)
        driven._observe(0)
        paths = paths_of(head, TREE)
        expected = torch.stack([mtp_logits(tmp_path, target, TOKENS[:count], path)[-1] for path in paths])
        assert_close(driven.logits(paths), expected, 1e-5)


@pytest.mark.parametrize(("name", "wrong"), CONTROLS)
def test_errors_of_readers_would_show(name: str, wrong: str, tmp_path: Path) -> None:
    target = written(name, tmp_path, torch.float64)
    head = head_of(tmp_path, target)
    found = Driven(head, TorchHeadPass(head), target).logits(CHAIN)
    assert (found.softmax(-1) - mtp_logits(tmp_path, target, TOKENS, CHAIN[-1], wrong).softmax(-1)).abs().max() > 1e-3


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("wrong", "knob"), zip(SETTINGS, ("before_norm", "raw_states"), strict=True))
@pytest.mark.parametrize("name", NAMES)
def test_norms_of_features_and_states_are_as_set(name: str, wrong: str, knob: str, layers: int, tmp_path: Path) -> None:
    if name == "mtp-qwen" and layers > 1:
        pytest.skip("Qwen stores one")
    target = written(name, tmp_path, torch.float64, **({"layers": layers} if layers > 1 else {}))
    head = head_of(tmp_path, target, **{knob: True})
    paths = paths_of(head, TREE)
    found = Driven(head, TorchHeadPass(head), target).logits(paths)
    assert_close(found, reference(tmp_path, target, paths, wrong=wrong), 1e-5)
    assert (found - reference(tmp_path, target, paths)).abs().max() > 1e-2
    record = head.record()
    assert record["convention"] == f"{'before' if knob == 'before_norm' else 'after'} the final norm"
    assert record["raw_states"] == (knob == "raw_states")
    assert record["source"] == ("Qwen" if name == "mtp-qwen" else "DeepSeek")
    assert head.layers == ((3,) if knob == "before_norm" else (-1,))


@pytest.mark.parametrize("settings", [{}, {"before_norm": True}, {"raw_states": True}])
@pytest.mark.parametrize(("made", "layers"), [(CompiledHeadPass, 1), (TorchHeadPass, 1), (TorchHeadPass, 3)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_plain_layers_draft_by_the_same_law(
    kind: str, made: Callable[[Any], HeadPass], layers: int, settings: dict, tmp_path: Path
) -> None:
    """Layers as in Llama and Qwen have the compiled pass."""
    target = plain_target(kind)
    write_deepseek(tmp_path, target, 0, layers=layers)
    head = head_of(tmp_path, target, **settings)
    driven, paths = Driven(head, made(head), target), paths_of(head, TREE)
    wrong = dict(zip(("before_norm", "raw_states"), SETTINGS, strict=True)).get(next(iter(settings), ""), "")
    assert_close(driven.logits(paths), reference(tmp_path, target, paths, wrong=wrong), 2e-4)


def plain_target(kind: str) -> PreTrainedModel:
    from transformers import CONFIG_MAPPING

    from foreign.common import random_model

    shape: dict[str, Any] = dict(vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256, head_dim=16)
    shape |= dict(eos_token_id=None, bos_token_id=None, pad_token_id=None, tie_word_embeddings=False)
    if kind == "qwen2":
        shape["num_attention_heads"] = 2
    return random_model(CONFIG_MAPPING[kind](**shape), 0)
