"""Layers for multi-token prediction inside checkpoints: against plain references, and against `transformers`' own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator

from foreign import FORMATS
from foreign.common import opened, random_model, save
from foreign.mtp import mtp_logits, write_deepseek
from test_head_formats import CHAIN, LATER, TOKENS, TREE, Driven, Paths, assert_close
from truedraft import Refused, accelerate, registry
from truedraft.cli import main
from truedraft.drafters.heads._mtp import MtpHead, read
from truedraft.drafters.heads._reader import HeadReader
from truedraft.runtime.heads import CompiledHeadPass, HeadPass, TorchHeadPass

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


@pytest.mark.covering(1)
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


@pytest.mark.covering(1)
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


@pytest.mark.covering(1)
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
    shape: dict[str, Any] = dict(vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256, head_dim=16)
    shape |= dict(eos_token_id=None, bos_token_id=None, pad_token_id=None, tie_word_embeddings=False)
    if kind == "qwen2":
        shape["num_attention_heads"] = 2
    return random_model(CONFIG_MAPPING[kind](**shape), 0)


def chain(folder: Path | None, modules: int) -> Any:
    """A drafter of chains, a token for each module."""
    given = {} if folder is None else {"model": str(folder)}
    return registry.load("drafters", "mtp", nodes=modules, depth=modules, **given)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", HOSTED)
def test_drafts_are_those_of_transformers(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same text, in decoding with `use_mtp`; its pattern of names is for the published number of layers."""
    target = written(name, tmp_path, layers=layers)
    n = target.config.num_hidden_layers
    target.config.name_or_path, target.config.num_mtp_layers = str(tmp_path), layers
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{n + depth}\." for depth in range(layers)]
    theirs, get = dict[tuple[int, ...], list[int]](), MTPCandidateGenerator.get_candidates

    def candidates(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found, logits = get(self, input_ids, *args, **kwargs)
        theirs[tuple(input_ids[0].tolist())] = found[0, input_ids.shape[1] :].tolist()
        return found, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", candidates)
    ids = torch.tensor([TOKENS])
    settings = GenerationConfig(max_new_tokens=16, do_sample=False)
    expected = target.generate(ids, settings, use_mtp=True)
    draft = chain(None, layers)
    propose, compared = draft.propose, 0

    def proposed(rows: Any, budget: Sequence[int]) -> Any:
        nonlocal compared
        (tree,) = trees = propose(rows, budget)
        if len(tree) > 1:
            found = theirs[tuple(rows[0].tokens)]
            assert list(tree.tokens[1:]) == found[: len(tree) - 1]
            compared += len(tree) - 1
        return trees

    draft.propose = proposed
    assert torch.equal(accelerate(target, draft=draft, control="fixed").generate(ids, settings), expected)
    assert compared >= 10


@pytest.mark.covering(1)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", HOSTED)
def test_drafts_of_batches_are_those_of_the_published_law(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of rows of different lengths, with rows that leave: the logits at every node of every tree."""
    target = written(name, tmp_path, layers=layers)
    expand, compared = HeadReader.expand, 0

    def checked(self: HeadReader, growing: Sequence[Any]) -> Tensor:
        nonlocal compared
        logits = expand(self, growing)
        nodes = [(tree, node) for tree in growing for node in tree.frontier]
        for found, (tree, node) in zip(logits, nodes, strict=True):
            law = mtp_logits(tmp_path, target, tree.row.tokens, tree.path(node))[-1]
            torch.testing.assert_close(found, law, rtol=5e-4, atol=5e-4)
            compared += 1
        return logits

    monkeypatch.setattr(HeadReader, "expand", checked)
    draft = registry.load("drafters", "mtp", model=str(tmp_path), nodes=4, depth=3, top_k=2)
    ids = torch.randint(1, 97, (3, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1] * 7, [0] * 5 + [1] * 2, [0] * 2 + [1] * 5])
    settings = GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)
    ends = [row[3].item() for row in target.generate(ids, settings, attention_mask=mask)[:1, 7:]]
    settings.eos_token_id = ends
    expected = target.generate(ids, settings, attention_mask=mask)
    fast = accelerate(target, draft=draft, control="fixed")
    assert torch.equal(fast.generate(ids, settings, attention_mask=mask), expected)
    assert compared > 20


def test_the_checkpoint_is_that_of_the_target(tmp_path: Path) -> None:
    written("mtp-glm", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([TOKENS])
    expected = model.generate(ids, max_new_tokens=10, do_sample=False)
    for draft in ("mtp", f"mtp:{tmp_path}", "mtp:depth=2"):
        fast = accelerate(model, draft=draft, control="fixed")
        assert torch.equal(fast.generate(ids, max_new_tokens=10, do_sample=False), expected)
        assert fast.report().acceptance_rate is not None, "something was drafted"


def test_only_files_with_such_layers_are_read(tmp_path: Path) -> None:
    target = written("mtp-glm", tmp_path / "whole")
    config, weights = opened(tmp_path / "whole", torch.float32)
    own = {name: w for name, w in weights.items() if name.startswith("model.layers.3.")}
    save(tmp_path / "parts", config, own, "model-00002-of-00002.safetensors")
    files = {name: f"model-0000{2 if name in own else 1}-of-00002.safetensors" for name in weights}
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    one, other = (head_of(tmp_path / part, target).state_dict() for part in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_weights_have_the_types_of_the_targets(tmp_path: Path) -> None:
    """Corrections of experts' scores stay in fp32: rounded, they choose others."""
    target = written("mtp-deepseek", tmp_path, torch.bfloat16)
    types = {name: w.dtype for name, w in head_of(tmp_path, target).state_dict().items()}
    assert {n for n, dtype in types.items() if dtype == torch.float32} == {
        "depths.0.block.mlp.gate.e_score_correction_bias"
    }
    assert set(types.values()) == {torch.float32, torch.bfloat16}


GLM = "model.layers.3."


@pytest.mark.parametrize(
    ("kind", "weights", "message"),
    [
        ("glm4_moe", {GLM + "eh_proj.weight": None}, "has no layers for multi-token prediction"),
        ("glm4_moe", {GLM + "hnorm.weight": None}, "lacks depths.0.hnorm.weight"),
        ("glm4_moe", {GLM + "eh_proj.weight": torch.ones(32, 32)}, "eh_proj.weight (32, 32) instead of (32, 64)"),
        ("glm4_moe", {GLM + "self_attn.q_proj.weight": None}, "lacks layers.0.self_attn.q_proj.weight"),
        ("glm4_moe", {GLM + "self_attn.q_proj.weight": torch.ones(8, 32)}, "has others"),
        ("glm4_moe", {GLM + "self_attn.r_proj.weight": torch.ones(2)}, "has foreign layers.0.self_attn.r_proj.weight"),
        ("glm4_moe", {"model.layers.5.eh_proj.weight": torch.ones(2)}, "lacks"),
        ("llama", {GLM + "self_attn.q_proj.weight": None}, "lacks depths.0.block.self_attn.q_proj.weight"),
        ("llama", {GLM + "other.weight": torch.ones(2)}, "has foreign depths.0.block.other.weight"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    kind: str, weights: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    target = plain_target(kind) if kind == "llama" else FORMATS["mtp-glm"].target()
    write_deepseek(tmp_path, target, 0)
    config, found = opened(tmp_path, torch.float32)
    save(tmp_path, config, {n: w for n, w in {**found, **weights}.items() if w is not None}, "model.safetensors")
    with pytest.raises(Refused) as error:
        accelerate(target, draft=f"mtp:{tmp_path}").generate(torch.tensor([TOKENS]), max_new_tokens=3)
    assert message in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_target_without_such_layers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, ids = FORMATS["mtp-glm"].target(), torch.tensor([TOKENS])
    with pytest.raises(Refused, match="was not loaded from a checkpoint: give the folder"):
        accelerate(target, draft="mtp").generate(ids)
    with pytest.raises(Refused, match=r"there is no model\.safetensors in"):
        accelerate(target, draft=f"mtp:{tmp_path}").generate(ids)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(Refused, match="cannot be read"):
        accelerate(target, draft=f"mtp:{tmp_path}").generate(ids)
    target.save_pretrained(tmp_path / "model")
    (tmp_path / "lines.txt").write_text("one line")
    given = ["--target", str(tmp_path / "model"), "--data", str(tmp_path / "lines.txt"), "--out", str(tmp_path / "out")]
    assert main(["train", "mtp", *given]) == 2
    assert "error: mtp has nothing to learn: train one of dflash, draft-model, eagle," in capsys.readouterr().err
