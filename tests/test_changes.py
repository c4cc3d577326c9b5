"""A model that is changed between calls: the next output is the changed model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import truedraft
from models import V, ragged, sibling, tiny
from truedraft import Refused
from truedraft.runtime.fingerprint import fingerprint
from truedraft.runtime.native import OpKind

GREEDY: dict[str, Any] = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)
SINGLE = torch.tensor([[3, 4, 5, 6, 3, 4, 5]])


def fresh(architecture: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(tiny(architecture, dtype))


class _Norm(nn.Module):
    """Has the attributes of a Llama norm, and computes something else."""

    def __init__(self, norm: Any):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().amax(-1, keepdim=True) + 1e-3)


def _norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = _Norm(model.model.layers[1].input_layernorm)


def _activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _embedding(model: Any) -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 3.0 + 0.5

    model.model.embed_tokens.__class__ = Scaled


def _mlp(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Doubled", (type(mlp),), {"forward": lambda self, x: -2 * type(mlp).__base__.forward(self, x)})


def _attention(model: Any) -> None:
    kind = type(model.model.layers[0].self_attn)

    class Negated(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(*args, **kwargs)
            return -out, weights

    model.model.layers[0].self_attn.__class__ = Negated


def _adapter(model: Any) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Embedding):
            super().__init__()
            self.base, self.weight = base, base.weight
            self.add = nn.Parameter(torch.randn(base.embedding_dim, generator=torch.Generator().manual_seed(1)))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.base(ids) + self.add

    model.model.embed_tokens = Adapted(model.model.embed_tokens)


def _depth(model: Any) -> None:
    model.config.num_hidden_layers = 1


def _fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def _eps(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 5.0


def _scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 7.0


def _heads_dim(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(4.0)


def _rotary_scaling(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.7


def _transposed(model: Any) -> None:
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight.data.t())


def _viewed(model: Any) -> None:
    """Another matrix that begins where the first does."""
    table = torch.randn(2 * V, 32, generator=torch.Generator().manual_seed(2)) * 3
    table[::2] = model.lm_head.weight.data
    model.lm_head.weight = nn.Parameter(table[::2])
    model.lm_head.weight.data = table[1::2]


def _same_address(model: Any) -> None:
    """Columns of a wider matrix whose memory begins where the old one's did."""
    down = model.model.layers[0].mlp.down_proj
    wide = torch.randn(32, 2 * 48, generator=torch.Generator().manual_seed(2)) * 3
    down.weight = nn.Parameter(wide[:, :48])


def _head(model: Any) -> None:
    model.lm_head = nn.Linear(32, V, bias=True)


def _in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.3)


def _sliced_head(model: Any) -> None:
    """The same memory, fewer rows."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data[: V - 20])
    model.resize_token_embeddings(V - 20)


def _forward_of_the_class(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: -type(mlp).forward(mlp, x)


def _untied(model: Any) -> None:
    model.to(torch.float64)


CHANGES: dict[str, Callable[[Any], None]] = {
    name.removeprefix("_"): change
    for name, change in list(globals().items())
    if name.startswith("_") and callable(change) and name not in ("_Norm",) and not name.startswith("__")
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("draft", [None, "auto"], ids=["plain", "auto"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_follows_the_changed_model(change: str, draft: str | None) -> None:
    model = fresh()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.clone())
    fast = truedraft.accelerate(model, draft=draft)
    first = fast.generate(SINGLE, **GREEDY)
    assert torch.equal(first, model.generate(SINGLE, **GREEDY))
    with torch.no_grad():
        CHANGES[change](model)
    for inputs in ({"input_ids": SINGLE}, ragged(model, 3)):
        inputs = {name: t.clamp_max(V - 21) for name, t in inputs.items()}
        assert torch.equal(fast.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))
    if change not in ("eps", "untied"):
        assert not torch.equal(first, model.generate(SINGLE, **GREEDY)), "the change has no effect"


def test_patches_of_a_class_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    fast = truedraft.accelerate(model)
    fast.generate(SINGLE, **GREEDY)
    kind = type(model.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: -own(self, x))
    assert torch.equal(fast.generate(SINGLE, **GREEDY), model.generate(SINGLE, **GREEDY))
    assert "forward is not supported" in fast.target.runtime
    monkeypatch.undo()
    assert torch.equal(fast.generate(SINGLE, **GREEDY), model.generate(SINGLE, **GREEDY))
    assert fast.target.runtime.startswith("compiled pass")


def test_a_changed_model_is_compared_again_and_strictness_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from truedraft.runtime.programs import PROGRAMS

    model = fresh()
    fast, strict = truedraft.accelerate(model), truedraft.accelerate(model, strict=True)
    wrong = copy.deepcopy(model)
    for parameter in wrong.parameters():
        parameter.data.mul_(1.5)
    own = PROGRAMS["llama"]
    monkeypatch.setitem(PROGRAMS, "llama", lambda p, m: own(p, wrong))
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.data.clone())
    assert torch.equal(fast.generate(SINGLE, **GREEDY), model.generate(SINGLE, **GREEDY))
    assert "did not reproduce" in fast.target.runtime
    with pytest.raises(Refused, match="strict=True needs the compiled pass"):
        strict.generate(SINGLE, **GREEDY)


def test_a_part_in_training_mode_is_refused() -> None:
    model = fresh("opt")
    fast = truedraft.accelerate(model)
    model.model.decoder.layers[1].train()
    with pytest.raises(Refused, match=r"training mode.*model.eval\(\)"):
        fast.generate(SINGLE, **GREEDY)
    model.eval()
    assert torch.equal(fast.generate(SINGLE, **GREEDY), model.generate(SINGLE, **GREEDY))


def test_a_changed_draft_model_stays_exact() -> None:
    model = fresh()
    small = copy.deepcopy(sibling(tiny("llama", torch.float32)))
    fast = truedraft.accelerate(model, draft=small, control="fixed")
    expected = model.generate(SINGLE, **GREEDY)
    assert torch.equal(fast.generate(SINGLE, **GREEDY), expected)
    before = fast.report().mean_acceptance_length
    small.load_state_dict({name: torch.zeros_like(t) for name, t in small.state_dict().items()}, assign=True)
    assert torch.equal(fast.generate(SINGLE, **GREEDY), expected)
    assert fast.report().mean_acceptance_length < before
    small.model.layers = small.model.layers[:1]
    small.config.num_hidden_layers = 1
    assert torch.equal(fast.generate(SINGLE, **GREEDY), expected)


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_weights_changed_in_place_need_no_new_comparison(runtime: str) -> None:
    model = fresh()
    fast = truedraft.accelerate(model, runtime=runtime)
    fast.generate(SINGLE, **GREEDY)
    target = fast.target
    with torch.no_grad():
        model.load_state_dict({name: 1.1 * t for name, t in model.state_dict().items()})
    assert torch.equal(fast.generate(SINGLE, **GREEDY), model.generate(SINGLE, **GREEDY))
    assert fast.target is target


@pytest.mark.parametrize(("name", "vocabulary"), [("draft-model", V), ("suffix", V - 20), ("token-recycling", V - 20)])
def test_a_drafter_shared_with_another_model_stays_exact(name: str, vocabulary: int) -> None:
    model, other = tiny("llama", torch.float32), tiny("qwen2", torch.float32, vocabulary=vocabulary)
    drafter = truedraft.registry.load("drafters", name, **({"model": sibling(model)} if name == "draft-model" else {}))
    fast, second = truedraft.accelerate(model, draft=drafter), truedraft.accelerate(other, draft=drafter)
    given = SINGLE
    for _ in range(2):
        assert torch.equal(fast.generate(given, **GREEDY), model.generate(given, **GREEDY))
        assert torch.equal(second.generate(given, **GREEDY), other.generate(given, **GREEDY))


def test_scales_of_quantised_weights_are_reread() -> None:
    pytest.importorskip("torchao")
    for dtype, bits in ((torch.bfloat16, "int4"), (torch.float32, "int8")):
        model = _wide(dtype)
        fast = truedraft.accelerate(model, quantize=bits)
        fast.generate(SINGLE, **GREEDY)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if hasattr(parameter, "qdata") and "q_proj" in name:
                    parameter.scale.mul_(-3.0)
        plain = truedraft.accelerate(copy.deepcopy(model), draft=None)
        assert torch.equal(fast.generate(SINGLE, **GREEDY), plain.generate(SINGLE, **GREEDY))


def _wide(dtype: torch.dtype) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=V, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=128, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(3.0)
    return model.to(dtype)


@pytest.mark.parametrize("runtime", ["auto", "in-place"])
def test_memory_that_a_pass_reads_is_kept_alive(runtime: str) -> None:
    """Another thread may reassign parameters while a pass is running."""
    model = fresh()
    target = truedraft.accelerate(model, draft=None, runtime=runtime).target
    kept = {t.data_ptr() for t in target.runner.program.kept}
    kinds = (OpKind.EMBED, OpKind.LINEAR, OpKind.GATED)
    pointers = {pointer for op in target.runner.program.ops if op.kind in kinds for pointer in (op.weight, op.second)}
    pointers -= {None}
    assert len(pointers) > 7 and pointers <= kept
    for parameter in model.parameters():
        parameter.data = torch.zeros(1)
    assert pointers <= {t.data_ptr() for t in target.runner.program.kept if t.untyped_storage().nbytes()}


def test_fingerprints_are_stable_where_nothing_changes() -> None:
    for architecture in ("llama", "gemma3_text", "gpt2", "mixtral", "opt", "qwen2_vl_text"):
        model = fresh(architecture)
        before = fingerprint(model)
        model.generate(SINGLE, **GREEDY)
        model(SINGLE, output_hidden_states=True)
        model.train()
        model.eval()
        assert fingerprint(model) == before
