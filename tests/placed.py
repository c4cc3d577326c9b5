"""Draft models on a second device (`far.py`), method by method; the cases that test_placement.py reads from stdout.

A process of its own, since the second device stays registered with torch until the process ends.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from far import FAR, MOVED, FarTensor, to_far, two_devices
from models import V, ragged, sibling, tiny
from nets import SEED, diffusion_of, drafter, generated, needs_of
from test_overlapping import Paced
from truedraft import Refused, accelerate, registry
from truedraft.drafters.models._reader import CHUNK, Reader

NAMES = [n for n in registry.names("drafters") if {"draft model", "diffusion model"} & set(needs_of(n))]
OVERLAPPED = ("pearl", "mirror-sd")
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20}
ROWS, TOKENS, PAUSE = 2, 8, CHUNK + 10


def placed(name: str, **knobs: Any) -> Any:
    """A method whose draft model is on the second device."""
    model = tiny(dtype=torch.float32)
    if "diffusion model" in needs_of(name):
        return registry.load("drafters", name, model=to_far(copy.deepcopy(diffusion_of(model))), **knobs)
    small = copy.deepcopy(sibling(model))
    made = drafter(name, model, small=small, **knobs)
    to_far(small)
    return made


def check_texts(fast: Any, way: dict[str, Any], tokens: int = TOKENS) -> None:
    """Texts are those of `model.generate` on one device."""
    model = tiny(dtype=torch.float32)
    inputs, given = ragged(model, ROWS), {"max_new_tokens": tokens, "pad_token_id": 0, **way}
    expected = generated(model, inputs, **given)
    torch.manual_seed(SEED)
    found = fast.generate(**{name: value.to(fast.device) for name, value in inputs.items()}, **given)
    assert torch.equal(found.to("cpu"), expected.text), (found, expected.text)


def texts(name: str) -> None:
    draft = placed(name)
    if name in OVERLAPPED:
        draft._worker = Paced(0)
    fast = accelerate(tiny(dtype=torch.float32), draft=draft, control="fixed")
    check_texts(fast, SAMPLED)
    rate = fast.report().acceptance_rate
    assert rate is not None and (rate > 0 or "tokenizer" in needs_of(name)), "nothing drafted was accepted"


def rejection() -> None:
    """Draws from a law of the draft model are those of one device."""
    model, outcomes = tiny(dtype=torch.float32), []
    for small in (sibling(model), to_far(copy.deepcopy(sibling(model)))):
        fast = accelerate(model, draft=drafter("draft-model", model, small=small), rule="rejection", control="fixed")
        given = {**ragged(model, ROWS), "max_new_tokens": TOKENS, "pad_token_id": 0, **SAMPLED}
        outcomes.append(fast.generate(**given, seed=7).tolist())
    assert outcomes[0] == outcomes[1]


def moves() -> None:
    """Of each level the logits are moved, all rows together, and nothing else."""
    fast = accelerate(tiny(dtype=torch.float32), draft=placed("draft-model"), control="fixed")
    check_texts(fast, GREEDY)
    levels, expand = list[int](), Reader.expand

    def counted(reader: Reader, growing: Sequence[Any]) -> torch.Tensor:
        levels.append(V * len(growing))
        return expand(reader, growing)

    Reader.expand = counted  # type: ignore[method-assign]
    try:
        MOVED.clear()
        check_texts(fast, SAMPLED)
        drafts = fast.drafter.propose
        fast.drafter.propose = lambda rows, budget: drafts(rows, [0 if 4 < rows[0].step < PAUSE else budget[0]])
        fast.generate(ragged(fast.model, 1)["input_ids"], max_new_tokens=PAUSE + TOKENS, eos_token_id=None, **GREEDY)
    finally:
        Reader.expand = expand  # type: ignore[method-assign]
    assert levels and levels == MOVED
    assert fast.report().notes == [f"the draft model is on {FAR}, the model on cpu"]


def estimates() -> None:
    """Of the levels of specdec-pp the logits are moved, and two estimates of each token."""
    fast = accelerate(tiny(dtype=torch.float32), draft=placed("specdec-pp"), control="fixed")
    MOVED.clear()
    check_texts(fast, SAMPLED, 2 * TOKENS)
    assert {*MOVED} == {V, 1, 2 * V, 2}


def target_far() -> None:
    """The target on the second device, the draft model on the CPU."""
    model = to_far(copy.deepcopy(tiny(dtype=torch.float32)))
    small = sibling(tiny(dtype=torch.float32))
    fast = accelerate(model, draft=registry.load("drafters", "draft-model", model=small), control="fixed")
    assert isinstance(model.get_input_embeddings().weight.data, FarTensor) and fast.device == FAR
    for way in (GREEDY, SAMPLED):
        check_texts(fast, way)


def overlapped_far() -> None:
    """Passes that a thread drafts beside are those of the CPU."""
    model = to_far(copy.deepcopy(tiny(dtype=torch.float32)))
    try:
        accelerate(model, draft=registry.load("drafters", "pearl", model=sibling(tiny(dtype=torch.float32))))
    except Refused as refused:
        assert f"the model is on {FAR}: use draft-model" in str(refused), refused
    else:
        raise AssertionError("not refused")


CASES = {
    **{name: partial(texts, name=name) for name in NAMES},
    "rejection": rejection, "moves": moves, "estimates": estimates,
    "target far": target_far, "overlapped far": overlapped_far,
}  # fmt: skip


def main(names: Sequence[str]) -> None:
    """Print the errors of cases, by name; empty for those that pass."""
    errors = {}
    for name in names or CASES:
        try:
            with two_devices():
                CASES[name]()
        except BaseException:
            errors[name] = traceback.format_exc()
        else:
            errors[name] = ""
    print(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1:])
