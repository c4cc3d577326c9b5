"""Models with recurrent or convolutional state: chains behind snapshots, against plain forwards and `generate`."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import truedraft
from drafters_for_tests import Sampler
from matrix import SPELT
from model_types import built
from models import COMPILED_ALONE, RECURRENT, ragged, tiny
from nets import EVERY, PROCESSORS, REVIEWED, RULES, SEED, VIEWED, drafter, node_net, text_net
from served import running
from truedraft import DraftTree, Refused
from truedraft.caches.states import StateCache
from truedraft.chains import chained
from truedraft.runtime import chains
from truedraft.runtime.programs import PROGRAMS
from truedraft.targets.hosting import hosted
from truedraft.targets.quirks import RESTARTING, STATES_OUTSIDE
from truedraft.targets.recurrent import RecurrentTarget
from truedraft.tree import Prompt, Taps
from vocabularies import tokenized

FP32 = torch.float32  # in which transformers computes recurrent states, whatever the dtype of the model
LINEAR_FIRST = ["linear_attention", "full_attention", "linear_attention"]
CONVOLUTIONAL = ["lfm2", "lfm2_moe", "lfm3"]
REFUSED = {
    "lookahead": "reads guesses in addition to its draft",
    "sam|lookahead": "reads guesses in addition to its draft",
    "probes": "the draft has probes",
    "view": "cannot run under skip-layers",
    **dict.fromkeys([*sorted(VIEWED), *REVIEWED, "eesd"], "cannot run under "),
    "s3d": "keeps states of all its layers",
    "glide": "keeps states of the text instead",
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("architecture", "carry", "name"),
    [(kind, chains.CARRY, ("oracle", "noise")[i % 2]) for i, kind in enumerate(RECURRENT)]
    + [(kind, 2, name) for kind in RECURRENT if kind not in PROGRAMS for name in ("oracle", "noise")],
)
def test_every_node_has_the_logits_of_its_path(
    architecture: str, carry: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By compiled passes, or by the model's own forward, which carries tokens: as many as published, or so few that
    calls of their own are frequent."""
    monkeypatch.setattr(chains, "CARRY", carry)
    model, compiled = tiny(architecture, FP32), architecture in PROGRAMS
    assert node_net(model, name, tolerance=1e-4, steps=10 if compiled else 16) > 30


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("architecture", "rule", "length"),
    [(name, rule, length) for name in RECURRENT for rule in RULES for length in (1, 7, 24)],
)
def test_text(architecture: str, rule: str, length: int) -> None:
    model = tiny(architecture, FP32)
    drafts = {"greedy": [("oracle", 3), ("suffix", 1)], "seeded": [("noise", 3), ("plain", 2)]}[rule]
    for name, rows in drafts if length > 7 else drafts[:1]:
        text_net(model, name, ragged(model, rows), max_new_tokens=length, **{"do_sample": False, **RULES[rule]})


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", PROCESSORS)
@pytest.mark.parametrize("rule", RULES)
def test_processors(settings: str, rule: str) -> None:
    model = tiny("granitemoehybrid", FP32)
    given = {"do_sample": False, **RULES[rule], **PROCESSORS[settings]}
    if rule == "greedy":
        given = {k: v for k, v in given.items() if k not in PROCESSORS["warpers"]}
    text_net(model, "oracle", ragged(model, 3), max_new_tokens=30, **given)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("architecture", ["jamba", "recurrent_gemma", "rwkv"])
def test_penalties(architecture: str, rule: str) -> None:
    model = tiny(architecture, FP32)
    given = {"do_sample": False, **RULES[rule], **PROCESSORS["penalties"]}
    text_net(model, "oracle", ragged(model, 3), max_new_tokens=20, **given)


@pytest.mark.parametrize("architecture", ["mamba", "jamba"])
def test_near_ties_of_models_whose_forward_restarts(architecture: str) -> None:
    model = tiny(architecture, FP32)
    fast = truedraft.accelerate(model, draft=drafter("noise", model), control="fixed", ties="recheck")
    fast.target.noise = 10.0
    inputs = ragged(model, 3)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=20, do_sample=False), plain)
    assert fast.report().near_ties


def test_a_text_outgrows_the_positions_of_a_configuration_that_has_none() -> None:
    model = tiny.__wrapped__("jamba", FP32)
    model.config.max_position_embeddings = 20
    text_net(model, "oracle", ragged(model, 2), max_new_tokens=24, do_sample=False)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("architecture", "runtime", "name", "rule"),
    [
        (architecture, runtime, name, [*RULES][(way + i) % 2])  # each drafter by both rules
        for way, (architecture, runtime, others) in enumerate(
            [
                ("falcon_h1", "stock", REFUSED),  # chains, by its own forward
                (
                    "qwen3_5_text",
                    "auto",
                    ["view", "eesd", "s3d", "glide", *sorted(VIEWED), *REVIEWED],
                ),  # trees, by the compiled pass
            ]
        )
        for i, name in enumerate(EVERY)
        if name not in others
    ],
)
def test_every_drafter(architecture: str, runtime: str, name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, small = tiny(architecture, FP32), tiny("llama", FP32)
    monkeypatch.setattr("nets.sibling", lambda _: small)
    settings = {"max_new_tokens": 16, "do_sample": False, **RULES[rule]}
    text_net(model, name, ragged(model, 3), runtime=runtime, **settings)


@pytest.mark.parametrize("name", REFUSED)
def test_drafters_that_need_more_than_a_chain_are_refused(name: str) -> None:
    model = tiny("qwen3_5_text", FP32)
    with pytest.raises(ValueError, match=REFUSED[name]):
        fast = tokenized(model, draft=drafter(name, model), runtime="stock")
        fast.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5)


def test_rules_that_read_probes_are_refused() -> None:
    fast = truedraft.accelerate(tiny("qwen3_5_text", FP32), rule="lossy/reflective", draft="suffix", runtime="stock")
    with pytest.raises(Refused, match="reads probes in addition to drafts"):
        fast.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5)


def test_a_draft_model_with_states_is_refused() -> None:
    with pytest.raises(Refused, match="has states, which cannot be taken back"):
        truedraft.accelerate(tiny("llama", FP32), draft=tiny("qwen3_5_text", FP32))


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("deepseek_v4", "DeepseekV4ForCausalLM", "makes keys of whole windows of tokens"),
        ("xlstm", "xLSTMForCausalLM", "in a cache of its own, .* and has no compiled pass"),
    ],
)
def test_models_whose_states_cannot_be_passed_on_are_refused(kind: str, name: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        truedraft.accelerate(built(kind, name))


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_padding_that_changes_a_text_is_refused(runtime: str) -> None:
    """MiniMax, whose own decoding attends to padding where its first layer keeps no keys."""
    config = CONFIG_MAPPING["minimax"](**{**RECURRENT["minimax"], "layer_types": LINEAR_FIRST})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    fast = truedraft.accelerate(model, control="fixed", runtime=runtime)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5], [9, 8, 7, 9, 8, 7, 9]])
    for sample in (False, True):
        found = []
        for kind in (model, fast):
            torch.manual_seed(SEED)
            found.append(kind.generate(ids, max_new_tokens=20, do_sample=sample))
        assert torch.equal(*found)
    with pytest.raises(Refused, match="padding changes this model's text"):
        fast.generate(**ragged(model, 2), max_new_tokens=5)


def test_a_window_that_the_kinds_of_layers_do_not_name_is_refused() -> None:
    config = CONFIG_MAPPING["minimax"](**RECURRENT["minimax"], sliding_window=9)
    with pytest.raises(Refused, match="attends within a sliding window"):
        truedraft.accelerate(AutoModelForCausalLM.from_config(config).eval())


@pytest.mark.parametrize("architecture", sorted(RESTARTING))
def test_forwards_that_restart_are_refused_without_compiled_passes(architecture: str) -> None:
    with pytest.raises(Refused, match="does not continue from a state over several tokens"):
        truedraft.accelerate(tiny(architecture, FP32), runtime="stock")


@pytest.mark.parametrize("architecture", sorted(STATES_OUTSIDE))
def test_states_outside_of_a_cache(architecture: str) -> None:
    """Padding is text to their `generate`, and their own forward cannot be taken back, nor their rows be read anew."""
    model, ids = tiny(architecture, FP32), torch.tensor([[3, 5, 6]])
    fast = truedraft.accelerate(model, draft=drafter("noise", model))
    with pytest.raises(Refused, match="reads padding as text: give prompts of one length"):
        fast.generate(ids, attention_mask=torch.tensor([[0, 1, 1]]), max_new_tokens=3)
    if architecture == "rwkv":
        with pytest.raises(Refused, match=r"2 rows, which .* lets read each other's states: give one prompt at a time"):
            fast.generate(ids.expand(2, 3), max_new_tokens=3)
    if architecture == "recurrent_gemma":
        with pytest.raises(Refused, match="from the text of its last call: give two tokens"):
            fast.generate(ids[:, :1], max_new_tokens=3)
    with pytest.raises(Refused, match="ties='recheck' needs a model whose cache holds its states"):
        truedraft.accelerate(model, ties="recheck").generate(ids, max_new_tokens=3)
    with pytest.raises(Refused, match="keeps its states outside of the cache"):
        truedraft.accelerate(model, runtime="stock")


def test_embeddings_and_prompts_of_one_token() -> None:
    model = tiny("qwen3_5_text", FP32)
    fast = truedraft.accelerate(model, draft=drafter("noise", model), control="fixed")
    embeds = model.get_input_embeddings()(ragged(model, 1)["input_ids"])
    for inputs in ({"inputs_embeds": embeds}, {"input_ids": torch.tensor([[7]])}):
        plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        assert torch.equal(fast.generate(**inputs, max_new_tokens=20, do_sample=False), plain)


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "mamba2", "lfm3", "minimax"])
def test_long_prompts_and_near_ties_that_are_computed_again(architecture: str) -> None:
    model = tiny(architecture, FP32)
    fast = truedraft.accelerate(
        model, draft=drafter("noise", model), control="fixed", ties="recheck", runtime="stock"
    )  # fmt: skip
    fast.target.long, fast.target.noise = 9, 10.0
    inputs = ragged(model, 3)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=20, do_sample=False), plain)
    assert fast.report().near_ties


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "mamba2"])
def test_a_server_of_a_model_with_states(architecture: str) -> None:
    model = tiny(architecture, FP32)
    plain = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, do_sample=False)
    with running(truedraft.accelerate(model, SPELT)) as server:
        request = {"model": "nano", "prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0}
        asked = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(request).encode())
        asked.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert json.load(response)["choices"][0]["text"] == SPELT.decode(plain[0, 3:])


class Rows:
    """A target with rows whose logits are compared with those of plain forwards over their tokens."""

    def __init__(self, architecture: str, prompts: list[list[int]]):
        self.model = tiny(architecture, FP32)
        target = hosted(self.model, "stock")
        assert isinstance(target, RecurrentTarget)
        self.target, self.texts = target, prompts
        target.reserve(len(prompts), 90)
        target.prefill([Prompt(torch.tensor(ids)) for ids in prompts])
        target.commit([[0]] * len(prompts))

    @property
    def cache(self) -> StateCache:
        assert isinstance(self.target.cache, StateCache)
        return self.target.cache

    @property
    def carries(self) -> list[int]:
        return [len(self.cache.carry(slot)) for slot in range(len(self.texts))]

    def step(self, drafts: list[list[int]], kept: list[int]) -> None:
        """A pass over a chain of each row, of which the first tokens are kept."""
        logits = self.target.score([DraftTree.chain(draft[0], draft[1:]) for draft in drafts]).logits
        for text, draft, own, keep in zip(self.texts, drafts, logits, kept, strict=True):
            with torch.no_grad():
                plain = self.model(torch.tensor([text + draft]), use_cache=False).logits[0, -len(draft) :]
            assert (own[: len(draft)] - plain).abs().max() < 1e-4 * plain.std()
            text += draft[:keep]
        self.target.commit([range(keep) for keep in kept])


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "mamba2", "lfm2"])
def test_the_carry_is_what_was_accepted_behind_the_snapshot(architecture: str) -> None:
    rows = Rows(architecture, [[5, 6, 7], [9, 8, 7, 6, 5]])
    none = [0, 0]
    assert rows.carries == none
    rows.step([[3], [4]], [1, 1])  # plain decoding always advances
    assert rows.carries == none and rows.target.carried == 0
    rows.step([[3, 9, 8], [4, 5, 6]], [3, 2])
    assert rows.carries == (none if architecture == "lfm2" else [0, 2])
    assert rows.target.carried == 2 * max(rows.carries)
    rows.step([[11, 12], [13]], [1, 1])  # padded: only the longest input could be kept whole
    assert rows.carries == (none if architecture == "lfm2" else [1, 0])
    rows.step([[1], [2]], [1, 1])  # no row drafts: carries are read first
    assert rows.carries == none


@pytest.mark.parametrize("architecture", [name for name in RECURRENT if name not in COMPILED_ALONE])
def test_a_pass_that_is_not_committed_changes_nothing(architecture: str) -> None:
    rows = Rows(architecture, [[5, 6, 7]])
    for draft in ([3], [9], [4, 5], [3]):
        rows.step([draft], [0])


def test_a_long_carry_is_read_by_a_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, widths = Rows("granitemoehybrid", [[5, 6, 7], [9, 8, 7, 6], [4]]), []
    call = rows.target.runner.call

    def noted(inputs: dict[str, Any], *args: Any) -> Any:
        widths.append(tuple(inputs["input_ids"].shape))
        return call(inputs, *args)

    monkeypatch.setattr(rows.target.runner, "call", noted)
    for _ in range(12):
        rows.step([[3, 9, 8], [4, 5, 6], [2, 1, 3]], [2, 2, 1])
    assert max(rows.carries) <= chains.CARRY + 2
    own = [shape for shape in widths if shape[0] < 3]
    assert own == [(2, 18), (1, 17)][: len(own)] and own


def test_hidden_states_are_those_of_the_drafted_nodes() -> None:
    rows = Rows("qwen3_5_text", [[5, 6, 7], [9, 8, 7, 6, 5]])
    rows.step([[3, 9, 8], [4, 5, 6]], [1, 2])
    assert rows.carries == [1, 2]
    rows.target.taps = Taps((-1,))
    scores = rows.target.score([DraftTree.chain(3, [4]), DraftTree.chain(5)])
    head = rows.model.get_output_embeddings()
    for row, count in ((0, 2), (1, 1)):
        states = scores.hidden[-1][row]
        assert len(states) == count and torch.allclose(head(states), scores.logits[row, :count], atol=1e-4)


def test_prefixes_are_not_kept_and_reports_say_so() -> None:
    fast = truedraft.accelerate(tiny("qwen3_5_text", FP32))
    with fast.engine(max_rows=2, max_tokens=40, prefix_bytes=1 << 20) as engine:
        request = engine.add_request(torch.tensor([5, 6, 7, 8]), max_new_tokens=5, do_sample=False)
        while not request.finished:
            engine.step()
        assert any("the model has states" in note for note in request.report().notes)
        assert engine.report().prefix_bytes == 0


def test_certain_drafts_keep_their_best_path() -> None:
    tree = DraftTree((1, 2, 3, 4, 5, 6), (-1, 0, 0, 2, 3, 1), confidence=(1.0, 0.6, 0.5, 0.9, 0.9, 0.1))
    assert chained(tree).tokens == (1, 3, 4, 5) and chained(tree).confidence == (1.0, 0.5, 0.9, 0.9)
    assert chained(tree.replaced(confidence=None)).tokens == (1, 2, 6)
    chain = DraftTree.chain(1, [2, 3])
    assert chained(chain) is chain


@pytest.mark.parametrize(("drawn", "child"), [("independent", 0), ("distinct", 0), ("last", -1)])
def test_drawn_drafts_keep_the_same_draw_whatever_its_token(drawn: Any, child: int) -> None:
    law = Sampler(vocabulary=9).law([1])
    tree = DraftTree((1, 7, 8, 5), (-1, 0, 0, 1), (law, law, law, law), draws=drawn)
    chain = chained(tree)
    assert chain.tokens[1] == (7, 8)[child] and chain.draws == "one"
    assert chain.dist is not None and chain.dist[0] is law
    chain.check()
