"""Views of diffusion models: each against its published rule, written out here, over a Llama whose forward is written
out here too, with keys and values that are stored and read by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import truedraft
from test_canvas import END, MASK, Bidirectional, model_of, ragged, texts_of
from truedraft import registry
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._editing import Editing
from truedraft.canvas.policies.lossy._filter import Filter
from truedraft.errors import Refused
from vocabularies import tokenized

LAYOUTS = [Layout(MASK, "whole", 8), Layout(MASK, "whole", 5, True)]
NAMES = [*registry.names("canvas.views"), *registry.presets("canvas.views")]
ORDERED = {"dkv-cache-greedy": "left-to-right"}  # the rules of views that do not serve the default


class StoredLlama:
    """A row of a model that attends to everything, position by position; queries and weights of the latest pass are
    kept."""

    def __init__(self, model: Any, length: int):
        config = model.config
        self.model, self.size = model, config.hidden_size // config.num_attention_heads
        self.heads, self.shared = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
        shape = (config.num_hidden_layers, config.num_key_value_heads, length, self.size)
        self.keys, self.values = torch.full(shape, math.nan), torch.full(shape, math.nan)
        self.queries: list[Tensor] = []
        self.weights: list[Tensor] = []

    def turned(self, x: Tensor, positions: list[int]) -> Tensor:
        half = self.size // 2
        rates = 10000.0 ** (-torch.arange(half) / half)
        angle = torch.tensor(positions)[:, None] * rates
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)

    @torch.no_grad()
    def forward(self, tokens: list[int], positions: list[int], seen: Callable[[int], Tensor | None]) -> Tensor:
        """(q, V); seen: by layer, what is read, (heads or 1, q, n) bool."""
        inner = self.model.model
        x = inner.embed_tokens(torch.tensor([tokens[i] for i in positions]))
        self.queries, self.weights = [], []
        for layer, block in enumerate(inner.layers):
            h, own = block.input_layernorm(x), block.self_attn
            q, k, v = (
                p(h).unflatten(-1, (-1, self.size)).transpose(0, 1) for p in (own.q_proj, own.k_proj, own.v_proj)
            )
            q = self.turned(q, positions)
            self.keys[layer, :, positions], self.values[layer, :, positions] = self.turned(k, positions), v
            keys, values = (kept[layer].repeat_interleave(self.shared, 0) for kept in (self.keys, self.values))
            scores = q @ keys.transpose(1, 2) / math.sqrt(self.size)
            self.queries.append(q)
            self.weights.append(scores.softmax(-1))
            if (read := seen(layer)) is not None:
                scores = scores.masked_fill(~read, -math.inf)
            x = x + own.o_proj((scores.softmax(-1) @ values).transpose(0, 1).flatten(1))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self.model.lm_head(inner.norm(x))


@dataclass
class State:
    """What a rule may read: the row, its passes so far, and what the latest one has computed."""

    row: StoredLlama
    prompt: int
    length: int
    blocks: list[range]
    known: set[int]
    layout: Layout
    at: int = 0
    passes: int = 0  # before this one
    within: int = 0  # of these, since the block began
    last: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    memory: dict[Any, Any] = field(default_factory=dict)

    @property
    def block(self) -> range:
        return self.blocks[self.at]

    @property
    def every(self) -> list[int]:
        return list(range(self.length))

    @property
    def masks(self) -> list[int]:
        return [i for i in self.every if i not in self.known]


Rule = Callable[[State], Iterable[int]]
Reads = Callable[[State, int], Tensor | None]


def nothing(state: State, layer: int) -> None:
    return None


def prefix(state: State) -> Iterable[int]:
    return range(state.block.start, state.length) if state.within else state.every


def dual(state: State) -> Iterable[int]:
    return state.block if state.within else state.every


def free(state: State) -> Iterable[int]:
    return range(state.block.start, state.length) if state.passes else state.every


def dkv(every: int, part: Rule) -> Rule:
    def rule(state: State) -> Iterable[int]:
        return state.every if state.within in (0, 1) or state.within % every == 0 else part(state)

    return rule


def window(state: State) -> Iterable[int]:
    nearest = sorted(state.masks, key=lambda i: i - state.masks[0])
    return [*nearest[:4], *state.last]


def d2(candidates: int, share: float, spread: float, gap: int) -> Rule:
    def rule(state: State) -> Iterable[int]:
        n, sure = state.length, state.memory.setdefault("sure", {})
        sure.update({i: float(logits.softmax(-1).max()) for i, logits in state.logits.items()})
        if not state.passes:
            return state.every
        rollout = torch.eye(n)
        for weights in state.row.weights:
            flow = torch.eye(n)
            flow[state.computed] = weights.mean(0)
            flow += torch.eye(n)
            rollout = flow / flow.sum(1, keepdim=True) @ rollout
        density = {}
        for i in range(state.prompt, n):
            around = range(2 * state.prompt - n, 2 * n - state.prompt)
            bell = {j: math.exp(-((i - j) ** 2) / (2 * spread**2)) for j in around}
            full = sum(bell[j] for j in around if j < state.prompt or min(j, n - 1) in state.known)
            density[i] = full / sum(bell.values())
        masks, found = state.masks, list[int]()
        for block in state.blocks[state.at :]:
            found += [i for i in masks if i in block]
            if len(found) >= candidates:
                break
        found.sort(key=lambda i: -sure[i] * density[i] - 10 * (i in state.block))
        chosen = {*found[:candidates], *state.last}
        rest = {i: float(rollout[:, i].sum()) for i in state.every if i not in chosen}
        total, mass = sum(rest.values()), 0.0
        for rank, i in enumerate(sorted(rest, key=lambda i: -rest[i])):
            mass += rest[i]
            if rank == 0 or mass <= share * total:
                chosen.add(i)
        line = sorted(chosen)
        return chosen | {i for a, b in pairwise(line) if b - a <= gap for i in range(a, b)}

    return rule


def sparse(state: State) -> Iterable[int]:
    return state.every if state.within < 2 else state.block


def kept(share: float) -> Reads:
    """Which positions Sparse-dLLM reads: chosen in the second pass over a block."""

    def reads(state: State, layer: int) -> Tensor | None:
        row = state.row
        if state.within < 2:
            return None
        if (state.at, layer) not in state.memory:
            queries, keys = state.memory["queries"][layer], state.memory["keys"][layer]
            scores = []
            for i in state.every:
                products = [float(queries[h].mean(0) @ keys[h // row.shared, i]) for h in range(row.heads)]
                scores.append(sum(products) / row.heads)
            outside = [i for i in state.every if i not in state.block]
            pooled = {
                i: max(scores[outside[k]] for k in range(max(at - 1, 0), min(at + 2, len(outside))))
                for at, i in enumerate(outside)
            }
            best = sorted(outside, key=lambda i: -pooled[i])[: int(share * len(outside))]
            state.memory[state.at, layer] = best
        seen = torch.zeros(1, len(state.computed), state.length, dtype=torch.bool)
        seen[:, :, [*state.memory[state.at, layer], *state.computed]] = True
        return seen

    return reads


def by_blocks(skip: float, share: float, size: int) -> Reads:
    """What SparseD reads, from the weights of the first pass with enough known."""

    def reads(state: State, layer: int) -> Tensor | None:
        n, new = state.length, state.length - state.prompt
        known = len(state.known) - state.prompt
        if state.memory.get("step", state.passes) == state.passes:
            if known >= skip * new:
                state.memory["step"] = state.passes
            return None
        seen = torch.zeros(state.row.heads, n, n, dtype=torch.bool)
        spans = [range(a, min(a + size, n)) for a in range(0, n, size)]
        generated = [s for s in spans if s.start >= state.prompt] or spans[-1:]
        for head in range(state.row.heads):
            for rows in spans:
                for group in ([s for s in spans if s not in generated], generated):
                    mean = {s.start: float(state.memory["weights"][layer][head][rows][:, s].sum()) for s in group}
                    count = min(int(len(group) * share) + 1, len(group)) if group else 0
                    for s in sorted(group, key=lambda s: -mean[s.start])[:count]:
                        seen[head, rows.start : rows.stop, s.start : s.stop] = True
        return seen

    return reads


CASES: dict[str, tuple[Rule, Reads]] = {
    "prefix-cache": (prefix, nothing),
    "dual-cache": (dual, nothing),
    "freecache": (free, nothing),
    "dkv-cache": (dkv(8, lambda s: [*s.masks, *s.last]), nothing),
    "dkv-cache:refresh=3": (dkv(3, lambda s: [*s.masks, *s.last]), nothing),
    "dkv-cache-prefill": (dkv(8, lambda s: range(s.prompt, s.length)), nothing),
    "dkv-cache-greedy": (dkv(2, window), nothing),
    "dkv-cache-greedy:refresh=9": (dkv(9, window), nothing),
    "d2cache": (d2(32, 0.1, 10, 0), nothing),
    "d2cache:candidates=5,share=0.3,spread=2.0,gap=2": (d2(5, 0.3, 2, 2), nothing),
    "sparse-dllm": (sparse, kept(0.5)),
    "sparse-dllm:kept=0.2": (sparse, kept(0.2)),
    "sparsed": (lambda s: s.every, by_blocks(0.2, 0.3, 128)),
    "sparsed:size=4,share=0.3": (lambda s: s.every, by_blocks(0.2, 0.3, 4)),
}


def by_hand(model: Any, prompt: list[int], new: int, layout: Layout, spec: str) -> tuple[list[int], list[int]]:
    """The text, and how many positions each pass computes."""
    rule, reads = CASES[spec]
    n = len(prompt) + new
    blocks = [range(a, min(a + layout.block, n)) for a in range(len(prompt), n, layout.block)]
    state = State(StoredLlama(model, n), len(prompt), n, blocks, {*range(len(prompt))}, layout)
    text, counts = [*prompt, *[MASK] * new], []
    for state.at, block in enumerate(blocks):
        state.within = 0
        while inside := [i for i in block if i not in state.known]:
            chosen = {*rule(state)}
            asked = [i for i in chosen if i not in state.known]
            state.computed = sorted(chosen | {i - layout.shifted for i in asked})
            logits = state.row.forward(text, state.computed, lambda layer: reads(state, layer))
            if "sparsed" not in spec or state.memory.get("step") == state.passes:
                state.memory["weights"] = state.row.weights
            if state.within == 1:  # everything is computed; nothing was fixed in between
                state.memory["queries"] = [q[:, block.start : block.stop] for q in state.row.queries]
                state.memory["keys"] = state.row.keys.clone()
            state.logits = {i: logits[state.computed.index(i - layout.shifted)] for i in asked}
            counts.append(len(state.computed))
            scored = {i: float(state.logits[i].softmax(-1).max()) for i in inside if i in state.logits}
            best = min(scored) if "greedy" in spec else max(scored, key=lambda i: scored[i])
            text[best] = int(state.logits[best].argmax())
            state.known.add(best)
            state.last, state.passes, state.within = [best], state.passes + 1, state.within + 1
        if END in text[len(prompt) : block.stop]:
            break
    answer = text[len(prompt) :]
    return answer[: answer.index(END) + 1] if END in answer else answer, counts


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


def rule_of(spec: str) -> str | None:
    return ORDERED.get(spec.partition(":")[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("spec", CASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_view_is_its_published_rule(model: Any, layout: Layout, spec: str) -> None:
    rng = random.Random(spec)
    for runtime, length in (("auto", 9), ("stock", 4)):
        fast: Any = truedraft.accelerate(
            model, layout=layout, view=f"lossy/{spec}", rule=rule_of(spec), runtime=runtime
        )
        assert ("compiled" in fast.target.runner.name) == (runtime == "auto" and not fast.view.reads_attention)
        prompt = [rng.randrange(6, 98) for _ in range(length)]
        text, counts = by_hand(model, prompt, 16, layout, spec)
        output = fast.generate(torch.tensor([prompt]), max_new_tokens=16)
        assert texts_of(output, length) == [text]
        assert [one.width for one in fast.report().passes] == counts


def test_every_view_has_its_cases() -> None:
    assert {spec.partition(":")[0] for spec in CASES} >= {*NAMES} - {"sparsed-short"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [*registry.names("canvas.views"), "dkv-cache-greedy"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_renewed_in_every_pass_or_read_whole_is_the_text_of_the_reference(
    model: Any, layout: Layout, name: str
) -> None:
    whole = "share=1.0" if name == "sparsed" else "refresh=1"
    ids = torch.tensor([[7, 8, 9, 10, 11, 12]])
    plain: Any = truedraft.accelerate(model, layout=layout, draft=None, rule=rule_of(name))
    fast: Any = truedraft.accelerate(model, layout=layout, view=f"lossy/{name}:{whole}", rule=rule_of(name))
    assert fast.generate(ids, max_new_tokens=22).equal(plain.generate(ids, max_new_tokens=22))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_have_the_text_that_they_have_alone(model: Any, name: str) -> None:
    for layout, runtime in zip(LAYOUTS, ("auto", "stock"), strict=True):
        prompts, ids, mask = ragged(random.Random(3), (3, 11, 7))
        fast: Any = tokenized(model, layout=layout, view=f"lossy/{name}", rule=rule_of(name), runtime=runtime)
        together = texts_of(fast.generate(ids, attention_mask=mask, max_new_tokens=13), ids.shape[1])
        alone = [texts_of(fast.generate(torch.tensor([p]), max_new_tokens=13), len(p))[0] for p in prompts]
        assert together == alone


@pytest.mark.parametrize("name", ["dual-cache", "d2cache"])
def test_requests_that_enter_and_leave_have_the_text_that_they_have_alone(model: Any, name: str) -> None:
    fast: Any = truedraft.accelerate(model, layout=LAYOUTS[1], view=f"lossy/{name}")
    rng, engine = random.Random(8), fast.engine(max_rows=2, max_tokens=32)
    inputs = [torch.tensor([[rng.randrange(6, 98) for _ in range(length)]]) for length in (5, 9, 3, 8)]
    given = [{"max_new_tokens": new, "suppress_tokens": [END]} for new in (12, 4, 9, 11)]
    requests = [engine.add_request(ids, **more) for ids, more in zip(inputs, given, strict=True)]
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    for request, ids, more in zip(requests, inputs, given, strict=True):
        assert request.tokens == fast.generate(ids, **more)[0, ids.shape[1] :].tolist()
        assert request.report().guarantee == fast.names[1] == "none"


POLICIES = ["low-confidence", "left-to-right", *(f"lossy/{name}" for name in registry.names("canvas.policies.lossy"))]


@pytest.mark.parametrize("name", registry.names("canvas.views"))
def test_views_serve_every_policy(model: Any, name: str) -> None:
    for rule in [registry.load("canvas.policies", policy) for policy in POLICIES]:
        if "training" in rule.card.needs:
            rule.model = Filter(8)
        if "guide" in rule.card.needs:
            rule.model = model
        if "attention to the whole" in rule.card.cannot or getattr(rule, "canvases", 0):
            continue
        if name == "d2cache" and isinstance(rule, Editing):
            with pytest.raises(Refused, match="goes over all of it again"):
                truedraft.accelerate(model, layout=LAYOUTS[1], view=f"lossy/{name}", rule=rule)
            continue
        fast: Any = tokenized(model, layout=LAYOUTS[1], view=f"lossy/{name}", rule=rule)
        output = fast.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=9, suppress_tokens=[MASK, END])
        report = fast.report()
        assert output.shape == (1, 12) and MASK not in output
        assert report.guarantee == "none" and report.drafter == "none" and f"lossy/{name} is lossy" in report.notes[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"view": "dual-cache"}, "choose it with view='lossy/dual-cache'"),
        ({"view": "lossy/dual"}, "there is no view of diffusion models 'dual': did you mean 'dual-cache'"),
        ({"view": "lossy/dual-cache:refresh=-1"}, "dual-cache:refresh=-1: give a whole number, 0 to"),
        ({"view": 3}, "give lossy/ and the name of a view of diffusion models"),
        ({"view": "lossy/dual-cache", "draft": "freedave"}, "which lossy/dual-cache replaces"),
        ({"view": "lossy/dual-cache", "rule": "lossy/ete"}, "scores several canvases in a pass"),
        ({"view": "lossy/dkv-cache-greedy"}, "choose rule='left-to-right'"),
        ({"view": "lossy/d2cache", "strict": True}, "strict=True needs the compiled pass"),
        ({"view": "lossy/dual-cache", "layout": Layout(MASK, "blocks", 4)}, "complete blocks are kept exactly"),
    ],
)
def test_views_that_do_not_fit_are_refused(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        truedraft.accelerate(model, **{"layout": LAYOUTS[0], **arguments})


def test_models_that_views_cannot_run() -> None:
    eager = model_of()
    eager.set_attn_implementation("eager")
    with pytest.raises(Refused, match="torch's attention"):
        truedraft.accelerate(eager, layout=LAYOUTS[0], view="lossy/d2cache")
    alone = Bidirectional(eager.config).eval()
    with pytest.raises(Refused, match="takes ids alone"):
        truedraft.accelerate(alone, layout=LAYOUTS[0], view="lossy/dual-cache")
