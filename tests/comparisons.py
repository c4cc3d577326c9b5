"""The comparison of a model with its own decoding, by which `accelerate` begins, made once for all tests of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from transformers import PreTrainedModel

from truedraft.targets import hosting
from truedraft.targets.decoder import DecoderTarget

LARGEST = 1_000_000  # parameters of a model whose findings are kept
_COMPARE = hosting.check_exact
_PASSED: WeakKeyDictionary[PreTrainedModel, list[tuple[Any, ...]]] = WeakKeyDictionary()


def _compare_once(target: DecoderTarget) -> None:
    """`check_exact`, unless a target of the same kind, pass and fingerprint has passed it: then with its findings."""
    passed = _PASSED.setdefault(target.model, [])
    kind = type(target), type(target.runner), type(getattr(target, "_encoder", None)), target._made_of
    for earlier, findings in passed:
        if earlier == kind:
            target.noise, target.pads, target.ignorable, reads = findings
            target.long = target.long if reads else None
            return
    could_read = target.long is not None
    _COMPARE(target)
    if type(target.runner) is kind[1] and target.model.num_parameters() < LARGEST:
        reads = not could_read or target.long is not None
        passed.append((kind, (target.noise, target.pads, target.ignorable, reads)))


@contextmanager
def compared_once() -> Iterator[None]:
    """Models hosted meanwhile are compared once. A net fails all the same where a pass is wrong, as it compares texts
    or logits itself. Where a planted fault has replaced the comparison, it stays replaced."""
    with pytest.MonkeyPatch.context() as patch:
        if hosting.check_exact is _COMPARE:
            patch.setattr(hosting, "check_exact", _compare_once)
        yield
