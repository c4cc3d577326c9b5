"""Fixtures: seeds, folders, real checkpoints and prompts."""

from __future__ import annotations

import gc
import os
import zlib

os.environ["TRUEDRAFT_CHECK"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from comparisons import compared_once
from truedraft.runtime.programs import PROGRAMS

transformers.logging.set_verbosity_error()
SHARED = Path(__file__).resolve().parents[2] / "shared"


# Files in which of architectures with one program the first represents the others, which `make real` tests as well;
# tests/test_runtime.py holds the logits of all of them, in fp32, and else those of the first alone.
REPRESENTED = {
    "test_views", "test_prompts", "test_embeds", "test_taps", "test_text", "test_reading", "test_extending",
    "test_nodes", "test_graphs", "test_deja_vu",
}  # fmt: skip
EVERY_ONE = {"test_logits_are_those_of_the_forward_up_to_rounding", "test_norms_and_biases_are_those_of_the_model"}


def _uncovered(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The items of tests marked `covering(t)` whose values, any t of them together, earlier items have as well.

    A parametrised test multiplies: architectures by rules by batch sizes. Most faults show by one value, or by two
    together (Kuhn, Wallace and Gallo, "Software fault interactions and implications for software testing", 2004). So
    the everyday suite has cases that together cover every value of each parameter (t = 1), or every pair of values of
    two parameters (t = 2), chosen by names alone; `make real` has the whole product. A new value, such as a method just
    registered, is in no other case, and so is always tested.
    """
    covered: dict[str, set[Any]] = {}
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        if any(mark.name == "slow" or (mark.name == "skipif" and mark.args[0]) for mark in item.iter_markers()):
            continue
        if mark := item.get_closest_marker("covering"):
            params = item.callspec.params  # type: ignore[attr-defined]
            together = set(combinations(sorted((name, repr(value)) for name, value in params.items()), mark.args[0]))
            seen = covered.setdefault(item.nodeid.split("[")[0], set())
            if together <= seen:
                yield item
            seen |= together


def _represented() -> set[str]:
    seen: dict[Any, str] = {}
    for name, program in PROGRAMS.items():
        seen.setdefault(getattr(program, "func", program), name)
    return set(PROGRAMS) - set(seen.values())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    others = _represented()
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        whole = given.get("dtype") != torch.bfloat16 and getattr(item, "originalname", "") in EVERY_ONE
        again = REPRESENTED if whole else {*REPRESENTED, "test_runtime"}
        if given.get("architecture") in others and item.path.stem in again:
            item.add_marker(pytest.mark.slow)
    for item in [*_uncovered(items)]:
        item.add_marker(pytest.mark.slow)


def pytest_collection(session: pytest.Session) -> None:
    """No collection of garbage meanwhile: it would walk all modules of torch and transformers, again and again."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # the modules, and thousands of items, which live as long as the session
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _temporary_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured cost curves are written to a folder of the run, not to the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _compared_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """But for tests that replace something, which may be what the comparison has to find wrong."""
    with nullcontext() if "monkeypatch" in request.fixturenames else compared_once():
        yield


@pytest.fixture(scope="session")
def weights() -> Path:
    """Real checkpoints, where the folder beside the repository has them."""
    if not (SHARED / "weights").is_dir():
        pytest.skip("no folder ../shared/weights")
    return SHARED / "weights"


@pytest.fixture(scope="session")
def stories() -> list[str]:
    """Openings cut from real stories, where the folder beside the repository has them."""
    path = SHARED / "data" / "tinystories_sample" / "tinystories_4MB.txt"
    if not path.is_file():
        pytest.skip("no file ../shared/data/tinystories_sample/tinystories_4MB.txt")
    texts = [t for t in path.read_text().split("\n") if len(t) > 200]
    return [t[: 30 + 7 * (i % 12)] for i, t in enumerate(texts[:: len(texts) // 100][:100])]
