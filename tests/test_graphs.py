"""Captured passes: the logits and the text of the model's own forward, from graphs that read static buffers only.

Without a GPU, `make_fx` replaces graphs: it records operations on memory as a capture does (control flow in Python is
frozen, and reading a tensor's value is an error). Where only sizes matter, passes run uncaptured.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

import truedraft
from models import ARCHITECTURES, V, ragged, tapped, tiny
from nets import drafter, padding_of
from truedraft import DraftTree, Refused
from truedraft.runtime import graphs
from truedraft.runtime.curve import WIDTHS
from truedraft.runtime.graphs import CudaGraphs, GraphPass, Run, bucket
from truedraft.runtime.latency import LatencyProfile
from truedraft.runtime.padded import Padded
from truedraft.runtime.weights import NotCompilable
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.hosting import check_exact
from truedraft.tree import Prompt, Taps

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))
ON_BOTH = pytest.mark.parametrize("device", ["cpu", GPU])


def uncaptured(run: Run) -> Run:
    return run


def traced(run: Run) -> Run:
    return make_fx(lambda: run())()


def broken(run: Run) -> Run:
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


@pytest.fixture
def capture(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Run], Run]], None]:
    """Passes by graphs on either device: call it with the replacement of a capture on the CPU."""

    def choose(stand_in: Callable[[Run], Run]) -> None:
        def runner(target: DecoderTarget, _: str) -> Any:
            try:
                return GraphPass(target._stock(), stand_in), None
            except NotCompilable as why:
                return target._own_forward(), str(why)

        if device == "cpu":
            monkeypatch.setattr(DecoderTarget, "_runner", runner)

    return choose


def model_on(device: str, architecture: str = "llama") -> PreTrainedModel:
    model = tiny(architecture, torch.float32)
    return model if device == "cpu" else copy.deepcopy(model).to(device)


def target_of(
    architecture: str, stand_in: Callable[[Run], Run] = uncaptured, taps: Taps | None = None
) -> DecoderTarget:
    target = DecoderTarget(tiny(architecture, torch.float32), "stock")
    target.runner = GraphPass(target._stock(), stand_in)
    target.taps = taps or Taps()
    return target


def random_tree(rng: random.Random, nodes: int) -> DraftTree:
    parents = tuple([-1] + [rng.randrange(max(0, i - 4), i) for i in range(1, nodes)])
    return DraftTree(tuple(rng.randrange(V) for _ in range(nodes)), parents)


def prompts(device: str, *lengths: int) -> list[Prompt]:
    return [Prompt((torch.arange(n, device=device) * 7 + n) % V) for n in lengths]


TRACED = {"llama", "gemma2"}


@pytest.mark.covering(1)
@ON_BOTH
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_forward_over_many_steps(architecture: str, device: str, capture: Any) -> None:
    """Random trees; rows of different lengths that continue, leave and join; hidden states tapped."""
    capture(traced if architecture in TRACED else uncaptured)
    model, rng = model_on(device, architecture), random.Random(3)
    both = [DecoderTarget(model, "auto"), DecoderTarget(model, "stock")]
    both[1].runner, both[1].fallback_reason = both[1]._stock(), None
    layers = tapped(architecture, 0, 2, -1)
    for target in both:
        target.taps = Taps(layers)
        target.reserve(4, 100)
        target.prefill(prompts(device, 5, 21, 1))
    rows = 3
    for step in range(5):
        trees = [random_tree(rng, rng.randrange(5, 9)) for _ in range(rows)]
        captured, stock = (target.score(trees) for target in both)
        for row, tree in enumerate(trees):
            for mine, theirs in (
                (captured.logits[row, : len(tree)], stock.logits[row, : len(tree)]),
                *((captured.hidden[layer][row], stock.hidden[layer][row]) for layer in layers),
            ):
                assert mine.shape == theirs.shape
                assert (mine - theirs).abs().max() < 1e-5 * max(theirs.abs().max(), 1), (step, row)
        paths = [tree.path(rng.randrange(len(tree))) for tree in trees]
        for target in both:
            target.commit(paths)
            if step == 2:
                target.release(0)
            if step == 3:
                target.prefill(prompts(device, 11))
        rows += (step == 3) - (step == 2)
    assert isinstance(both[0].runner, GraphPass), both[0].fallback_reason
    assert both[0].cache is not None and both[1].cache is not None and both[0].cache.lengths == both[1].cache.lengths


@ON_BOTH
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("architecture", "name"), [("llama", "oracle"), ("mistral", "noise"), ("gemma2", "taps")])
def test_text_is_that_of_model_generate(architecture: str, name: str, sample: bool, device: str, capture: Any) -> None:
    capture(uncaptured)
    model = model_on(device, architecture)
    inputs = {k: v.to(device) for k, v in ragged(model, 3).items()}
    given = dict(**inputs, max_new_tokens=24, do_sample=sample, pad_token_id=0, eos_token_id=[11, 12])
    torch.manual_seed(3)
    plain = model.generate(**given)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    fast = truedraft.accelerate(model, draft=drafter(name, model, plain, padding_of(inputs)), control="fixed")
    for _ in range(2):  # the second call replays the graphs of the first
        torch.manual_seed(3)
        assert torch.equal(fast.generate(**given), plain)
        assert torch.equal(torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(), state)
    assert "captured" in fast.report().runtime


def test_sizes_come_in_buckets() -> None:
    assert [bucket(n) for n in (1, 2, 3, 5, 8, 9, 64, 65)] == [1, 2, 4, 8, 8, 16, 64, 128]
    assert [bucket(n, 6) for n in (1, 3, 5, 6)] == [1, 4, 6, 6]
    target = target_of("llama")
    target.reserve(3, 600)
    target.prefill(prompts("cpu", 254, 4, 9))
    target.score([DraftTree.chain(0)] * 3)
    target.score([DraftTree.chain(0, [1, 2, 3])] * 3)
    target.score([DraftTree.chain(0), DraftTree.chain(0, [1, 2]), DraftTree.chain(0)])
    target.release(0)
    target.score([DraftTree.chain(0, range(8))] * 2)
    sizes = list(target.runner._captured)
    assert sizes == [(3, 1, 256, (), False), (3, 4, 512, (), False), (3, 4, 256, (), False), (2, 16, 256, (), False)]
    assert target.cache is not None and target.cache.cursor.capacity == 768


def test_pass_costs_are_measured_on_captured_sizes() -> None:
    target = target_of("llama")
    measured = LatencyProfile(target).measure(100_000, None, WIDTHS[-1])
    assert measured is not None and measured.widths[-1] == 64
    assert len(target.runner._captured) == 7 and not target.cold
    target.reserve(1, 400)
    target.prefill(prompts("cpu", 5))
    for cold in (True, False):
        target.score([DraftTree.chain(3)])
        assert target.cold == cold


def test_a_full_row_is_scored_within_its_capacity() -> None:
    both = [target_of("llama"), DecoderTarget(tiny("llama", torch.float32), "stock")]
    tree = DraftTree((3, 4, 5, 6, 7), (-1, 0, 0, 1, 3))
    for target in both:
        target.reserve(1, 256)
        target.prefill(prompts("cpu", 252))
    captured, stock = (target.score([tree]).logits for target in both)
    assert torch.allclose(captured, stock, atol=1e-4)


def test_a_replay_reads_static_buffers_alone() -> None:
    """Two sizes in turn, each replayed with other inputs; the results of earlier passes are unchanged."""
    target = target_of("llama", traced)
    target.reserve(1, 64)
    target.prefill(prompts("cpu", 6))
    first = target.score([DraftTree.chain(3, [4])]).logits
    seen = first.clone()
    target.score([DraftTree.chain(3, [4, 5])])
    other = target.score([DraftTree.chain(8, [9])]).logits
    assert torch.equal(first, seen) and not torch.allclose(other, seen)
    captured = target.runner._captured[1, 2, 256, (), False]
    again = captured.run()[0].clone()
    captured.inputs.ids.fill_(5)
    assert torch.equal(again, other) and not torch.allclose(captured.run()[0], other)
    assert len(target.runner._captured) == 2


def test_graphs_outlive_a_call_but_not_their_cache() -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    target = DecoderTarget(model, "stock")
    target.runner = runner = GraphPass(target._stock(), uncaptured)

    def call(rows: int, capacity: int) -> int:
        before = list(runner._captured.values())
        target.reserve(rows, capacity)
        target.prefill(prompts("cpu", 5))
        target.score([DraftTree.chain(3)])
        target.cache = None
        return sum(any(made is old for old in before) for made in runner._captured.values())

    assert call(2, 100) == 0
    keys = runner._captured_cache.layers[0].keys
    assert call(1, 256) == 1 and runner._captured_cache.layers[0].keys is keys
    assert call(1, 257) == 0 and runner._captured_cache.layers[0].keys is not keys
    assert call(1, 300) == 1
    assert not target.changed
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    assert target.changed


def test_a_reused_cache_is_clean_and_one_in_use_is_not_reused() -> None:
    target = target_of("llama")
    target.reserve(1, 64)
    target.prefill(prompts("cpu", 5))
    target.score([DraftTree.chain(3)])
    first = target.cache
    target.reserve(1, 64)
    assert target.cache is not first
    target.prefill(prompts("cpu", 5))
    second = target.cache
    target.score([DraftTree.chain(3)])
    second.layers[0].keys.fill_(torch.nan)
    target.cache = None
    target.reserve(1, 64)
    target.prefill(prompts("cpu", 5))
    assert target.cache is second and not target.score([DraftTree.chain(3)]).logits.isnan().any()


def test_no_more_graphs_are_kept_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    target = target_of("llama")
    target.reserve(1, 64)
    target.prefill(prompts("cpu", 5))
    for width in (1, 2, 1, 4):
        target.score([DraftTree.chain(3, range(width - 1))])
    assert [width for _, width, *_ in target.runner._captured] == [1, 4]


class _ValueDependent(torch.nn.SiLU):
    """Branches on the value of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() < 1e9 else x


@ON_BOTH
@pytest.mark.parametrize("case", ["the capture fails", "the model looks at values", "a hook"])
def test_passes_that_cannot_be_captured_use_the_forward_and_report_why(
    case: str, device: str, capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(traced if case == "the model looks at values" else uncaptured)
    model = copy.deepcopy(tiny("llama", torch.float32)).to(device)
    if case == "the capture fails":
        monkeypatch.setattr(CudaGraphs, "__call__", lambda self, run: broken(run))
        capture(broken)
    if case == "the model looks at values":
        model.model.layers[1].mlp.act_fn = _ValueDependent()
    fast = truedraft.accelerate(model, control="fixed")
    if case == "a hook":
        model.model.layers[0].register_forward_hook(lambda module, given, result: result)
    inputs = {k: v.to(device) for k, v in ragged(model, 2).items()}
    given = dict(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(fast.generate(**given), model.generate(**given))
    words = {"the capture fails": "graph: operation not permitted)", "a hook": "hooks or replaced forwards"}
    assert words.get(case, "could not be captured in a CUDA graph") in fast.report().runtime
    assert fast.report().runtime.startswith("transformers forward") and torch.rand(2, device=device).shape == (2,)
    torch.manual_seed(1)
    plain = model.generate(**given | {"do_sample": True})
    torch.manual_seed(1)
    assert torch.equal(fast.generate(**given | {"do_sample": True}), plain)


def test_a_capture_that_fails_late_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = truedraft.accelerate(tiny("llama", torch.float32), control="fixed")
    fast.target.runner = GraphPass(fast.target._stock(), broken)
    given = dict(**ragged(fast.model, 2), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(fast.generate(**given), fast.model.generate(**given))
    assert "could not be captured" in fast.report().runtime


def test_wrong_graphs_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecoderTarget, "_runner", lambda self, _: (GraphPass(self._stock(), uncaptured), None))
    with monkeypatch.context() as patch:
        patch.setattr(Padded, "seen", lambda self, extent: self.ancestors.new_ones(*self.ids.shape, extent))
        with pytest.raises(Refused, match="differs from plain decoding"):
            check_exact(DecoderTarget(tiny("llama", torch.float32)))
    with pytest.raises(Refused, match=r"strict=True needs the compiled pass.*not on the CPU"):
        truedraft.accelerate(tiny("llama", torch.float32), strict=True)
