"""Stretched models: the original's text, logits and features, from an original of every family."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

import truedraft
from models import tiny
from truedraft import Refused, assets, registry
from truedraft.bench import stretched as stretching
from truedraft.bench.sizes import SIZES, size_of
from truedraft.bench.stretched import (
    LayerMap,
    padded_bias,
    padded_epsilon,
    padded_norm,
    padded_weight,
    stretched,
    stretched_features,
)
from truedraft.cli import main
from truedraft.cli._models import load
from truedraft.drafters._learned import save_learnt

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SHAPES = [(2, 32), (5, 48), (3, 64), (7, 128), (2, 160)]  # of the tiny models, of 2 blocks and width 32


def noisy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose norms and biases are not those of a new model, ones and zeros."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def ids(rows: int = 3, length: int = 30) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def outputs(model: PreTrainedModel) -> Any:
    return model(ids(), output_hidden_states=True, use_cache=False)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("layers", "hidden"), SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_original(family: str, layers: int, hidden: int) -> None:
    model = noisy(tiny(family, torch.float32, sharpen=1.0))
    larger = stretched(model, layers=layers, hidden=hidden)
    assert type(larger) is type(model) and larger.dtype == torch.float32 and not larger.training
    assert (larger.config.num_hidden_layers, larger.config.hidden_size) == (layers, hidden)
    assert larger.config.num_attention_heads == 4 * hidden // 32
    assert larger.config.num_key_value_heads == 2 * hidden // 32
    assert larger.config.intermediate_size == 48 * hidden // 32
    found = outputs(larger).logits
    torch.testing.assert_close(found, outputs(model).logits, rtol=0, atol=1e-5)
    assert larger.stretch.same_text and larger.stretch.difference < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stretched_model_is_exact_in_fp64(family: str) -> None:
    """Rounding does not hide an error of scale: even the epsilons of all norms agree, beside small activations."""
    model = noisy(tiny(family))
    model.config.rms_norm_eps = 0.01
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.01
    larger = stretched(model, layers=4, hidden=96)
    torch.testing.assert_close(outputs(larger).logits, outputs(model).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_tied_heads_and_biases(family: str, settings: dict[str, bool]) -> None:
    base = tiny(family).config
    config = type(base)(**{**base.to_dict(), **settings})
    torch.manual_seed(3)
    model = noisy(AutoModelForCausalLM.from_config(config).eval())
    larger = stretched(model, layers=5, hidden=64)
    torch.testing.assert_close(outputs(larger).logits, outputs(model).logits, rtol=0, atol=1e-5)
    tied = larger.get_output_embeddings().weight is larger.get_input_embeddings().weight
    assert tied == config.tie_word_embeddings


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_added_blocks_have_the_attention_of_the_block_that_they_precede(family: str) -> None:
    settings = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)
    base = tiny(family)
    config = type(base.config)(**{**base.config.to_dict(), **settings, "layer_types": None})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    larger = stretched(model, layers=5, hidden=64)
    assert larger.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 3
    torch.testing.assert_close(outputs(larger).logits, outputs(model).logits, rtol=0, atol=1e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("layers", "hidden"), SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_the_original_at_the_mapped_layer(family: str, layers: int, hidden: int) -> None:
    model = noisy(tiny(family, torch.float32, sharpen=1.0))
    larger = stretched(model, layers=layers, hidden=hidden)
    expected, found = (streams(m) for m in (model, larger))
    mapped = larger.stretch.layers
    assert [mapped[k] for k in (0, 2, -1)] == [0, layers, -1]
    for layer in (0, 1, 2, -1):
        torch.testing.assert_close(found[mapped[layer]], stretched_features(expected[layer], hidden))
    if layers >= 5:
        assert not torch.allclose(found[mapped[1] + layers // 2 + 1][..., :32], expected[1], atol=1e-3)


def streams(model: PreTrainedModel) -> dict[int, Tensor]:
    """The residual stream after every number of blocks, and that after the final norm as -1."""
    last: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, given: last.append(given[0]))
    states = outputs(model).hidden_states  # transformers replaces the last by that after the final norm
    hook.remove()
    return {**dict(enumerate(states[:-1])), len(states) - 1: last[0], -1: states[-1]}


def test_no_inner_projection_has_zeros_and_added_blocks_add_nothing() -> None:
    larger = stretched(tiny("qwen2", torch.float32), layers=5, hidden=128)
    for block, layer in enumerate(larger.model.layers):
        for module in (*(getattr(layer.self_attn, f"{x}_proj") for x in "qkv"), layer.mlp.gate_proj, layer.mlp.up_proj):
            assert module.weight.all()
        adds = larger.stretch.layers.source(block)[1]
        assert adds == (block in (1, 4))
        assert bool(layer.self_attn.o_proj.weight.any()) == bool(layer.mlp.down_proj.weight.any()) == adds


@pytest.mark.parametrize("original", [1, 2, 3, 6])
def test_layer_map(original: int) -> None:
    for layers in range(original, 20):
        mapped = LayerMap(original, layers)
        ends = [mapped[k] for k in range(original + 1)]
        assert ends[0] == 0 and ends[-1] == layers and sorted(set(ends)) == ends
        blocks = [mapped.source(block) for block in range(layers)]
        assert [source for source, adds in blocks if adds] == list(range(original))
        assert [block + 1 for block, (_, adds) in enumerate(blocks) if adds] == ends[1:]
    with pytest.raises(Refused, match="layer 7: the original model has layers 0 to 6"):
        LayerMap(6, 12)[7]
    with pytest.raises(Refused, match="layer -2"):
        LayerMap(6, 12)[-2]


@pytest.mark.parametrize(
    ("layers", "hidden"),
    [pytest.param(*larger, marks=pytest.mark.slow) for larger in ((6, 1024), (13, 384))] + [(8, 320)],
)
def test_nano_stretched_has_the_text_of_nano(layers: int, hidden: int) -> None:
    model, tokenizer = load("nano")
    larger = stretched(model, layers=layers, hidden=hidden)
    fast = truedraft.accelerate(larger, tokenizer)
    for name in ("one day, a little girl", assets.edit_prompt("def f(x):\n    return x", "rename f to g")):
        inputs = tokenizer(name, return_tensors="pt")
        settings = dict(max_new_tokens=24, do_sample=False)
        expected = model.generate(**inputs, **settings)
        assert larger.generate(**inputs, **settings).equal(expected)
        assert fast.generate(**inputs, **settings).equal(expected)


def test_norms_in_bf16_are_exact_at_powers_of_four() -> None:
    model = noisy(tiny("llama", torch.bfloat16))
    larger = stretched(model, layers=2, hidden=128)
    assert larger.dtype == torch.bfloat16
    assert larger.model.norm.weight[:32].equal(model.model.norm.weight / 2)
    assert isinstance(larger.stretch.same_text, bool) and larger.stretch.difference < 0.25


def test_rotation_is_that_of_the_original_in_its_dtype() -> None:
    """A model that was moved to bf16 after loading has rounded frequencies."""
    model = tiny("llama", torch.bfloat16)
    larger = stretched(model, layers=2, hidden=64)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    assert larger.model.rotary_emb.inv_freq.equal(model.model.rotary_emb.inv_freq)


def test_sizes_of_nano() -> None:
    model, _ = load("nano")
    with torch.device("meta"):
        for name, (layers, hidden) in SIZES["nano"].items():
            config = copy.deepcopy(model.config)
            stretching._enlarge(config, LayerMap(6, layers), hidden)
            weights = AutoModelForCausalLM.from_config(config).num_parameters()
            assert weights == pytest.approx(float(name.removesuffix("B")) * 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("layers", "hidden", "message"),
    [
        (1, 64, "layers=1 must be at least 2"),
        (2, 31, "hidden=31 must be at least 32, the model's own width: the nearest is 32"),
        (2, 72, "hidden=72 would leave part of a key-value head: the nearest widths are 64 and 80"),
    ],
)
def test_sizes_below_the_original_or_with_parts_of_heads_are_refused(layers: int, hidden: int, message: str) -> None:
    with pytest.raises(Refused, match=message):
        stretched(tiny("llama"), layers=layers, hidden=hidden)
    if "nearest widths" in message:
        for near in (64, 80):
            assert stretched(tiny("llama"), layers=2, hidden=near).config.hidden_size == near


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "gpt2", "phi3"])
def test_other_families_are_refused(family: str) -> None:
    with pytest.raises(Refused, match=f"of type '{family}' cannot be stretched: give a language model of type llama"):
        stretched(tiny(family, torch.float32), layers=4, hidden=64)


def test_changed_modules_and_quantised_weights_are_refused() -> None:
    model: Any = copy.deepcopy(tiny("llama", torch.float32))
    model.model.layers[0].mlp.up_proj.extra = nn.Linear(2, 2)
    with pytest.raises(Refused, match=r"with changed modules .*up_proj.extra"):
        stretched(model, layers=2, hidden=64)
    model = truedraft.accelerate(copy.deepcopy(tiny("llama", torch.float32)), quantize="int8").model
    with pytest.raises(Refused, match="stretch the model first"):
        stretched(model, layers=2, hidden=64)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([1, 2], r"prompts has shape \(2,\)"), ([[]], "prompts has shape"), ([[61]], "ids from 0 to 60")],
)
def test_prompts_that_are_no_ids_are_refused(prompts: list[Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        stretched(tiny("llama"), layers=2, hidden=64, prompts=torch.tensor(prompts, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_text_is_refused_in_fp32_and_reported_in_bf16(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretching, "padded_norm", lambda weight, hidden: 0.7 * padded_norm(weight, hidden))
    model = noisy(tiny("llama", dtype))
    if dtype == torch.float32:
        with pytest.raises(Refused, match="hidden=64, layers=3: the stretched model chooses other tokens"):
            stretched(model, layers=3, hidden=64)
    else:
        larger = stretched(model, layers=3, hidden=64, prompts=ids(4, 3))
        assert not larger.stretch.same_text and larger.stretch.difference > 0.01


class Head(nn.Module):
    """A head: two vectors normalised and fused, a decoder block, a residual block as Medusa's, a reduced vocabulary."""

    def __init__(self, config: LlamaConfig, vocabulary: int = 23) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm_before = LlamaRMSNorm(2 * width, config.rms_norm_eps)
        self.fuse = nn.Linear(2 * width, width)
        self.block = LlamaDecoderLayer(config, 0)
        self.residual = nn.Linear(width, width)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fuse(self.norm_before(torch.cat((embeddings, features), -1)))
        positions = torch.arange(x.shape[1])[None]
        x = self.block(x, position_embeddings=self.rotary(x, positions))
        x = x + nn.functional.silu(self.residual(x))
        return x, self.lm_head(self.norm(x))


@torch.no_grad()
def test_a_head_stretched_by_the_helpers_computes_the_same() -> None:
    config = LlamaConfig(**{**tiny("llama").config.to_dict(), "rms_norm_eps": 0.1, "attn_implementation": "eager"})
    larger = copy.deepcopy(config)
    stretching._enlarge(larger, LayerMap(2, 2), 96)
    assert larger.rms_norm_eps == pytest.approx(padded_epsilon(0.1, 32, 96))
    torch.manual_seed(0)
    small, large = noisy(Head(config)), Head(larger)
    own, weights = small.state_dict(), {}
    for name, empty in large.state_dict().items():
        parts = 2 if name.startswith(("fuse.weight", "norm_before")) else 1
        if name.endswith("bias"):
            weights[name] = padded_bias(own[name], *empty.shape)
        elif empty.ndim == 1:
            weights[name] = padded_norm(own[name], *empty.shape, parts)
        else:
            weights[name] = padded_weight(own[name], *empty.shape, parts)
    large.load_state_dict(weights)
    embeddings, features = torch.randn(2, 3, 11, 32)
    expected, scores = small(embeddings, features)
    found, larger_scores = large(stretched_features(embeddings, 96), stretched_features(features, 96))
    torch.testing.assert_close(found, stretched_features(expected, 96))
    torch.testing.assert_close(larger_scores, scores)
    both = torch.cat((embeddings, features), -1)
    assert stretched_features(both, 192, parts=2)[..., 96:128].equal(features)


def learned(name: str, model: PreTrainedModel, **record: Any) -> nn.Module:
    """A random head of a method, whose norms and biases are not those of a new module."""
    kind: Any = registry.method("drafters", name)
    learner = kind.learner(**({"rank": 12, "blocks": 2} if name == "medusa" else {}))
    learner.begin(model)
    head = learner.module
    if record:
        head = kind.rebuilt({**head.record(), **record}, model)
    return noisy(head.to(model.dtype))


HEADS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle3", {}),
    ("eagle3", dict(fuse_norm="each", blocks=2, norm_output=True, embeddings=True)),
    ("eagle3", dict(fuse_norm="whole", fuse_bias=True, head_norms=True, norm_before_residual=True)),
    ("medusa", {}),
    ("s3d", {}),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "record"), HEADS)
@pytest.mark.parametrize("hidden", [64, 96])
def test_a_stretched_head_drafts_the_same_trees(name: str, record: dict[str, Any], hidden: int) -> None:
    """In fp64, with the probabilities of the head as confidence, at every pass of a text of the original."""
    model = noisy(tiny("llama"))
    larger = stretched(model, layers=4, hidden=hidden)
    head = learned(name, model, **record)
    kind: Any = registry.method("drafters", name)
    same = larger.stretch.head(head, lambda record: kind.rebuilt(record, larger))
    assert sum(p.numel() for p in same.parameters()) >= 2 * sum(p.numel() for p in head.parameters())
    found = []
    for of, module in ((model, head), (larger, same)):
        draft = registry.load("drafters", name, model=module)
        drafted: list[Any] = []
        propose = draft.propose
        draft.propose = lambda *args, propose=propose, to=drafted: to.extend(trees := propose(*args)) or trees  # type: ignore[func-returns-value]
        fast = truedraft.accelerate(of, draft=draft, control="fixed")
        fast.generate(ids(1, 7), max_new_tokens=12, do_sample=False)
        found.append(drafted)
    small, large = found
    assert len(small) > 5 and max(len(tree) for tree in small) > 5
    for one, other in zip(small, large, strict=True):
        assert (one.tokens, one.parent) == (other.tokens, other.parent)
        torch.testing.assert_close(one.confidence, other.confidence, rtol=1e-6, atol=1e-9)


def test_a_checkpoint_is_stretched_with_its_target(tmp_path: Path) -> None:
    """A head in bf16 that was trained for the original, by the folder's name alone."""
    model = tiny("llama", torch.float32)
    head: Any = learned("eagle3", model)
    save_learnt(tmp_path, "eagle3", head, model, head.record(), torch.bfloat16)
    larger = stretched(model, layers=4, hidden=64)
    draft = registry.load("drafters", f"eagle3:{tmp_path}")
    fast = truedraft.accelerate(larger, draft=draft)
    out = fast.generate(ids(1, 7), max_new_tokens=12, do_sample=False)
    assert out.equal(model.generate(ids(1, 7), max_new_tokens=12, do_sample=False))
    found = draft.head.fc.weight
    assert found.shape == (64, 3 * 64) and found[:32, :32].equal(head.fc.weight[:, :32].bfloat16().float())
    assert draft.head.layers == tuple(larger.stretch.layers[k] for k in head.layers)


def test_a_head_of_another_width_is_refused() -> None:
    model = tiny("llama", torch.float32)
    head: Any = learned("eagle3", model)
    head._record = {**head.record(), "layer": {**head.record()["layer"], "hidden_size": 40}}
    with pytest.raises(Refused, match="a head of hidden size 40 cannot be stretched"):
        stretched(model, layers=4, hidden=64).stretch.head(head, lambda record: head)


def test_sizes_by_name() -> None:
    assert size_of("0.5B", "nano") == (42, 1024) and size_of("24x896", "folder") == (24, 896)
    with pytest.raises(Refused, match=r"--stretched 0\.5B: give LAYERSxHIDDEN, as in 24x1024"):
        size_of("0.5B", "folder")
    with pytest.raises(Refused, match=r"--stretched big: give 0\.1B or 0\.5B or LAYERSxHIDDEN"):
        size_of("big", "nano")


@pytest.mark.parametrize("quantize", [pytest.param(None, marks=pytest.mark.slow), "int8"])
def test_bench_names_the_size_in_its_figures(
    quantize: str | None, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("one day, a little girl")
    few = ["--prompts", str(tmp_path / "p.txt"), "--draft", "auto", "--rounds", "1", "--max-new-tokens", "6"]
    few += ["--no-baselines", "--stretched", "7x320"] + ([] if quantize is None else ["--quantize", quantize])
    assert main(["bench", "nano", *few, "--json", "--html", str(tmp_path / "page.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "nano stretched to 7x320"
    assert all(f["differs"] is None for f in found["figures"])
    assert "nano stretched to 7x320" in (tmp_path / "page.html").read_text()
    if quantize is None:
        assert main(["bench", "nano", *few]) == 0
        assert capsys.readouterr().out.startswith("nano stretched to 7x320\n")


def test_stretched_is_refused_beside_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--replay", "x", "--stretched", "0.5B"]) == 2
    assert "--stretched has no meaning together with --replay" in capsys.readouterr().err
