"""Memory plans against what is allocated: tensors to the byte, and the peak of a process within a tolerance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import truedraft
from models import ARCHITECTURES, tiny
from truedraft import registry
from truedraft.cli import main
from truedraft.drafters._base import Drafter
from truedraft.drafters._learned import save_learnt
from truedraft.drafters.heads.glide import Training
from truedraft.errors import Refused
from truedraft.loading import load
from truedraft.planning.drafters import planned_drafter
from truedraft.planning.models import Sized, buffer_bytes, sized
from truedraft.planning.parts import Part, bytes_of, peak
from truedraft.planning.plan import Plan, most, planned
from truedraft.runtime.buffers import pad_in_place
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.releasing import copies_weights
from truedraft.targets.hosting import hosted
from truedraft.tree import DraftTree

GIB = 1 << 30
TOLERANCE = (0.85, 1.2)  # of a plan over what a process held: torch's own work space, and parts that are upper bounds
SETUPS = [
    ("none", 1, 120, "float32"), ("draft-model:nano-draft", 1, 100, "float32"), ("prompt-lookup", 4, 200, "float32"),
    ("eagle3", 4, 100, "float32"), ("sequoia:nano-draft", 4, 100, "float32"), ("none", 4, 100, "bfloat16"),
    ("draft-model:nano-draft", 4, 100, "bfloat16"),
]  # fmt: skip
SOME = ["llama", "gemma2", "gpt2", "mixtral", "deepseek_v3", "falcon", "phi3", "apertus", "olmo2"]  # of all kinds


def held(target: Any) -> int:
    """Bytes of a target's keys and values."""
    return sum(kept.nbytes for layer in target.cache.layers for kept in layer.kept)


def plan(draft: str, **changed: Any) -> tuple[Plan, dict[str, int]]:
    given: dict[str, Any] = {"rows": 2, "tokens": 60, "memory": GIB, "free": lambda device: 0} | changed
    found = planned(given.pop("model", "nano"), draft, **given)
    sizes: dict[str, int] = {}
    for part in found.parts:
        sizes[part.name] = sizes.get(part.name, 0) + part.bytes
    return found, sizes


@pytest.mark.parametrize("architecture", [name for name in SOME if name in ARCHITECTURES])
def test_models_without_weights_have_the_sizes_of_hosted_ones(architecture: str) -> None:
    model = tiny(architecture).float()
    target: Any = hosted(model)
    with torch.device("meta"):
        empty = type(model)._from_config(model.config, dtype=torch.float32).eval()
    found = Sized(architecture, empty, architecture, torch.float32)
    assert found.weights == sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert found.copies(1 << 40) == (target._copied.bytes if target._copied else 0)
    target.reserve(3, 50)
    assert isinstance(target.runner, CompiledPass) and found.program is not None, found.why
    assert found.cache(3, 50) == held(target)
    assert found.tables(50) == sum(t.nbytes for pair in target.runner._tables._made.values() for t in pair)
    for nodes in (5, 70):
        target.runner._reserve(nodes)
        storage = {tensor.untyped_storage().data_ptr(): tensor for tensor in target.runner._storage}
        real = sum(tensor.untyped_storage().nbytes() for tensor in storage.values())
        assert buffer_bytes(found.program, target.runner._arena) == real
    target.free()


def test_a_head_that_reads_the_keys_of_the_target_is_planned(tmp_path: Path) -> None:
    """From the sizes of the target's keys alone: its own weights, and the buffers of its compiled passes."""
    model, _ = load("nano", "float32")
    learner = Training()
    learner.begin(model)
    save_learnt(tmp_path, "glide", learner.module, model, learner.config(), torch.float32)
    _, sizes = plan(f"glide:{tmp_path}", rows=2, tokens=100)
    head = learner.module
    assert sizes["head weights"] == sum(tensor.nbytes for tensor in [*head.parameters(), *head.buffers()])
    assert sizes["head buffers"] > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("draft", ["none", "draft-model:nano-draft", "eagle3", "prompt-lookup", "sequoia:nano-draft"])
def test_tensors_of_a_call_are_those_planned(
    draft: str, rows: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, new = 24, 16
    found, sizes = plan(draft, rows=rows, tokens=prompt + new, dtype=dtype)
    model, tokenizer = load("nano", dtype)
    fast: Any = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed")
    target, drafter = fast.target, fast.drafter
    logits, hidden = [0], [0]
    real: dict[str, int] = {}

    def scored(trees: Any, *args: Any, **kwargs: Any) -> Any:
        made = own(trees, *args, **kwargs)
        stride = made.logits.stride()[1] if made.logits.shape[1] > 1 else made.logits.shape[2]
        logits.append(4 * made.logits.shape[0] * made.logits.shape[1] * stride)
        hidden.append(sum(t.untyped_storage().nbytes() for states in made.hidden.values() for t in states[:1]))
        real["KV cache"] = held(target)
        real.update(drafter_bytes(drafter))
        return made

    own = target.score
    monkeypatch.setattr(target, "score", scored)
    ids = torch.randint(5, 4000, (rows, prompt), generator=torch.Generator().manual_seed(rows))
    fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new)
    real["weights"] = sum(map(kept_bytes, [*model.parameters(), *model.buffers()]))
    real["copies"] = target._copied.bytes if target._copied else 0
    assert {name: sizes.get(name, 0) for name in real} == real
    assert max(logits) <= sizes["logits"] and max(hidden) <= sizes.get("hidden states", 0)
    if draft != "none":
        assert found.plain < found.least <= found.needed
    if draft != "prompt-lookup":
        assert max(logits) > sizes["logits"] / 2, "trees are about as large as planned"


def kept_bytes(tensor: torch.Tensor) -> int:
    return getattr(tensor, "qdata", tensor).nbytes


def drafter_bytes(drafter: Drafter) -> dict[str, int]:
    """The tensors of a drafter, under the names of a plan's parts."""
    reader: Any = getattr(drafter, "reader", None)
    if reader is None:
        return {}
    if hasattr(reader, "head"):
        cache = reader._cache
        return {
            "head weights": sum(t.nbytes for t in [*reader.head.parameters(), *reader.head.buffers()]),
            "head KV cache": sum(kept.nbytes for layer in cache.layers for kept in layer.kept),
            "head copies": reader.passes.copied.bytes,
        }
    model = reader.model
    return {
        "draft weights": sum(map(kept_bytes, [*model.parameters(), *model.buffers()])),
        "draft copies": reader.target._copied.bytes if reader.target._copied else 0,
        "draft KV cache": held(reader.target),
    }


@pytest.mark.slow
def test_the_peak_of_a_process_is_the_planned_one() -> None:
    """Of `nano` stretched to 25 M parameters, each setup in a process of its own."""
    here = Path(__file__).parent
    source = str(here.parent / "src")
    env = os.environ | {"PYTHONPATH": source, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for draft, rows, prompt, dtype in SETUPS:
        command = [sys.executable, str(here / "peaks.py"), "8x512", draft, str(rows), str(prompt), "30", dtype]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        assert TOLERANCE[0] < found["planned"] / found["held"] < TOLERANCE[1], (draft, rows, dtype, found)


def test_what_fits_is_the_most_that_fits() -> None:
    limit = 62 << 20
    found, _ = plan("eagle3", rows=4, tokens=400, memory=limit)
    assert not found.fits
    with pytest.raises(Refused, match=r"rows=4, tokens=400, nodes=24: .* more than the 62.0 MiB"):
        found.check()
    for name, others in (("rows", {"tokens": 400}), ("tokens", {"rows": 4})):
        fits = getattr(found, name)
        at, above = (plan("eagle3", memory=limit, **others, **{name: fits + more})[0].needed for more in (0, 1))
        assert at <= limit < above, name
    assert plan("none", rows=4, tokens=400, memory=limit)[0].needed == found.plain


def test_no_more_tokens_fit_than_the_context_has() -> None:
    found, _ = plan("none", memory=1 << 40)
    assert found.tokens == found.context
    longer, _ = plan("none", memory=1 << 40, tokens=found.context + 1)
    assert longer.tokens and longer.tokens > found.context


def test_the_largest_tree_that_fits_is_named() -> None:
    whole, _ = plan("lookahead", rows=64, tokens=100, memory=64 * GIB)
    limit = (whole.least + whole.needed) // 2
    found, _ = plan("lookahead", rows=64, tokens=100, memory=limit)
    assert found.nodes is not None and 1 <= found.nodes < whole.load.nodes - 1
    if found.in_place > limit:
        assert f"drafts of {found.nodes} nodes fit" in found.remedy


def test_bisection_finds_the_last_that_fits() -> None:
    for last in range(9):
        assert most(lambda count, last=last: count <= last, 8) == (min(last, 8) or None)


def test_phases_are_not_added_up() -> None:
    parts = [Part("a", 10, ""), Part("b", 5, "", "prompt"), Part("c", 7, "", "pass"), Part("d", 99, "", "later")]
    assert peak(parts) == 17


@pytest.mark.parametrize(("text", "count"), [("8GiB", 8 * GIB), ("1.5G", 3 * GIB // 2), ("512M", 1 << 29), ("7", 7)])
def test_sizes_are_read(text: str, count: int) -> None:
    assert bytes_of(text, "--memory") == count
    with pytest.raises(Refused, match="--memory"):
        bytes_of(f"{text}x", "--memory")


def test_nothing_is_loaded() -> None:
    """A model whose weights would take terabytes."""
    found = sized("nano", stretched="400x16384")
    assert found.weights > 1 << 40 and (found.replaced[1] > 1 << 40) == copies_weights()
    with pytest.raises(Refused, match="has no weights"):
        truedraft.accelerate(found.model)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "nano", "--draft", "draft-model:nano-draft", "--rows", "4", "--tokens", "100"]
    assert main([*asked, "--memory", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "draft KV cache" in out and "Needed at once" in out and "Most that fit" in out
    assert main([*asked, "--memory", "1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["needed"] > found["plain"]
    assert main([*asked, "--memory", "30M"]) == 2
    assert "more than the 30.0 MiB" in capsys.readouterr().err
    for wrong in (["--memory", "much"], ["--rows", "0"], ["--draft", "draft-model"], ["--draft", "nothing"]):
        assert main(["plan", "nano", *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_rows_of_a_ragged_pass_are_moved_to_their_places() -> None:
    generator = torch.Generator().manual_seed(0)
    for sizes in ([3, 1, 2], [1, 4], [4, 1], [2, 2], [1, 1, 1, 5, 1]):
        parts = [torch.randn(size, 3, generator=generator) for size in sizes]
        width = max(sizes)
        buffer = torch.full((len(sizes), width, 16), torch.nan)
        buffer.view(-1, 16)[: sum(sizes), :3] = torch.cat(parts)
        pad_in_place(buffer[..., :3], sizes)
        assert torch.equal(buffer[..., :3], torch.nn.utils.rnn.pad_sequence(parts, batch_first=True))


def test_logits_of_a_ragged_pass_are_held_once() -> None:
    model, _ = load("nano")
    target: Any = hosted(model)
    target.reserve(2, 80)
    target.prefill([target.prompt(torch.tensor([5, 6, 7])) for _ in range(2)])
    scores = target.score([DraftTree.chain(7, range(10, 30)), DraftTree.chain(7)])
    assert scores.logits.untyped_storage().nbytes() == 2 * 21 * 4096 * 4
    assert not scores.logits[1, 1:].any()
    target.free()


def test_every_drafter_is_planned_or_names_what_it_needs() -> None:
    """Also one whose draft model is the target itself, with other mixers, and one of several readers."""
    target = sized("nano")
    for name in (*registry.names("drafters"), *registry.names("views")):
        kind = "views" if registry.is_view(name) else "drafters"
        needs = registry.method(kind, name).card.needs
        if "draft model" in needs and name != "specdec-pp":
            with pytest.raises(Refused, match=f"{name} needs a draft model"):
                planned_drafter(name, target)
        elif not set(needs) & {"training", "MTP layers", "diffusion model", "calibration", "tokenizer"}:
            drafter, sides = planned_drafter(name, target)
            assert drafter is not None and len(sides) == 1
