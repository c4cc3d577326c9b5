"""Files are written whole or not at all, with the permissions that they had."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import numpy

from truedraft import Corpus, files
from truedraft.files import write_whole
from truedraft.stores.memory import Memory
from truedraft.stores.neighbours import Neighbours

pytestmark = pytest.mark.skipif(os.name != "posix", reason="permissions")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: Any) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


NEAR = Neighbours(0, ("a",), (0, 3), torch.tensor([1, 2, 3]), torch.ones(2, 4))
WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: write_whole(path, "text"),
    "corpus": lambda path: Corpus.built([[1, 2, 3]]).save(path),
    "memory": lambda path: Memory(9).save(path),
    "datastore": NEAR.save,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_mode_of_a_replaced_file_is_kept_and_of_a_new_one_follows_the_umask(
    writer: str, umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []  # modes of the files of safetensors, before and after its write

    def watched(arrays: Any, part: str, metadata: Any) -> None:
        seen.append(mode_of(Path(part)))
        save(arrays, part, metadata)
        seen.append(mode_of(Path(part)))

    save = numpy.save_file
    monkeypatch.setattr(numpy, "save_file", watched)
    path = tmp_path / "file"
    WRITERS[writer](path)
    assert mode_of(path) == 0o666 & ~umask
    for mode in (0o600, 0o640, 0o400, 0o664):
        seen.clear()
        path.chmod(mode)
        WRITERS[writer](path)
        assert mode_of(path) == mode and all(other & ~mode & 0o177 == 0 for other in seen)
    (tmp_path / "link").symlink_to(path)
    path.chmod(0o600)
    WRITERS[writer](tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and mode_of(path) == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


def test_private_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    with files.whole(path) as file:
        file.write(b"secret")
        file.flush()
        (part,) = (p for p in tmp_path.iterdir() if p != path)
        assert mode_of(part) == 0o600
    assert path.read_bytes() == b"secret" and mode_of(path) == 0o600


def test_failed_write_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    for writer in WRITERS.values():
        path.write_text("before")
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                writer(path)
        assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["file"]
