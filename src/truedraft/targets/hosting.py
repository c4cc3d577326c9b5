"""Makes targets from models, and checks them against the model's own decoding before use."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from truedraft.caches.states import StateCache
from truedraft.errors import Refused
from truedraft.runtime.forward import ForwardPass
from truedraft.targets._base import Target
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.hostable import check_hosted, keeps_states
from truedraft.targets.inputs import BLANK
from truedraft.targets.kinds import family_of
from truedraft.targets.quirks import RESTARTING, STATES_OUTSIDE
from truedraft.targets.recurrent import RecurrentTarget
from truedraft.targets.remembered import OwnDecoding, forget, generated_logits, own_decoding, plain_logits
from truedraft.targets.seq2seq import Seq2SeqTarget
from truedraft.tree import DraftTree, Prompt
from truedraft.views._base import View

KINDS: dict[str, type[DecoderTarget]] = {
    "decoder": DecoderTarget, "encoder-decoder": Seq2SeqTarget, "recurrent": RecurrentTarget,
}  # fmt: skip

# Positions of twelve that may differ in half precision: rounding decides near-ties of experts differently, and moves
# single positions of some models far (SmolLM2 by 2.6 standard deviations, at the second of some random tokens). A mask
# or positions that are ignored move six and more.
STRAYS = 3


def hosted(model: Any, runtime: str = "auto", strict: bool = False, view: View | None = None) -> Target:
    """A target for a model, checked against the model's own decoding on this machine.

    Args:
        runtime: see DecoderTarget.
        strict: require passes whose results do not depend on their width.
        view: what it generates under; None for the whole model.

    Raises:
        Refused: the model cannot be hosted exactly, or not strictly, or not under the view.
    """
    with _refused(model, "its modules cannot be read"):
        check_hosted(model)
        kind = KINDS["recurrent" if keeps_states(model.config) else family_of(model.config)]
        target = kind(model, runtime, strict)
    try:
        check_exact(target)
    except Refused:
        if target.runner.name == ForwardPass.name:
            raise
        why = f"the {target.runner.name} did not reproduce the model's forward"
        target = kind(model, "stock")
        target.fallback_reason = why
        check_exact(target)
    if strict and not target.batch_invariant:
        why = target.fallback_reason or (
            "runtime='stock' was requested" if runtime == "stock" else "this model is not on the CPU"
        )
        raise Refused(f"strict=True needs the compiled pass, whose results do not depend on its width, and {why}")
    if view is not None:
        target.generate_under(view)
    return target


@contextmanager
def _refused(model: Any, what: str) -> Iterator[None]:
    """Any exception becomes Refused, in one sentence with what failed and the error."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Refused(f"{type(model).__name__} cannot be hosted exactly: {what} ({reason[:300]})") from error


class _Differs(Refused):
    """A pass has other logits than plain decoding."""


def check_exact(target: DecoderTarget) -> None:
    """Compare a tree pass with plain decoding along its paths, for this model on this machine.

    Sets `target.noise`: the largest difference between the logits of both, at least the rounding of the largest logit;
    and `target.pads`, where only prompts without padding agree.

    Raises:
        Refused: the model ignores the tree mask or the positions, or its own `generate` fails to continue a text.
    """
    pads = target.config.model_type not in STATES_OUTSIDE
    try:
        _agrees(target, pads)
    except _Differs:
        if target.reads_sources:
            raise
        _agrees(target, pads=False)
        target.pads = False


def _agrees(target: DecoderTarget, pads: bool) -> None:
    """The comparison; in half precision with a second text where the first differs, since rounding moves more positions
    than STRAYS now and then: of SmolLM2 four in one of sixteen comparisons.

    pads: whether one of two texts is padded.
    """
    seeds = range(1 if target.dtype in (torch.float32, torch.float64) else 2)
    for seed in seeds:
        ids = _ids(target, 13, seed)
        try:
            return _compared(target, ids, [ids[:4], [] if pads else ids[9:]])
        except _Differs:
            if seed == seeds[-1]:
                raise


def _compared(target: DecoderTarget, ids: list[int], befores: list[list[int]]) -> None:
    """The comparison; where it fails with what is remembered of the model, it is made again without that."""
    own = own_decoding(target.model)
    known = set(own.logits)
    try:
        _compare(target, own, ids, befores)
    except _Differs:
        if set(own.logits) != known:  # the model was asked now
            raise
        forget(target.model)
        _compare(target, own_decoding(target.model), ids, befores)


@torch.no_grad()
def _compare(target: DecoderTarget, own: OwnDecoding, ids: list[int], befores: list[list[int]]) -> None:
    """The comparison of `check_exact`, of trees over `ids` behind two texts, the shorter of which `generate` pads."""
    model = target.model
    tree = DraftTree((ids[4], *ids[5:9]), (-1, 0, 0, 1, 2))
    prompts = [target.prompt(torch.tensor([*before, ids[4]], device=target.device)) for before in befores]
    cases = [(row, tree.path(leaf)) for row in range(len(prompts)) for leaf in (3, 4)]
    tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.25
    texts = [befores[row] + [tree.tokens[i] for i in path] for row, path in cases]
    with _refused(model, "its own decoding of a text fails"):
        of_cases, last = [prompts[row] for row, _ in cases], len(cases[0][1])
        expected = own.of(texts, lambda: plain_logits(target, texts, of_cases, last))
        _check_numbers(model, expected)
        if own.ignorable is None:
            own.ignorable = frozenset(_ignorable(target, texts, expected, tolerance))
        target.ignorable = own.ignorable
    form = "tree" if target.branching else "chain"
    with _refused(model, f"a pass over a {form} fails"):
        target.reserve(2, 16)
        try:
            scores = (_on_tree if target.branching else _on_chains)(target, prompts, tree)
        finally:
            target.cache = None
    if target.long is not None:
        if own.continues is None:
            own.continues = _continues(target, prompts, expected[::2, 0], tolerance)
        target.long = target.long if own.continues else None
    found = torch.stack([scores[row, list(path)] for row, path in cases])
    errors = _differences(found, expected)
    rounding = torch.finfo(target.dtype).eps * expected.abs().max()
    target.noise = max(float((found - expected).abs().max()), float(rounding))
    strays = 0 if target.dtype in (torch.float32, torch.float64) else STRAYS
    if int((errors <= tolerance).logical_not().sum()) > strays:
        also = "" if target.branching else ", its layers do not continue from a state over several tokens at once"
        raise _Differs(
            f"{type(model).__name__} cannot be hosted exactly: a {form} pass differs from plain decoding by "
            f"{float(errors.max()):.2g} standard deviations of the logits (allowed {tolerance}): it ignores mask or "
            f"positions{also}"
        )


def _on_tree(target: DecoderTarget, prompts: Sequence[Prompt], tree: DraftTree) -> Tensor:
    """Logits (rows, nodes, V), fp32, of a tree behind each prompt, whose last token is its root."""
    target.prefill(prompts)
    return target.score([tree] * len(prompts)).logits.float()


def _on_chains(target: DecoderTarget, prompts: Sequence[Prompt], tree: DraftTree) -> Tensor:
    """The same by chains: one to each leaf, and then, from where the last one was accepted in part, its rest."""
    if target.config.model_type in RESTARTING:
        raise Refused(
            f"{type(target.model).__name__} cannot be hosted exactly: its own forward does not continue from a state "
            f"over several tokens at once, and there is no compiled pass ({target.fallback_reason or 'runtime=stock'})"
        )
    rows = len(prompts)
    scores = [target.prefill(prompts).logits[:, 0]] * len(tree)
    if not (isinstance(target.cache, StateCache) and target.cache.filled):
        raise Refused(
            f"{type(target.model).__name__} cannot be hosted exactly: it keeps its states outside of the cache"
        )
    target.commit([[0]] * rows)
    for leaf in (i for i, below in enumerate(tree.shape.children) if not below):
        path = tree.path(leaf)[1:]
        logits = target.score([DraftTree.chain(tree.tokens[path[0]], [tree.tokens[i] for i in path[1:]])] * rows).logits
        for place, node in enumerate(path):
            scores[node] = logits[:, place]
    target.commit([[0]] * rows)
    scores[leaf] = target.score([DraftTree.chain(tree.tokens[leaf])] * rows).logits[:, 0]
    return torch.stack(scores, 1).float()


def _check_numbers(model: Any, plain: Tensor) -> None:
    """Raises:
    Refused: the logits of plain decoding of padded texts are NaN, as with masks of float64 that overflow in the float32
        softmax of eager attention.
    """
    if plain.isnan().any():
        raise Refused(
            f"{type(model).__name__} cannot be hosted exactly: its own decoding of padded texts in {model.dtype} by "
            f"{model.config._attn_implementation} attention gives NaN: check its weights, or load it with "
            "attn_implementation='sdpa'"
        )


def _continues(target: DecoderTarget, prompts: Sequence[Prompt], plain: Tensor, tolerance: float) -> bool:
    """Whether the model's own forward over the cache, which reads long prompts, agrees with plain decoding.

    plain: (rows, V) logits at the last tokens of the prompts.
    """
    target.reserve(len(prompts), 16)
    try:
        return _difference(target.read(prompts).logits[:, -1].float(), plain) <= tolerance
    except Exception:  # it needs inputs that only `generate` passes
        return False
    finally:
        target.cache = None


def _differences(found: Tensor, plain: Tensor) -> Tensor:
    """Largest difference per position, in standard deviations of the plain logits; both (..., V)."""
    return (found - plain).abs().amax(-1) / plain.std(-1).mean().clamp_min(1e-6)


def _difference(found: Tensor, plain: Tensor) -> float:
    """Largest difference of all positions."""
    return _differences(found, plain).max().item()


def _ignorable(target: DecoderTarget, texts: Sequence[list[int]], plain: Tensor, tolerance: float) -> Iterator[str]:
    """The inputs besides tokens that have no effect on the logits of `generate` where they are all zeros."""
    model = target.model
    if target.reads_sources:
        return
    for name in BLANK & inspect.signature(model.forward).parameters.keys():
        scored = generated_logits(model, texts, plain.shape[1], target.device, name)
        if _difference(scored.float(), plain) <= tolerance:
            yield name


def _ids(target: DecoderTarget, count: int, seed: int) -> list[int]:
    """Random tokens of text: none that the configuration uses as a special token."""
    configs = (target.model.config, target.config)
    special = {
        value for c in configs for name, value in c.to_dict().items() if name.endswith(("token_id", "token_index"))
        if isinstance(value, int)
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, target.vocabulary, (count + 8 * len(special),), generator=generator).tolist()
    return [i for i in drawn if i not in special][:count]
