"""Fewer experts per token: a pass under the view is one of a model whose routers give a token no more."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import truedraft
from models import ARCHITECTURES, RECURRENT, ragged, tiny
from nets import RULES, text_net
from remote_code import ReluMixture, relu_routed
from test_views import (
    COMPILED,
    LAYERS,
    RUNTIMES,
    check_against_lighter,
    check_same_bits,
    check_unaffected,
    cut,
    target_of,
)
from truedraft import DraftTree, Refused, registry
from truedraft.runtime.forward import ForwardPass
from truedraft.runtime.programs import PROGRAMS
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.hosting import hosted
from truedraft.views._base import Experts, Reduction
from truedraft.views._together import Together
from truedraft.views.fewer_experts import FewerExperts
from truedraft.views.skip_layers import SkipLayers

ONE = FewerExperts(1)
COUNTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")  # of experts per token, in configurations
MIXED = [
    name for name, config in ARCHITECTURES.items()
    if max((config.get(count) or 0 for count in COUNTS), default=0) > 1 and name not in RECURRENT
]  # fmt: skip
OWN = {"phimoe", "llama4_text", "gemma4_moe"}  # phimoe: two experts per token, and no other number


def with_one(model: PreTrainedModel) -> Any:
    """The same model, made from a configuration with one expert per token."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    for count in COUNTS:
        if hasattr(text, count):
            setattr(text, count, 1)
    made = type(model)._from_config(config).to(model.dtype).eval()
    made.load_state_dict(model.state_dict())
    return made


CASES = [
    *(pytest.param(name, "auto", marks=COMPILED) for name in MIXED if name in PROGRAMS and name != "phimoe"),
    *((name, "stock") for name in MIXED if name not in OWN), ("qwen3_moe", "graphs"),
]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize(("architecture", "runtime"), CASES)
def test_the_logits_are_those_of_a_model_with_one_expert_per_token(architecture: str, runtime: str) -> None:
    model = tiny(architecture, torch.float32)
    check_against_lighter(target_of(model, runtime), ONE, with_one(model), 2e-4)


@pytest.mark.parametrize("architecture", sorted(OWN))
def test_own_forwards_whose_routers_are_of_another_kind_are_refused(architecture: str) -> None:
    with pytest.raises(Refused, match="cannot be fewer"):
        DecoderTarget(tiny(architecture, torch.float32), "stock").check_view(ONE)


@COMPILED
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_a_node_has_the_same_bits_however_it_is_scored(architecture: str) -> None:
    check_same_bits(tiny(architecture, torch.float32), ONE)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_whole_model_is_not_affected(runtime: str) -> None:
    check_unaffected(tiny("qwen2_moe", torch.float32), runtime, ONE)


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_beside_skipped_layers(runtime: str) -> None:
    model = tiny("mixtral", torch.float32, layers=LAYERS)
    view = Together((ONE, SkipLayers("1")))
    check_against_lighter(target_of(model, runtime), view, cut(with_one(model), (1,)), 2e-4, (1,))


def test_several_limits_are_the_lowest_of_them() -> None:
    both = Together((FewerExperts(4, least=0.1), FewerExperts(2))).reduction(3)
    assert both == Reduction(experts=Experts(2, 0.1))


def test_the_share_counts_the_experts_of_a_token() -> None:
    model: Any = tiny("mixtral", torch.float32)
    numbers = {name: p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name}
    experts = sum(n for name, n in numbers.items() if ".experts." in name)
    rest = sum(numbers.values()) - experts
    target = DecoderTarget(model)  # two of four experts
    assert target.share(ONE) == pytest.approx((rest + experts / 4) / (rest + experts / 2))
    layer = sum(n for name, n in numbers.items() if ".layers.1." in name and ".experts." not in name)
    assert target.share(SkipLayers("1")) == pytest.approx(1 - (layer + experts / 4) / (rest + experts / 2))


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_refusals(runtime: str) -> None:
    for model, view, why in (
        (tiny("llama", torch.float32), ONE, "LlamaForCausalLM has no mixture of experts"),
        (
            tiny("mixtral", torch.float32),
            FewerExperts(2),
            "the routers of MixtralForCausalLM give a token 2",
        ),
        (tiny("mixtral", torch.float32), FewerExperts(1, least=0.5), "do not end in a ReLU"),
    ):
        with pytest.raises(Refused, match=why):
            DecoderTarget(model, runtime).check_view(view)


def test_hooks_of_routers_are_refused() -> None:
    model: Any = copy.deepcopy(tiny("mixtral", torch.float32))
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: None)
    with pytest.raises(Refused, match="hooks or replaced forwards"):
        DecoderTarget(model, "stock").check_view(ONE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_a_text_drafted_with_one_expert_is_that_of_model_generate(runtime: str, rule: str) -> None:
    model = tiny("qwen3_moe", torch.float32)
    report = text_net(model, "fewer-experts", ragged(model, 3), runtime=runtime, max_new_tokens=24, **RULES[rule])
    assert report.passes


# ------------------------------------------------------------------ routers that end in a ReLU, of remote code


def fewest(model: PreTrainedModel, most: int, least: float = 0.0) -> Any:
    """The same model with the strongest experts of each token alone, one by one in plain torch."""
    made: Any = copy.deepcopy(model)
    for layer in made.model.layers:
        layer.mlp = OneByOne(layer.mlp, most, least)
    return made


class OneByOne(nn.Module):
    def __init__(self, of: Any, most: int, least: float):
        super().__init__()
        self.of, self.most, self.least = of, most, least

    def forward(self, x: Tensor) -> Tensor:
        of, out = self.of, torch.zeros_like(x)
        count, hidden = of.experts_in_all, x.shape[-1]
        ups = of.up_proj.reshape(count, -1, hidden)
        downs = of.down_proj if not of.joined else of.down_proj.reshape(hidden, count, -1).transpose(0, 1)
        weights = of.router_norm(torch.relu(of.router_proj(x)))
        for row, token in ((r, t) for r in range(x.shape[0]) for t in range(x.shape[1])):
            sizes = weights[row, token].abs().tolist()
            best = sorted(range(count), key=sizes.__getitem__, reverse=True)[: self.most]
            for e in best:
                if sizes[e] > 0 and sizes[e] >= self.least * max(sizes):
                    inner = torch.nn.functional.silu(ups[e] @ x[row, token])
                    out[row, token] += weights[row, token, e] * (downs[e] @ inner)
        return out


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(("most", "least"), [(1, 0.0), (3, 0.0), (12, 0.4)])
def test_the_logits_are_those_of_the_strongest_experts(most: int, least: float, joined: bool) -> None:
    model = relu_routed(joined=joined)
    check_against_lighter(DecoderTarget(model), FewerExperts(most, least), fewest(model, most, least), 1e-6)


def test_a_relu_routed_model_is_hosted_by_its_own_forward() -> None:
    model = relu_routed(torch.float32)
    target = hosted(model)
    assert isinstance(target.runner, ForwardPass) and "not a class of transformers" in (target.fallback_reason or "")
    active = (torch.relu(model.model.layers[0].mlp.router_proj(torch.randn(99, 32))) > 0).sum(-1)
    assert active.min() < active.max(), "tokens have different numbers of experts"
    check_unaffected(model, "auto", FewerExperts(2))


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["oracle", "token-recycling", "fewer-experts", "blockffn"])
def test_texts_of_a_relu_routed_model_are_those_of_model_generate(name: str, rule: str) -> None:
    model = relu_routed()
    text_net(model, name, ragged(model, 3), max_new_tokens=24, **RULES[rule])


def test_experts_of_no_token_are_not_read() -> None:
    model = copy.deepcopy(relu_routed())
    target = DecoderTarget(model)
    view = FewerExperts(2)
    numbers = {name: p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name}
    experts = sum(n for name, n in numbers.items() if name.endswith(("up_proj", "down_proj")))
    assert target.share(view) == pytest.approx(1 - experts * (1 - 2 / 12) / sum(numbers.values()))
    mixture: Any = model.model.layers[0].mlp
    x = torch.randn(1, 1, 32, dtype=torch.float64)
    idle = mixture.router_norm(torch.relu(mixture.router_proj(x)))[0, 0].argsort()[:10]
    with torch.no_grad():
        mixture.up_proj[idle] = torch.nan
        target.check_view(view)
        with target.runner._under(view, [DraftTree.chain(0)]):
            assert mixture(x).isfinite().all()
        assert mixture(x).isnan().any()


class Doubled(ReluMixture):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_mixtures_that_do_more_are_refused() -> None:
    model: Any = copy.deepcopy(relu_routed())
    model.model.layers[1].mlp.__class__ = Doubled
    with pytest.raises(Refused, match="more than add them by their router weights"):
        DecoderTarget(model).check_view(ONE)


def test_the_approximation_alone_is_the_model_with_one_expert() -> None:
    model = tiny("qwen3_moe", torch.float32)
    prompt = torch.tensor([[5]])
    lossy = truedraft.accelerate(model, view="lossy/fewer-experts", draft=None)
    expected = with_one(model).generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(lossy.generate(prompt, max_new_tokens=20, do_sample=False), expected)
    assert lossy.report().guarantee == "none"
    assert registry.load("views", "blockffn").name == "blockffn"
