"""Feed-forwards that nodes skip by their own hidden states: passes equal plain forwards of one token at a time."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

import truedraft
from models import RECURRENT, SHARING, ragged, tiny
from nets import RULES, generated
from test_lossy_views import NEW, SHORT, new_tokens, prompt_of
from test_runtime import BOTH, random_tree, words
from test_view_bits import coarse, rounded
from test_views import (
    COMPILED,
    LAYERS,
    LENGTHS,
    PARTS,
    RUNTIMES,
    SUMMED,
    UNCALLED,
    USUAL,
    Muted,
    begun,
    cache_for,
    check_same_bits,
    check_unaffected,
    deep,
    error,
    skipping,
    target_of,
)  # fmt: skip
from truedraft import DraftTree, Refused, registry
from truedraft.calibrating import TextEvaluator
from truedraft.cli import main
from truedraft.runtime.identity import fingerprint
from truedraft.runtime.programs import PROGRAMS
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Taps
from truedraft.views._together import Together
from truedraft.views.ffn_skipllm import FfnSkipLlm, middle_of
from truedraft.views.quantized import Quantized

MIDDLE = range(3)  # of LAYERS, for tiny models
TEXT = words(random.Random(12), 24)
EVERY = sorted(PROGRAMS.keys() - RECURRENT.keys() - SHARING)
BESIDE = SUMMED | {"cohere", "cohere2", "cohere2_moe"}  # no module reads the hidden state between the halves
FAST = {"llama", "gemma2", "olmo2", "mixtral", "gpt2", "cohere", "opt", "phi", "deepseek_v3"}
KINDS = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in EVERY]
NO_SPARING = "cannot be skipped(?: by node)?: (?:attention and feed-forward are|they are no modules|attention is)"


class Deciding:
    """Plain forwards of one token at a time, which skip what each token decides.

    A feed-forward is skipped by setting what its modules return to zero, and the state before it is the layer's output
    without it.

    prompt: read by the whole model, but for its last token.
    warm: first tokens that skip nothing.
    """

    def __init__(
        self, model: Any, similarity: float, middle: Sequence[int] = MIDDLE, prompt: Sequence[int] = (), warm: int = 0
    ):
        self.similarity, self.middle, self.warm = similarity, middle, warm
        self.model: Any = copy.deepcopy(model)
        layers = next(
            m for m in self.model.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS
        )
        names = PARTS.get(model.config.get_text_config().model_type, USUAL)[1]
        self._parts = [
            [(layer.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names] for layer in layers
        ]
        self._parts = [[(outer, name) for outer, name in parts if hasattr(outer, name)] for parts in self._parts]
        self.cosines: list[float] = []
        self._known: dict[
            tuple[int, ...], tuple[Any, Tensor, int]
        ] = {}  # by path: cache, logits, feed-forwards skipped
        self._cache = cache_for(model)
        if len(prompt) > 1:
            model(torch.tensor([prompt[:-1]]), past_key_values=self._cache, use_cache=True)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """(V,) logits after tokens."""
        return self._at(tuple(tokens))[1]

    def skipped(self, tokens: Sequence[int]) -> int:
        """Feed-forwards that the last of the tokens skips."""
        return self._at(tuple(tokens))[2]

    def _at(self, path: tuple[int, ...]) -> tuple[Any, Tensor, int]:
        if path not in self._known:
            before = self._at(path[:-1])[0] if path[1:] else self._cache
            self._known[path] = self._step(before, path[-1], len(path) <= self.warm)
        return self._known[path]

    def _step(self, cache: Any, token: int, whole: bool) -> tuple[Any, Tensor, int]:
        skipped: list[int] = []
        similar = False
        for layer in self.middle:
            if similar:
                skipped.append(layer)
                continue
            runs = (self._run(cache, token, skips) for skips in (skipped, [*skipped, layer]))
            after, before = (states[layer + 1][0, -1] for _, _, states in runs)
            self.cosines.append(float(cosine_similarity(before.double(), after.double(), 0)))
            assert abs(self.cosines[-1] - self.similarity) > 1e-6, "rounding may decide"
            similar = self.cosines[-1] > self.similarity and not whole
        return (*self._run(cache, token, skipped)[:2], len(skipped))

    def _run(self, cache: Any, token: int, skipped: Sequence[int]) -> tuple[Any, Tensor, Any]:
        """The cache behind a token, the logits there, and its hidden states."""
        muted = [(outer, name, getattr(outer, name)) for layer in skipped for outer, name in self._parts[layer]]
        for outer, name, module in muted:
            setattr(outer, name, Muted(module))
        cache = copy.deepcopy(cache)
        out = self.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True, output_hidden_states=True)
        for outer, name, module in muted:
            setattr(outer, name, module)
        return cache, out.logits[0, -1], out.hidden_states


@torch.no_grad()
def halfway(model: PreTrainedModel, middle: Sequence[int] = MIDDLE) -> float:
    """A similarity that some of the tokens of a text exceed in the first layer, far from all of them."""
    oracle = Deciding(model, 2.0, middle[:1])
    oracle.logits(TEXT)
    found = sorted(oracle.cosines)
    some = range(len(found) // 2, 5 * len(found) // 6)
    at = max(some, key=lambda i: found[i + 1] - found[i])
    return (found[at] + found[at + 1]) / 2


def view_of(similarity: float, middle: Sequence[int] = MIDDLE, **knobs: Any) -> FfnSkipLlm:
    return FfnSkipLlm(layers=f"{middle[0]}-{middle[-1]}", similarity=similarity, **knobs)


@torch.no_grad()
def check_against_decisions(target: DecoderTarget, tolerance: float) -> None:
    """Trees of several widths in rows of different lengths, chains behind scratch, and single nodes."""
    rng, similarity = random.Random(4), halfway(target.model)
    view, prompts = view_of(similarity), [words(rng, n) for n in LENGTHS]
    begun(target, prompts)
    oracles = [Deciding(target.model, similarity, prompt=prompt) for prompt in prompts]
    behind, counts = [list[int]() for _ in prompts], set[int]()
    for sizes in ((5, 7, 1), (1, 1, 1), (2, 1, 4)):
        trees = [
            random_tree(rng, prompt[-1] if not text else 3, n)
            for prompt, text, n in zip(prompts, behind, sizes, strict=True)
        ]
        scores = target.score(trees, view).logits
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                path = behind[row] + [tree.tokens[i] for i in tree.path(node)]
                counts.add(oracles[row].skipped(path))
                assert error(scores[row, node], oracles[row].logits(path)) < tolerance, (sizes, row, node)
        paths = [tree.path(len(tree) - 1) for tree in trees]
        target.advance(view, paths)
        for text, tree, path in zip(behind, trees, paths, strict=True):
            text += [tree.tokens[i] for i in path]
    assert len(counts) > 1, "all tokens decide alike"
    target.cache = None


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", RUNTIMES[:2])
@pytest.mark.parametrize("architecture", KINDS)
def test_the_logits_are_those_of_what_each_token_decides(architecture: str, runtime: str) -> None:
    target = target_of(deep(architecture, torch.float32), runtime)
    try:
        target.check_view(view_of(0.9))
    except Refused as refused:
        assert re.search(NO_SPARING, str(refused))
        assert architecture in (SUMMED if runtime == "auto" else UNCALLED | BESIDE)
    else:
        assert architecture not in (SUMMED if runtime == "auto" else UNCALLED | BESIDE)
        check_against_decisions(target, 1e-3)


def test_passes_beside_captured_graphs() -> None:
    check_against_decisions(target_of(deep("llama", torch.float32), "graphs"), 1e-3)


@pytest.mark.covering(1)
@COMPILED
@BOTH
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral", "gpt2"])
def test_a_node_has_the_same_bits_however_it_is_scored(architecture: str, dtype: torch.dtype) -> None:
    """Decisions too: what other nodes of a pass skip makes no difference."""
    model = deep(architecture, dtype)
    check_same_bits(model, view_of(halfway(model)))


@COMPILED
@BOTH
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_what_all_nodes_skip_is_not_computed(architecture: str, dtype: torch.dtype) -> None:
    """The buffers hold what is left there without these feed-forwards."""
    found = []
    for view in (view_of(1e-6, range(LAYERS)), skipping("1-3f")):
        target = begun(DecoderTarget(deep(architecture, dtype), strict=True), [[5, 6, 7], [8]])
        rng, runner = random.Random(8), vars(target)["runner"]
        logits = target.score([random_tree(rng, 7, n) for n in (6, 3)], view).logits
        found.append([logits[0], logits[1, :3], *(buffer.clone() for buffer in runner._storage)])
    for mine, static in zip(*found, strict=True):
        assert torch.equal(mine, static)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_whole_model_is_not_affected(runtime: str) -> None:
    model = deep("llama", torch.float32)
    check_unaffected(model, runtime, view_of(halfway(model)))


@torch.no_grad()
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_hidden_states_are_those_behind_what_was_skipped(runtime: str) -> None:
    model = deep("llama", torch.float32)
    target = begun(target_of(model, runtime), [[7]])
    tree, taps = DraftTree.chain(7, [8, 9]), Taps((1, 2, 3))
    mine = target.score([tree], view_of(1e-6).tapping(taps)).hidden
    static = target.score([tree], skipping("1-2f", taps)).hidden
    for layer in taps.hidden:
        assert error(mine[layer][0], static[layer][0]) < 1e-5


# ---------------------------------------------------------------- as a drafter

COMPOSED = ["", "+window-kv:sinks=1,recent=5", pytest.param("+int8-self", marks=COMPILED), "<suffix", "+suffix"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("more", COMPOSED)
@pytest.mark.parametrize("rule", RULES)
def test_a_text_that_it_drafts_is_that_of_model_generate(rule: str, more: str) -> None:
    model = tiny("llama", torch.float32, sharpen=1.5, layers=LAYERS)
    inputs, view = ragged(model, 4), f"ffn-skipllm:layers=0-2,similarity={halfway(model)}"
    settings = dict(max_new_tokens=30, eos_token_id=[11, 12], pad_token_id=0, **{"do_sample": False, **RULES[rule]})
    plain = generated(model, inputs, **settings)
    fast = truedraft.accelerate(model, draft=f"{view}{more}", control="fixed")
    torch.manual_seed(5)
    assert torch.equal(fast.generate(**inputs, **settings), plain.text)
    assert torch.equal(torch.get_rng_state(), plain.state)
    assert 0.05 < fast.report().acceptance_rate < 1


@pytest.mark.parametrize("runtime", RUNTIMES[:2])
def test_where_nothing_is_similar_enough_all_drafts_are_right(runtime: str) -> None:
    model = tiny("llama", torch.float32, layers=LAYERS)
    for knobs in ("similarity=1.0", "similarity=0.01,warm=64"):
        draft = f"ffn-skipllm:layers=0-2,{knobs},depth=3,nodes=3"
        fast = truedraft.accelerate(model, draft=draft, control="fixed", runtime=runtime)
        fast.generate(**ragged(model, 3), max_new_tokens=31, do_sample=False)
        assert fast.report().acceptance_rate == 1.0


@COMPILED
@torch.no_grad()
def test_of_rounded_weights() -> None:
    """Decisions are by the rounded feed-forwards: of a model whose weights are rounded in plain torch."""
    model = coarse("llama", torch.float32)
    light = rounded(model, "int8")
    similarity = halfway(light)
    target = begun(DecoderTarget(model, strict=True), [[7]])
    tree = random_tree(random.Random(3), 7, 9)
    scores = target.score([tree], Together((view_of(similarity), Quantized("int8")))).logits[0]
    oracle = Deciding(light, similarity)
    for node in range(len(tree)):
        path = [tree.tokens[i] for i in tree.path(node)]
        assert error(scores[node], oracle.logits(path)) < 1e-2
    assert len({oracle.skipped([tree.tokens[i] for i in tree.path(node)]) for node in range(len(tree))}) > 1


# ---------------------------------------------------------------- generating under it


@torch.no_grad()
def by_decisions(model: Any, ids: Tensor, similarity: float, warm: int = 0) -> list[int]:
    """Greedy tokens behind a prompt that the whole model reads."""
    found = [int(model(ids).logits[0, -1].argmax())]
    oracle = Deciding(model, similarity, prompt=[*ids[0].tolist(), found[0]], warm=warm)
    while len(found) < NEW:
        found.append(int(oracle.logits(found).argmax()))
    assert len({oracle.skipped(found[:n]) for n in range(1, NEW)}) > 1
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", RUNTIMES[:2])
@pytest.mark.parametrize("warm", [0, 7])
def test_a_text_under_it_is_that_of_its_decisions(warm: int, runtime: str) -> None:
    model = tiny("llama", torch.float32, sharpen=1.5, layers=LAYERS)
    ids, similarity = prompt_of(model, 5), halfway(model)
    expected = by_decisions(model, ids, similarity, warm)
    view = f"lossy/ffn-skipllm:layers=0-2,similarity={similarity},warm={warm}"
    assert new_tokens(truedraft.accelerate(model, draft=None, view=view, runtime=runtime), ids) == expected
    assert expected != model.generate(ids, **SHORT)[0, ids.shape[1] :].tolist()
    if warm:
        assert expected != by_decisions(model, ids, similarity)


@COMPILED
@pytest.mark.parametrize("warm", [0, 7])
def test_the_text_depends_on_neither_drafts_nor_batch(warm: int) -> None:
    model = tiny("llama", torch.float32, sharpen=1.5, layers=LAYERS)
    batch, view = ragged(model, 3), f"lossy/ffn-skipllm:layers=0-2,similarity={halfway(model)},warm={warm}"
    lines = [ids[mask.bool()][None] for ids, mask in zip(*batch.values(), strict=True)]
    alone = [new_tokens(truedraft.accelerate(model, draft=None, view=view), ids) for ids in lines]
    for draft in ("none", "suffix+token-recycling", "copyspec"):
        fast = truedraft.accelerate(model, draft=draft, view=view, control="fixed")
        together = fast.generate(**batch, **SHORT)[:, batch["input_ids"].shape[1] :]
        assert together.tolist() == alone
        assert (fast.report().mean_acceptance_length > 1) == (draft != "none")
        with fast.engine(max_rows=2, max_tokens=64) as engine:
            requests = [engine.add_request(ids, **SHORT) for ids in lines]
            while engine.has_unfinished_requests():
                engine.step()
        assert [request.result() for request in requests] == alone


# ---------------------------------------------------------------- calibration


@torch.no_grad()
@pytest.mark.parametrize("runtime", RUNTIMES[:2])
def test_similarities_are_those_that_hooks_see(runtime: str) -> None:
    model: Any = deep("llama", torch.float32)
    texts = [TEXT, TEXT[5:11]]
    evaluator = TextEvaluator(model, texts)
    evaluator.target = target_of(model, runtime)
    found = torch.stack(list(evaluator.similarities()))
    seen: dict[int, list[Tensor]] = {}
    plain = copy.deepcopy(model)
    for i, layer in enumerate(plain.model.layers):
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, x, i=i: seen.update({i: [x[0]]}))
        layer.register_forward_hook(lambda _, x, out, i=i: seen[i].append(out))
    expected = []
    for text in texts:
        plain(torch.tensor([text[:-1]]))
        expected.append(torch.stack([cosine_similarity(*seen[i], -1)[0] for i in range(LAYERS)]))
    torch.testing.assert_close(found, torch.cat(expected, 1))


class Given:
    """An evaluator of given similarities."""

    def __init__(self, similar: Tensor):
        self.similar = similar

    @property
    def layers(self) -> int:
        return len(self.similar)

    def similarities(self) -> Tensor:
        return self.similar


def test_the_middle_is_where_similarity_rises_and_the_threshold_sets_the_share() -> None:
    means = torch.tensor([0.3, 0.97, 0.9, 0.92, 0.94, 0.93, 0.96, 0.91, 0.6, 0.99])
    spread = torch.linspace(-0.05, 0.05, 201)
    similar = means[:, None] + spread[torch.stack([torch.randperm(201) for _ in means])]
    found = [FfnSkipLlm(share=share).calibrate(Given(similar), print) for share in (0.1, 0.2, 1.0)]  # type: ignore[arg-type]
    assert {record["layers"] for record in found} == {"2-6"}, "it may fall a little, and begins behind a fall"
    assert [record["share"] for record in found[:2]] == pytest.approx([0.1, 0.2], abs=1e-3)
    assert found[2]["share"] == pytest.approx(0.4, abs=1e-3), "all but the first of the middle"
    assert found[0]["similarity"] > found[1]["similarity"] > found[2]["similarity"]
    with pytest.raises(Refused, match="similarity rises in no two layers"):
        FfnSkipLlm(ends=2).calibrate(Given(torch.tensor([[0.9], [0.9], [0.9], [0.7], [0.1], [0.1]])), print)  # type: ignore[arg-type]


@torch.no_grad()
def test_what_is_skipped_is_what_the_calibration_expects(tmp_path: Path) -> None:
    model = deep("llama", torch.float32)
    evaluator, file = TextEvaluator(model, [TEXT]), tmp_path / "found.json"
    record = FfnSkipLlm(share=0.2, ends=0).calibrate(evaluator, print)
    file.write_text(json.dumps({**record, "fingerprint": fingerprint(model)}))
    view: Any = registry.load("views", f"ffn-skipllm:file={file}")
    assert (view.layers, view.similarity, view.share) == (record["layers"], record["similarity"], record["share"])
    middle = middle_of(record["layers"])
    oracle = Deciding(model, record["similarity"] + 2e-5, middle)
    whole, counts = Deciding(model, 2.0, middle), []
    for n in range(1, len(TEXT)):  # behind the whole model's keys, as the calibration
        oracle._cache = whole._at(tuple(TEXT[: n - 1]))[0] if n > 1 else oracle._cache
        counts.append(oracle.skipped([TEXT[n - 1]]))
        oracle._known.clear()
    assert sum(counts) / (LAYERS * len(counts)) == pytest.approx(record["share"], abs=0.02)
    share = evaluator.target.share
    of_all = 1 - share(skipping("0-3f"))
    assert share(view) == pytest.approx(1 - record["share"] * of_all)
    static = skipping(f"{middle[-1]}f")
    both = Together((static, view))
    assert share(both) < share(view) and share(both) < share(static)


def test_the_command_calibrates_what_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "texts.txt", tmp_path / "found.json"
    data.write_text("once upon a time there was a dog\nthe cat sat on a mat\n")
    assert main(["calibrate", "ffn-skipllm", "--target", "nano", "--data", str(data), "--out", str(out)]) == 0
    assert "use it as --draft ffn-skipllm:file=" in capsys.readouterr().out
    assert main(["generate", "nano", "once", "--max-new-tokens", "4", "--draft", f"ffn-skipllm:file={out}"]) == 0
    record = json.loads(out.read_text())
    out.write_text(json.dumps({**record, "fingerprint": "another"}))
    assert main(["generate", "nano", "once", "--max-new-tokens", "4", "--draft", f"ffn-skipllm:file={out}"]) == 0
    out.write_text(json.dumps({**record, "fingerprint": "another", "sizes": [1, 2, 3]}))
    assert main(["generate", "nano", "once", "--draft", f"ffn-skipllm:file={out}"]) == 2
    assert "was calibrated for another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ("ffn-skipllm", "ffn-skipllm has no layers to skip: `truedraft calibrate ffn-skipllm"),
        ("ffn-skipllm:layers=1-2", "layers=1-2 has no threshold: give similarity"),
        ("ffn-skipllm:layers=1-4,similarity=0.9", r"layers \[4\]|4"),
        ("ffn-skipllm:layers=2,similarity=0.9", "give the first and the last layer"),
        ("ffn-skipllm:layers=2-2,similarity=0.9", "give the first and the last layer"),
        ("ffn-skipllm:layers=1-2,similarity=1.5", "similarity"),
        (
            "ffn-skipllm:layers=0-2,similarity=0.9+ffn-skipllm:layers=1-2,similarity=0.8",
            "two views skip feed-forwards by node .behind a similarity of 0.9 in layers 0 to 2; behind",
        ),
    ],
)
def test_what_is_refused(draft: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        truedraft.accelerate(deep("llama", torch.float32), draft=draft)


def test_drafts_that_could_change_a_text_under_it_are_refused() -> None:
    view = "lossy/ffn-skipllm:layers=0-2,similarity=0.9"
    with pytest.raises(
        Refused, match="last bits of a token decide what it skips, and by the transformers forward they"
    ):
        truedraft.accelerate(deep("llama", torch.float32), draft="suffix", view=view, runtime="stock")
