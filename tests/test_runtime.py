"""The compiled pass: the same bits at any width, in any batch, with any number of threads; when it is not used."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FalconConfig, PreTrainedModel

import truedraft
from models import ARCHITECTURES, BY_TOKEN, COMPILED_ALONE, RECURRENT, ROUGH, VARIANTS, V, ragged, tapped, tiny
from truedraft import DraftTree, Refused
from truedraft.chains import chained
from truedraft.errors import NoRoom
from truedraft.runtime import native, panels
from truedraft.runtime.processors import processor
from truedraft.runtime.programs import PROGRAMS
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.hostable import keeps_states
from truedraft.targets.recurrent import RecurrentTarget
from truedraft.tree import Prompt, Taps
from whole import Whole

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
DTYPES = [torch.float32, torch.bfloat16]
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
SEEDS = {
    "afmoe": 0,
    "kolibri1": 0,
    "gemma4_moe": 4,
    "lfm2_moe": 0,
    "qwen3_next": 0,
}  # with these, and 11 no router is within two bf16 steps of a tie, where rounding would choose the expert
SHORT = {"mamba", "falcon_mamba", "mamba2", "rwkv"}  # their forward gives no hidden states before the first layer
EVERY = pytest.mark.parametrize("architecture", [*PROGRAMS, *sorted(VARIANTS)])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def target_of(architecture: str, dtype: torch.dtype, runtime: str = "auto") -> DecoderTarget:
    """With compiled passes for prompts of all lengths."""
    target = made(tiny(architecture, dtype), runtime, strict=True)
    assert target.fallback_reason is None
    return target


def made(model: PreTrainedModel, runtime: str, strict: bool) -> Any:
    if runtime == "stock" and model.config.model_type in COMPILED_ALONE:
        return Whole(model)
    return (RecurrentTarget if keeps_states(model.config) else DecoderTarget)(model, runtime, strict)


def scorable(target: DecoderTarget, trees: list[DraftTree]) -> list[DraftTree]:
    """Trees, or chains of them where all runtimes are to score the same and one scores chains only."""
    return trees if type(target) is DecoderTarget else [chained(tree) for tree in trees]


def words(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(V) for _ in range(n)]


def random_tree(rng: random.Random, root: int, nodes: int) -> DraftTree:
    parents = tuple([-1] + [rng.randrange(max(0, i - 4), i) for i in range(1, nodes)])
    return DraftTree((root, *words(rng, nodes - 1)), parents)


def leaves(tree: DraftTree) -> list[int]:
    """Nodes without children; the paths to them pass over every node."""
    return [node for node, below in enumerate(tree.shape.children) if not below]


def one_by_one(target: DecoderTarget, tokens: list[int]) -> Tensor:
    """The logits after each token, each scored in a pass of its own; (n, V)."""
    target.reserve(1, 64)
    emitted = [target.prefill([Prompt(torch.tensor(tokens[:1]))]).logits[0]]
    target.commit([[0]])
    for token in tokens[1:]:
        emitted.append(target.score([DraftTree.chain(token)]).logits[0])
        target.commit([[0]])
    return torch.cat(emitted)


@pytest.mark.covering(1)
@EVERY
@BOTH
def test_a_node_has_the_same_bits_however_it_is_scored(architecture: str, dtype: torch.dtype) -> None:
    """Alone, in a chain, in a tree, beside other rows, and as a part of a prompt: no tolerance."""
    assert_same_bits(target_of(architecture, dtype), seeds=2)


def assert_same_bits(target: DecoderTarget, seeds: int) -> None:
    for seed in range(seeds):
        rng = random.Random(seed)
        prompts = [words(rng, n) for n in (3, 17, 1, 26)]
        trees = [random_tree(rng, prompt[-1], n) for prompt, n in zip(prompts, (12, 1, 20, 5), strict=True)]
        target.reserve(4, 64)
        first = target.prefill([Prompt(torch.tensor(p)) for p in prompts]).logits[:, 0]
        together = target.score(trees).logits
        for row, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
            for leaf in leaves(tree):
                path = list(tree.path(leaf))
                alone = one_by_one(target, prompt[:-1] + [tree.tokens[i] for i in path])[-len(path) :]
                assert torch.equal(alone[0], first[row])
                assert torch.equal(alone, together[row, path]), (seed, row, leaf)


@pytest.mark.covering(1)
@EVERY
@BOTH
def test_a_committed_path_leaves_the_same_bits_behind(architecture: str, dtype: torch.dtype) -> None:
    target, rng = target_of(architecture, dtype), random.Random(5)
    prompt = words(rng, 6)
    tree = random_tree(rng, prompt[-1], 14)
    path = tree.path(13)
    target.reserve(1, 64)
    target.prefill([Prompt(torch.tensor(prompt))])
    target.score([tree])
    target.commit([path])
    after = target.score([DraftTree.chain(9, [8, 7])]).logits[0]
    target.cache = None
    whole = prompt[:-1] + [tree.tokens[i] for i in path] + [9, 8, 7]
    assert torch.equal(one_by_one(target, whole)[-3:], after)


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize(
    ("architecture", "lengths"),
    [
        ("qwen3", (40, 7)), ("qwen2_moe", (120, 90)), ("deepseek_v3", (90, 7)), ("llama4_text", (120, 90)),
        ("gemma3n_text", (40, 7)), ("bloom", (40, 7)), ("zamba", (40, 7)), ("recurrent_gemma", (40, 7)),
        ("rwkv", (40, 7)),
    ],
)  # fmt: skip
def test_threads_and_splits_of_the_prompt_change_no_bit(
    architecture: str, lengths: tuple[int, ...], dtype: torch.dtype, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more nodes at one expert than a product processes together, and in short prompts with a single one."""
    rng = random.Random(1)
    prompts = [Prompt(torch.tensor(words(rng, n))) for n in lengths]
    tree = random_tree(rng, 3, 19)
    seen = []
    for count, part in ((1, 512), (2, 512), (3, 11), (5, 1 if max(lengths) < 90 else 23)):
        torch.set_num_threads(count)
        monkeypatch.setattr("truedraft.runtime.nodes.PROMPT", part)
        target = target_of(architecture, dtype)
        target.taps = Taps(tapped(architecture, 0, 1, -1))
        target.reserve(2, 160)
        read, scored = target.prefill(prompts), target.score([tree, tree])
        hidden = [state for s in (read, scored) for states in s.hidden.values() for state in states]
        seen.append([read.logits, scored.logits, *hidden])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.covering(1)
@EVERY
@BOTH
def test_logits_are_those_of_the_forward_up_to_rounding(architecture: str, dtype: torch.dtype) -> None:
    rng = random.Random(SEEDS.get(architecture, 11))
    prompts = [Prompt(torch.tensor(words(rng, n))) for n in (23, 4)]
    trees = [random_tree(rng, 3, 9), random_tree(rng, 4, 6)]
    results = []
    for runtime in ("auto", "stock"):
        target = target_of(architecture, dtype, runtime)
        target.taps = Taps((0, 1) if architecture in SHORT else tapped(architecture, 0, 1, 2))
        target.reserve(2, 64)
        read, drafts = target.prefill(prompts), scorable(target, trees)
        scored = target.score(drafts)
        results.append([read.logits, *(row[: len(tree)] for row, tree in zip(scored.logits, drafts, strict=True))])
        results[-1] += [state for s in (read, scored) for states in s.hidden.values() for state in states]
    tolerance = 2e-5 if dtype == torch.float32 else ROUGH.get(architecture, 0.1)
    for compiled, stock in zip(*results, strict=True):
        assert compiled.shape == stock.shape
        assert (compiled.float() - stock.float()).abs().max() < tolerance * stock.float().std()


@EVERY
def test_norms_and_biases_are_those_of_the_model(architecture: str) -> None:
    """New models have ones and zeros there, which would hide that another one is read, or none."""
    model, g = tiny.__wrapped__(architecture, torch.float32), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, small in (*model.named_parameters(), *model.named_buffers()):
            if (small.ndim == 1 or name.endswith("bias")) and small.is_floating_point() and "inv_freq" not in name:
                small += 0.3 * torch.randn(small.shape, generator=g)
    rng, found = random.Random(2), []
    prompts = [Prompt(torch.tensor(words(rng, n))) for n in (19, 5)]
    for runtime in ("auto", "stock"):
        target = made(model, runtime, strict=runtime == "auto")
        target.reserve(2, 64)
        read = target.prefill(prompts).logits
        found.append([read, target.score(scorable(target, [random_tree(random.Random(3), 3, 9)] * 2)).logits])
    for compiled, stock in zip(*found, strict=True):
        assert (compiled - stock).abs().max() < 2e-5 * stock.std()


@pytest.mark.covering(1)
@EVERY
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "seeded"])
def test_text_is_that_of_model_generate(architecture: str, sample: bool) -> None:
    """Greedy after prompts of ids, sampled after prompts of embeddings where `generate` takes them."""
    model = tiny(architecture, torch.float32)
    fast = truedraft.accelerate(model, control="fixed")
    assert fast.target.fallback_reason is None
    given = dict(**ragged(model, 5), max_new_tokens=14, do_sample=sample, pad_token_id=0)  # beyond sliding windows
    if sample and architecture in BY_TOKEN:
        with pytest.raises(Refused, match="give input_ids"):
            fast.generate(inputs_embeds=model.get_input_embeddings()(given["input_ids"]), max_new_tokens=3)
    elif sample and "inputs_embeds" in inspect.signature(model.prepare_inputs_for_generation).parameters:
        given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
    torch.manual_seed(3)
    plain = model.generate(**given)
    torch.manual_seed(3)
    assert torch.equal(fast.generate(**given), plain)


@pytest.mark.parametrize("runtime", ["auto", "in-place"])
def test_changed_weights_are_used(runtime: str) -> None:
    """Changed in place, past torch's count of changes or replaced, the next call uses the new ones."""
    model = tiny.__wrapped__("llama", torch.float32)
    fast = truedraft.accelerate(model, runtime=runtime)
    given = dict(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    held = {t.data_ptr() for t in fast.target.runner.program.kept}  # type: ignore[union-attr]
    in_place = runtime == "in-place" or "avx512f" not in processor()
    assert ({p.data_ptr() for p in model.parameters() if p.ndim == 2} <= held) == in_place
    texts = [fast.generate(**given)]

    def check() -> None:
        texts.append(fast.generate(**given))
        assert torch.equal(texts[-1], model.generate(**given))

    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
        check()
        model.model.layers[0].mlp.up_proj.weight.data.mul_(-3)
        check()
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.model.norm.weight = torch.nn.Parameter(torch.rand_like(model.model.norm.weight))
        check()
    assert len({tuple(t[0].tolist()) for t in texts}) == 4


WIDE = pytest.mark.skipif("avx512f" not in processor(), reason="weights are copied on processors with AVX-512 alone")


@WIDE
def test_copies_are_shared_and_only_made_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.__wrapped__("qwen2", torch.bfloat16)
    one, other = (DecoderTarget(model).runner.copied for _ in range(2))  # type: ignore[union-attr]
    linear = [m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert one is other is not None and sum(linear) <= one.bytes < 1.5 * sum(linear)
    whole = sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr("truedraft.targets.decoder.free_memory", lambda device: 2 * whole)
    assert DecoderTarget(model).runner.copied is one  # type: ignore[union-attr]
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    assert DecoderTarget(model).runner.copied not in (one, None)  # type: ignore[union-attr]
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    monkeypatch.setattr("truedraft.targets.decoder.free_memory", lambda device: 2 * whole - 2)
    assert DecoderTarget(model).runner.copied is None  # type: ignore[union-attr]


@pytest.mark.parametrize("architecture", ["starcoder2", "gemma2"])
def test_norms_and_biases_changed_in_place_are_used(architecture: str) -> None:
    """They are copied and padded; the copies are refreshed."""
    model = tiny.__wrapped__(architecture, torch.float32)
    fast = truedraft.accelerate(model)
    given = dict(inputs=torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    texts = [fast.generate(**given)]
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:
                    p.add_(torch.randn_like(p))
        texts.append(fast.generate(**given))
        assert torch.equal(texts[-1], model.generate(**given))
    assert len({tuple(t[0].tolist()) for t in texts}) > 1


@WIDE
@pytest.mark.parametrize("architecture", ["llama", "persimmon", "qwen3_5_text"])
def test_copies_give_way_to_the_cache(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.__wrapped__(architecture, torch.float32)
    monkeypatch.setattr("truedraft.runtime.linears.SMALLEST", 0)
    fast = truedraft.accelerate(model)
    assert panels._OF_MODELS[model]
    kind = type(fast.target.runner)
    monkeypatch.setattr(
        "truedraft.targets.memory.free_memory", lambda device: 0 if model in panels._OF_MODELS else 2**40
    )
    given = dict(**ragged(model, 5), max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(fast.generate(**given), model.generate(**given))
    assert type(fast.target.runner) is kind and fast.target.runner.copied is None  # type: ignore[union-attr]
    assert "copied" not in fast.report().runtime
    monkeypatch.setattr("truedraft.targets.memory.free_memory", lambda device: 0)
    with pytest.raises(NoRoom):
        fast.generate(**given)


class _Adapted(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def _adapted() -> torch.nn.Module:
    model = tiny.__wrapped__("llama", torch.float32)
    model.model.layers[0].mlp.up_proj.__class__ = _Adapted
    return model


def _hooked() -> torch.nn.Module:
    model = tiny.__wrapped__("llama", torch.float32)
    model.model.layers[1].register_forward_hook(lambda module, given, result: result)
    return model


def _widened() -> torch.nn.Module:
    model = tiny.__wrapped__("llama", torch.float32)
    mlp, wider = model.model.layers[0].mlp, 64
    mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(32, wider, bias=False) for _ in range(2))
    mlp.down_proj = torch.nn.Linear(wider, 32, bias=False)
    return model


def _other_experts() -> torch.nn.Module:
    model = tiny.__wrapped__("mixtral", torch.float32)
    experts = model.model.layers[1].mlp.experts
    experts.__class__ = type("_Other", (type(experts),), {})
    return model


def _several_heads() -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(FalconConfig(**{**ARCHITECTURES["falcon"], "multi_query": False})).eval()


UNSUITED = {
    "no program": (lambda: tiny("persimmon", torch.float32), "no program for persimmon"),
    "dtype": (lambda: tiny("llama", torch.float64), "neither float32 nor bfloat16"),
    "an adapter": (_adapted, "_Adapted where a linear layer stood"),
    "experts of another kind": (_other_experts, "_Other among its experts"),
    "several heads of keys": (_several_heads, "several heads of keys"),
    "other sizes": (_widened, "not of the sizes"),
    "a hook": (_hooked, r"hooks or replaced forwards would not be run \(model.layers.1\)"),
}


@pytest.mark.parametrize("case", UNSUITED)
def test_unsupported_models_use_the_forward_and_strict_refuses_them(case: str) -> None:
    make, why = UNSUITED[case]
    model = make()
    fast = truedraft.accelerate(model)
    assert "transformers forward" in str(fast.target.runner.name)
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fast.generate(**prompt), model.generate(**prompt))
    with pytest.raises(Refused, match=f"strict=True needs the compiled pass.*{why}"):
        truedraft.accelerate(model, strict=True)


def test_a_head_wider_than_the_configured_vocabulary() -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    model.lm_head = torch.nn.Linear(32, V + 9, bias=True)
    model.lm_head.bias.data[V:] = -50.0  # these have no embedding
    fast = truedraft.accelerate(model)
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    ours, plain = fast.generate(**given).logits, model.generate(**given).logits
    assert fast.target.fallback_reason is None
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, plain, strict=True))


def test_a_hook_added_later_is_called() -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    fast = truedraft.accelerate(model)
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda module, given, result: calls.append(1))
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fast.generate(**given), model.generate(**given))
    assert len(calls) > 5


def test_strict_requires_the_compiled_pass() -> None:
    model = tiny("llama", torch.float32)
    assert truedraft.accelerate(model, strict=True).target.fallback_reason is None
    with pytest.raises(Refused, match="runtime='stock' was requested"):
        truedraft.accelerate(model, runtime="stock", strict=True)
    with pytest.raises(Refused, match="runtime='fast'"):
        truedraft.accelerate(model, runtime="fast")


def test_a_wrong_program_is_detected_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROGRAMS, "qwen3", lambda p, m: PROGRAMS["llama"](p, tiny("qwen2", torch.float32)))
    fast = truedraft.accelerate(tiny("qwen3", torch.float32))
    assert fast.target.fallback_reason and "did not reproduce" in fast.target.fallback_reason
    monkeypatch.setitem(PROGRAMS, "gpt2", PROGRAMS["llama"])
    fast = truedraft.accelerate(tiny("gpt2", torch.float32))
    assert fast.target.fallback_reason and "not those of a gpt2 model" in fast.target.fallback_reason


def test_values_out_of_range_raise_before_anything_is_written() -> None:
    target = target_of("llama", torch.float32)
    target.reserve(1, 8)
    with pytest.raises(IndexError, match="vocabulary"):
        target.prefill([Prompt(torch.tensor([1, V]))])
    target.reserve(1, 8)
    target.prefill([Prompt(torch.tensor([1, 2, 3]))])
    with pytest.raises(IndexError, match="outside the cache"):
        target.score([DraftTree.chain(1, range(2, 9))])


def test_every_architecture_with_a_program_is_tested() -> None:
    assert set(PROGRAMS) <= {*ARCHITECTURES, *RECURRENT}


@BOTH
@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_latents_of_a_prompt_read_by_the_forward_are_continued(architecture: str, dtype: torch.dtype) -> None:
    """The cache holds what the model's own forward keeps there."""
    target, rng = target_of(architecture, dtype), random.Random(2)
    prompts, scored = [Prompt(torch.tensor(words(rng, n))) for n in (13, 13)], []
    for read in (target.read, target.prefill):
        target.reserve(2, 64)
        read(prompts)
        scored.append(target.score([random_tree(random.Random(3), 3, 9)] * 2).logits.float())
        target.free()
    assert (scored[0] - scored[1]).abs().max() < (2e-5 if dtype == torch.float32 else 0.1) * scored[1].std()
