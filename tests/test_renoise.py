"""`diffusion_gemma`: the text of the model's own `generate` under the same seed, which is the oracle."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaGenerationConfig,
    GenerationConfig,
    LogitsProcessorList,
    TopKLogitsWarper,
)

import truedraft
from truedraft import assets
from truedraft.canvas.layout import layout_of
from truedraft.canvas.renoise import Denoiser, Settings
from truedraft.canvas.renoised import AcceleratedRenoise
from truedraft.cli import main
from truedraft.errors import Refused

VOCABULARY, CANVAS = 61, 8
TRACE: dict[str, Any] = {"max_new_tokens": 3 * CANVAS, "max_denoising_steps": 9, "confidence_threshold": 3.0}


def model_of(scale: float = 4, **text: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=8, num_global_key_value_heads=1, sliding_window=8,
        num_experts=4, top_k_experts=2, moe_intermediate_size=16, max_position_embeddings=64, pad_token_id=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8,
    )  # fmt: skip
    config = DiffusionGemmaConfig(
        text_config=sizes | text, vision_config=vision, canvas_length=CANVAS, image_token_id=VOCABULARY
    )
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale if weight.ndim > 1 else 1)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


def prompts(rows: int, length: int = 11) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def compare(model: Any, given: dict[str, Any], strict: bool = False, rows: int = 3, seed: int = 5) -> Any:
    """Tokens and the generator's state afterwards are those of the model's own `generate`."""
    own, fast = copy.deepcopy(given), truedraft.accelerate(model, strict=strict)
    torch.manual_seed(seed)
    expected, state = model.generate(**prompts(rows), **own), torch.get_rng_state()
    torch.manual_seed(seed)
    found = fast.generate(**prompts(rows), **given)
    assert torch.equal(found, expected.sequences)
    assert torch.equal(torch.get_rng_state(), state)
    return fast, expected


@pytest.mark.covering(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"confidence_threshold": 0.3, "stability_threshold": 2},
        {"stability_threshold": 0, "t_min": 0.1},
        {"t_min": 1e-3, "t_max": 2e-3},
        {"eos_token_id": [1, 9, 13, 20, 42], "pad_token_id": 0},
        {"eos_token_id": [1, 9, 13, 20, 42], "t_min": 1e-3, "t_max": 2e-3},
        {"max_new_tokens": 256, "max_length": 20},
        {"max_new_tokens": 9},
        {"max_length": 25, "eos_token_id": 9, "pad_token_id": 9},
        {"max_denoising_steps": 1},
    ],
)
def test_the_text_is_that_of_its_own_generate(model: Any, changes: dict[str, Any], rows: int, strict: bool) -> None:
    compare(model, TRACE | changes, strict, rows)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scale", [1, 10])
@pytest.mark.parametrize("bound", [1e-3, 5.0])
def test_bounds_of_entropy(scale: float, bound: float) -> None:
    sampler = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": bound}
    settings = DiffusionGemmaGenerationConfig(sampler_config=sampler, **TRACE)
    model = model_of(scale)
    for seed in range(2):
        compare(model, {"generation_config": settings}, seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strictly_the_logits_have_the_bits_of_its_own_generate(dtype: torch.dtype) -> None:
    model, seen = model_of(use_bidirectional_attention="vision").to(dtype), list[Tensor]()
    hook = model.lm_head.register_forward_hook(lambda _, __, out: seen.append(out))
    given = TRACE | {"t_min": 1e-3, "t_max": 2e-3}
    compare(model, given, strict=True)
    hook.remove()
    half = len(seen) // 2
    assert len(seen) == 2 * half > 0
    assert all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))


def test_rows_leave_when_their_canvas_is_complete(model: Any) -> None:
    given, read = TRACE | {"t_min": 1e-3, "t_max": 2e-3}, list[int]()
    hook = model.lm_head.register_forward_hook(lambda _, __, out: read.append(len(out)))
    fast, own = compare(model, given, rows=5)
    hook.remove()
    report = fast.report()
    assert len(read) == 2 * len(report.passes)
    assert set(read[: len(read) // 2]) == {5}
    assert read[len(read) // 2 :] == [len(one.emitted) for one in report.passes]
    assert report.row_passes < 5 * len(report.passes)
    per_row = [sum(e.row == row for one in report.passes for e in one.emitted) for row in range(5)]
    assert [round(3 * CANVAS / float(rate)) for rate in own.tokens_per_forward] == per_row
    assert (report.guarantee, report.drafter, report.tokens) == ("tokens", "none", 5 * 3 * CANVAS)


def test_a_seed_leaves_the_generator_alone(model: Any) -> None:
    fast: Any = truedraft.accelerate(model)
    torch.manual_seed(7)
    expected = model.generate(**prompts(2), **TRACE).sequences
    before = torch.get_rng_state()
    assert torch.equal(fast.generate(**prompts(2), **TRACE, seed=7), expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(fast.generate(**prompts(2), **TRACE, seed=8), expected)


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def put(self, value: Tensor) -> None:
        self.events.append(("put", value.tolist()))

    def put_draft(self, value: Tensor) -> None:
        self.events.append(("draft", value.tolist()))

    def end(self) -> None:
        self.events.append(("end", None))


def test_streamers_get_what_its_own_generate_gives_them(model: Any) -> None:
    given = TRACE | {"eos_token_id": [9, 13, 20], "pad_token_id": 0, "t_min": 1e-3, "t_max": 2e-3}
    own, ours, passes, read = Recorder(), Recorder(), [], []
    torch.manual_seed(3)
    model.generate(**prompts(3), **given, streamer=own)
    fast: Any = truedraft.accelerate(model)
    out = fast.generate(
        **prompts(3), **given, streamer=ours, seed=3, on_pass=passes.append, on_read=lambda *n: read.append(n)
    )
    assert ours.events == own.events
    assert (passes, read) == (fast.report().passes, [(33, 33)])
    texts = [[t for one in passes for e in one.emitted if e.row == row for t in e.tokens] for row in range(3)]
    for text, line in zip(texts, out[:, 11:].tolist(), strict=True):
        assert text == line[: len(text)]
        assert text[-1] in given["eos_token_id"] or len(text) == len(line)
        assert not {*text[:-1]} & {*given["eos_token_id"]}
        assert not any(line[len(text) :])


def test_a_right_canvas_is_not_scored_right_without_the_logits_before_it(model: Any) -> None:
    """Why nothing is verified ahead: a draft has the canvas at best, and the logits of an earlier pass."""
    conditions = []
    ids = prompts(1)["input_ids"]
    settings = Settings(9, 0.1, 0.4, 0.8, 1, 1e-6, 1)
    denoiser = Denoiser(model, settings, ids, torch.ones_like(ids, dtype=torch.bool), torch.Generator().manual_seed(0))
    score = denoiser.score

    def kept(canvas: Tensor, condition: Any, *rest: Any) -> Tensor:
        if len(conditions) == 2:
            drafted, true = score(canvas, conditions[-1], *rest), score(canvas, condition, *rest)
            assert (drafted - true).abs().max() > 1e-2
        conditions.append(condition)
        return score(canvas, condition, *rest)

    denoiser.score = kept  # type: ignore[method-assign]
    with torch.no_grad():
        assert len(list(denoiser.steps())) == 9 == len(conditions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft": "freedave"}, "no later canvas can be verified ahead"),
        ({"rule": "low-confidence"}, "is for canvases with masks"),
        ({"layout": object()}, "is for canvases with masks"),
        ({"ties": "recheck"}, "is for autoregressive models"),
        ({"runtime": "x"}, "give 'auto'"),
        ({"control": "x"}, "diffusion models have 'cost' and 'fixed'"),
    ],
)
def test_parts_that_do_not_fit(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        truedraft.accelerate(model, **arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_sample": False}, "samples always"),
        ({"stability_threshold": None}, "stability_threshold is None"),
        ({"generation_config": GenerationConfig()}, "sampler_config is None in this GenerationConfig"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 is no setting of canvases"),
        ({"max_denoising_step": 3}, "did you mean 'max_denoising_steps'"),
        ({"max_denoising_steps": 0}, "must be a positive integer"),
        ({"max_new_tokens": 57}, "8 canvases of 8 make a text of 75 positions"),
        ({"max_length": 11, "max_new_tokens": 256}, "leaves no room after 11 prompt tokens"),
        ({"cache_implementation": "static"}, "give 'dynamic'"),
        ({"return_dict_in_generate": True}, "leave it out"),
        ({"logits_processor": LogitsProcessorList([TopKLogitsWarper(3)])}, "use its own generate"),
        ({"pixel_values": torch.zeros(1)}, "use its own generate"),
        ({"seed": -1}, "seed=-1"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask has shape"),
        ({"inputs": torch.tensor([[VOCABULARY]])}, "outside the model's vocabulary"),
        ({"inputs": [[3]]}, "a tensor"),
    ],
)
def test_refused_before_anything_is_computed(model: Any, given: dict[str, Any], message: str) -> None:
    def computed(*_: Any) -> None:
        raise AssertionError("a pass was made")

    hook = model.model.encoder.register_forward_pre_hook(computed)
    fast: Any = truedraft.accelerate(model)
    try:
        with pytest.raises(Refused, match=message):
            fast.generate(**{"inputs": prompts(1)["input_ids"], "max_new_tokens": 8} | given)
    finally:
        hook.remove()
    with pytest.raises(Refused, match="nothing to report"):
        fast.report()


def test_the_stand_in(model: Any) -> None:
    with pytest.raises(Refused, match="no layout with masks"):
        layout_of(model.config)
    fast: Any = truedraft.accelerate(model, strict=True)
    copied = copy.deepcopy(fast)
    assert type(copied) is AcceleratedRenoise and copied.model is not model and "all rows" in repr(copied)
    assert fast.config is model.config
    assert torch.equal(fast.generate(**prompts(2), **TRACE, seed=1), copied.generate(**prompts(2), **TRACE, seed=1))


def test_from_a_terminal(tmp_path: Path, capsys: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.path("nano"))
    model = model_of(vocab_size=len(tokenizer))
    model.generation_config.update(**TRACE, eos_token_id=[7, 8, *range(100, 300)], pad_token_id=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("one day", return_tensors="pt").input_ids
    torch.manual_seed(3)
    expected = model.generate(ids, max_new_tokens=16).sequences[0, ids.shape[1] :].tolist()
    end = next((i for i, token in enumerate(expected) if token in model.generation_config.eos_token_id), 99)
    asked = ["generate", str(tmp_path), "one day", "--max-new-tokens", "16", "--json"]
    assert main([*asked, "--sample", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected[: end + 1]
    for command, message in {
        tuple(asked): "samples always",
        (*asked, "--sample", "--draft", "ssd"): "no later canvas can be verified ahead",
        ("bench", str(tmp_path)): "has no layout with masks",
        ("audit", str(tmp_path)): "no later canvas can be verified ahead",
    }.items():
        assert main([*command]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
