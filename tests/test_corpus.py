"""Corpora: built from files, written whole, refused where damaged or of another tokenizer, shared, and bounded."""

from __future__ import annotations

import gzip
import json
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import truedraft
from corpus_readers import drafts_of, found_in
from interrupts import interrupted
from models import V, ragged, tiny
from truedraft import Corpus, Refused, build_corpus, registry
from truedraft.cli import main
from truedraft.stores import _file, building, texts
from truedraft.stores import corpus as corpora
from truedraft.stores._cursor import SEPARATOR, Cursor
from truedraft.stores._native import library
from truedraft.stores.automaton import MappedAutomaton
from truedraft.stores.memory import SHARES, Memory, Places, Tenants

LETTERS = "abcdefghijklmnopqrstuvwxyz \n.{}\":,'éß()=_+-*#0123456789"
compiled = pytest.mark.skipif(library() is None, reason="the structures were not compiled")


def spelling(letters: str = LETTERS, name: str = "spelling") -> PreTrainedTokenizerFast:
    """A tokenizer of letters: pieces have the tokens that they have in the whole text."""
    model = WordLevel({"?": 0, **{letter: i for i, letter in enumerate(letters, 1)}}, unk_token="?")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    made.name_or_path = name
    return made


def babble(seed: int, count: int, words: int = 40) -> str:
    pick = random.Random(seed)
    vocabulary = ["".join(pick.choices("abcde", k=pick.randint(1, 5))) for _ in range(words)]
    return "".join(pick.choice(vocabulary) + pick.choice("  \n") for _ in range(count))


def ids_of(corpus: Corpus) -> list[list[int]]:
    """The documents of a corpus."""
    found: list[list[int]] = [[]]
    for token in corpus.automaton.text:
        if token == SEPARATOR:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == []
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small corpus."""
    pick = random.Random(0)
    corpus = Corpus.built([[pick.randrange(12) for _ in range(400)] for _ in range(5)], "letters", "c0ffee")
    corpus.save(tmp_path / "small.tdc")
    return tmp_path / "small.tdc"


def test_corpus_of_files_has_their_documents_and_counts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(texts, "PIECE", 100)
    folder = tmp_path / "texts"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    contents = {"a.txt": babble(1, 300), "deep/er/b.py": babble(2, 200), "deep/one line": "ab" * 900, "empty.txt": ""}
    for name, text in contents.items():
        (folder / name).write_text(text)
    (folder / "z.txt.gz").write_bytes(gzip.compress(babble(3, 50).encode()))
    lines: list[Any] = [{"text": "line one é"}, {"content": "line two"}, {"other": "none"}, ["no object"]]
    (folder / "y.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\nno json\n")
    for name, content in {"x.bin": b"a\0b", "latin.txt": "é".encode("latin-1"), ".hidden/c.txt": b"hidden"}.items():
        (folder / name).write_bytes(content)
    (folder / "broken.gz").write_bytes(gzip.compress(b"a" * 99)[:-9])
    tokenizer = spelling()

    built = build_corpus([folder, folder / "a.txt"], tokenizer, tmp_path / "all.tdc")
    corpus = Corpus.open(tmp_path / "all.tdc")
    expected = [
        contents["a.txt"], contents["deep/er/b.py"], contents["deep/one line"], "line one é", "line two", babble(3, 50)
    ]  # fmt: skip
    encoded = tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert sorted(ids_of(corpus)) == sorted(encoded)
    assert built.documents == corpus.config.documents == len(expected)
    assert built.tokens == corpus.config.tokens == sum(map(len, encoded)) == built.characters
    assert built.bytes == (tmp_path / "all.tdc").stat().st_size
    assert built.seconds > built.tokenising > 0 and built.peak_memory > 1e6
    assert built.skipped == {
        "binary files": 1, "files that are not UTF-8": 1, "files that cannot be read": 1,
        "lines of .jsonl without text": 3,
    }  # fmt: skip
    assert corpus.config.tokenizer == "spelling" and len(list(tmp_path.iterdir())) == 2

    text = list(corpus.automaton.text)
    pick = random.Random(4)
    for _ in range(60):
        start = pick.randrange(len(text) - 9)
        string = [token for token in text[start : start + pick.randint(1, 8)] if token != SEPARATOR]
        ends = [i for i in range(len(string), len(text)) if string and text[i - len(string) : i] == string]
        behind = [text[end : end + 4] for end in ends]
        cursor = Cursor()
        corpus.automaton.follow(cursor, string)
        grown = corpus.automaton.grow(cursor, 6)
        for i, (token, count) in enumerate(zip(grown.tokens, grown.counts, strict=True)):
            if grown.parents[i] < 0:
                assert count == sum(after[:1] == [token] for after in behind)


def test_named_field_of_jsonl_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "not this", "code": "this"}\n')
    build_corpus([tmp_path / "a.jsonl"], spelling(), tmp_path / "a.tdc", field="code")
    assert ids_of(Corpus.open(tmp_path / "a.tdc")) == spelling()(["this"])["input_ids"]


def test_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: Any) -> None:
    """No piece is longer than PIECE and a line; lines without an end are cut."""
    monkeypatch.setattr(texts, "PIECE", 1000)
    (tmp_path / "a").write_text(text := babble(1, 5000) + "x" * 7000)
    (document,) = (list(pieces) for pieces in texts.Texts([tmp_path / "a"]))
    assert "".join(document) == text and max(map(len, document)) <= 2000
    assert sum(piece.endswith("\n") for piece in document) >= len(document) - 5


@pytest.mark.parametrize("where", ["header", "metadata", "token", "state", "edge", "top", "slot", "end"])
def test_flipped_byte_is_refused(file: Path, where: str) -> None:
    content = bytearray(file.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    spans = {
        name: (start + a["data_offsets"][0], start + a["data_offsets"][1])
        for name, a in header.items()
        if a.get("data_offsets")
    }
    spans |= {"header": (0, start), "metadata": (8, 8 + content.index(b"checksums") + 60)}
    spans["end"] = (len(content) - 1, len(content))
    if where not in spans and library() is None:
        pytest.skip("this form has no such array")
    pick = random.Random(where)
    places = {spans[where][0], spans[where][1] - 1, *(pick.randrange(*spans[where]) for _ in range(40))}
    for place in places:
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[place] ^= flip
            if damaged[8:start].split() == content[8:start].split():
                continue  # white space behind the header
            file.write_bytes(damaged)
            with pytest.raises(Refused, match=r"small.tdc.*(damaged|no corpus|version)") as refused:
                Corpus.open(file)
            assert "\n" not in str(refused.value)


def test_incomplete_or_foreign_file_is_refused(file: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    content = file.read_bytes()
    for size in (0, 1, 8, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(Refused, match="damaged"):
            Corpus.open(file)
    file.write_text("these are not the tokens that you are looking for")
    assert main(["corpus", "info", str(file)]) == 2
    assert "is damaged, or no corpus" in capsys.readouterr().err
    save_file({"token": np.zeros(3, np.int32)}, str(file), {"format": "pt"})
    with pytest.raises(Refused, match="is no corpus"):
        Corpus.open(file)
    with pytest.raises(Refused, match="no such file"):
        Corpus.open(tmp_path)
    monkeypatch.setattr(corpora, "VERSION", 1)
    Corpus.built([[1, 2]]).save(file)
    monkeypatch.undo()
    with pytest.raises(Refused, match="has version 1, not 2"):
        Corpus.open(file)


def with_arrays(file: Path, changes: dict[str, Any]) -> None:
    """Write the corpus with other arrays and their checksums."""
    with safe_open(str(file), framework="np") as given:
        arrays = {name: given.get_tensor(name).copy() for name in given.keys()} | changes  # noqa: SIM118
        metadata = given.metadata()
    metadata["checksums"] = json.dumps(_file._checksums(arrays, metadata["config"]))
    save_file(arrays, str(file), metadata)


CUT = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from corpus_readers import found_in
from truedraft import Corpus, Refused
path = Path(sys.argv[1])
content = path.read_bytes()
for change in (
    lambda: os.truncate(path, 9000), lambda: os.truncate(path, 0), lambda: path.write_bytes(bytes(len(content))),
    lambda: Corpus.built([[1, 2]]).save(path), path.unlink,
):
    path.write_bytes(content)
    corpus = Corpus.open(path)
    first = found_in(corpus)
    change()
    try:
        print("the same" if found_in(corpus) == first else "others", flush=True)
    except Refused as refused:
        print(refused, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="files in use may be cut")
def test_open_corpus_is_refused_when_truncated_and_kept_when_replaced(file: Path) -> None:
    """In another process, which a read beyond the end of the file would kill."""
    command = [sys.executable, "-c", CUT, str(file), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    changed = f"corpus '{file}' was changed while it was in use: open it again, and replace such files whole"
    assert done.stdout.splitlines() == [changed] * 3 + ["the same"] * 2, done


@compiled
@pytest.mark.parametrize("state", [1, 5, 100])
def test_cyclic_links_are_refused(file: Path, state: int) -> None:
    arrays = {name: array.copy() for name, array in Corpus.open(file).automaton.arrays().items()}
    content = file.read_bytes()
    link, length, count = range(8 * state, 8 * state + 5)[0], 8 * state + 1, 8 * state + 4
    for place, value in ((link, state), (length, 0), (length, -1), (count, 0), (count, -9), (0, 1), (1, 1)):
        changed = arrays["state"].copy()
        changed[place] = value
        file.write_bytes(content)
        with_arrays(file, {"state": changed})
        with pytest.raises(Refused, match="damaged"):
            Corpus.open(file)


def test_invalid_metadata_are_refused(file: Path) -> None:
    with safe_open(str(file), framework="np") as given:
        arrays, metadata = {name: given.get_tensor(name) for name in given.keys()}, given.metadata()  # noqa: SIM118
    for changes in ({"tokens": "x"}, {"documents": -1}, {"tokenizer": None}, {"fingerprint": [1]}, {"more": 1}):
        config = json.dumps(json.loads(metadata["config"]) | changes)
        sums = json.dumps(_file._checksums(arrays, config))
        save_file(arrays, str(file), metadata | {"config": config, "checksums": sums})
        with pytest.raises(Refused, match="damaged"):
            Corpus.open(file)


@compiled
def test_inconsistent_arrays_are_refused(file: Path) -> None:
    whole = Corpus.open(file)
    assert isinstance(whole.automaton, MappedAutomaton)
    arrays = {name: array.copy() for name, array in whole.automaton.arrays().items()}
    content = file.read_bytes()

    def refused(changes: dict[str, Any]) -> None:
        file.write_bytes(content)
        with_arrays(file, changes)
        with pytest.raises(Refused, match="damaged"):
            Corpus.open(file)

    for name in arrays:
        if len(arrays[name]) and name != "token":
            refused({name: arrays[name][: -1 if name != "slot" else -3]})
        refused({name: arrays[name].astype(np.int16)})
        refused({name: arrays[name].reshape(1, -1)})
    for name, at in {"state": [0, 2, 3, 5, 6, 7], "edge": [1, 2, 3], "top": [0, 1], "slot": [0]}.items():
        for place in at:
            for value in (-(2**31), 2**31 - 1):
                if (name, place, value) in (("state", 5, -(2**31)), ("edge", 1, -(2**31))):
                    continue  # a token below zero is a separator
                changed = arrays[name].copy()
                changed[place] = value
                refused({name: changed})
    refused({"state": arrays["state"][:0]})
    refused({"token": arrays["token"][:5]})
    full = np.where(arrays["slot"] == 0, 1, arrays["slot"]).astype(np.int32)
    refused({"slot": full})


def test_mapped_corpus_cannot_grow(file: Path) -> None:
    corpus = Corpus.open(file)
    if isinstance(corpus.automaton, MappedAutomaton):
        with pytest.raises(TypeError, match="cannot grow"):
            corpus.automaton.extend([1])
        with pytest.raises(TypeError, match="cannot grow"):
            corpus.automaton.read(Cursor(), [1])


@pytest.mark.skipif(os.name != "posix", reason="limits of a process")
def test_failed_write_keeps_the_earlier_file(file: Path, monkeypatch: Any) -> None:
    content = file.read_bytes()
    code = (
        "import resource, sys; from truedraft import Corpus\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: Corpus.built([list(range(2000))]).save(sys.argv[1])\n"
        "except OSError: sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)], timeout=100).returncode == 7
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Corpus.built([[1]]).save(file)
    assert file.read_bytes() == content and [p.name for p in file.parent.iterdir()] == [file.name]


def test_corpus_has_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    Corpus.built([[1]]).save(tmp_path / "a.tdc")
    assert (tmp_path / "a.tdc").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_processes_and_threads_can_share_a_corpus(file: Path) -> None:
    alone = drafts_of(file)
    assert all(len(tokens) > 5 for tokens, _ in alone)
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from corpus_readers import Corpus, found_in\n"
        "for _ in range(20): print(found_in(Corpus.open(sys.argv[1])), flush=True)"
    )
    command = [sys.executable, "-c", code, str(file), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        found = [(line, drafts_of(file)) for line in other.stdout]  # while the other process reads on
        assert found == [(f"{found_in(Corpus.open(file))}\n", alone)] * 20

    corpus, begun = Corpus.open(file), threading.Barrier(2)

    def work(_: int) -> list[Any]:
        begun.wait()
        return [drafts_of(corpus) for _ in range(50)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[alone] * 50] * 2


@compiled
def test_both_automata_read_each_others_files(file: Path, tmp_path: Path) -> None:
    expected = found_in(Corpus.open(file))
    code = (
        "import sys; sys.path.insert(0, sys.argv[3]); from corpus_readers import Corpus, found_in\n"
        "corpus = Corpus.open(sys.argv[1]); assert type(corpus.automaton).__name__ == 'PythonAutomaton'\n"
        "corpus.save(sys.argv[2]); print(found_in(corpus))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), str(tmp_path / "pure.tdc"), str(Path(__file__).parent)],
        env={**os.environ, "TRUEDRAFT_NATIVE": "0"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout == f"{expected}\n", done.stderr
    again = Corpus.open(tmp_path / "pure.tdc")
    assert found_in(again) == expected and again.config == Corpus.open(file).config
    assert drafts_of(again) == drafts_of(file)


def test_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(babble(1, 100))
    ours, theirs = spelling(LETTERS[:V]), spelling(LETTERS[:V][::-1], "backwards")
    path = tmp_path / "a.tdc"
    build_corpus([tmp_path / "a.txt"], ours, path)
    for name in ("rest", "sam", "aded", "codeswift", "sam?aded"):
        draft = f"{name}:corpus={path}"
        with pytest.raises(Refused, match=r"'spelling'.*build it again with the model's own"):
            truedraft.accelerate(tiny(), theirs, draft=draft)
        truedraft.accelerate(tiny(), ours, draft=draft)
        truedraft.accelerate(tiny(), draft=draft)
        with pytest.raises(Refused, match=r"holds token .*, and the model has 4"):
            truedraft.accelerate(tiny(vocabulary=4), draft=draft)
    ours.add_special_tokens({"pad_token": "<pad>"})
    truedraft.accelerate(tiny(vocabulary=V + 3), ours, draft=f"rest:corpus={path}")
    build_corpus([tmp_path / "a.txt"], ours, path, force=True)
    Corpus.open(path).check(spelling(LETTERS[:V]))


def test_corpus_with_ids_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    truedraft.accelerate(
        tiny(), spelling(LETTERS), draft=registry.load("drafters", "rest", corpus=Corpus.built([[V - 1]]))
    )
    with pytest.raises(Refused, match=f"'in memory' holds token {V}, and the model has {V}"):
        truedraft.accelerate(tiny(), draft=registry.load("drafters", "sam", corpus=Corpus.built([[1, V]])))


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["rest", "sam", "codeswift", "aded"])
def test_drafts_from_corpora_change_no_token(name: str, sampled: bool, tmp_path: Path) -> None:
    model = tiny()
    inputs = {key: value[:2] for key, value in ragged(model, 2).items()}
    settings = dict(max_new_tokens=40, do_sample=sampled, top_k=0)
    torch.manual_seed(3)
    expected = model.generate(**inputs, **settings)
    for b, row in enumerate(expected):
        Corpus.built([row[inputs["attention_mask"].argmax(-1)[b] :].tolist()]).save(tmp_path / f"{b}.tdc")
    fast = truedraft.accelerate(
        model, draft=f"{name}:corpus={tmp_path / '0.tdc'};{tmp_path / '1.tdc'}", control="fixed"
    )
    torch.manual_seed(3)
    assert torch.equal(fast.generate(**inputs, **settings), expected)
    if name == "rest":  # the outputs of both rows are in the corpora
        assert fast.report().mean_acceptance_length > 6


def test_corpora_from_each_kind_of_argument(file: Path, tmp_path: Path) -> None:
    other = Corpus.built([[1, 2, 3]])
    for given, count in ((None, 0), (file, 1), (str(file), 1), (f"{file}; {file}", 2), ([file, other], 2), (other, 1)):
        assert len(corpora.corpora(given)) == count
    with pytest.raises(Refused, match=r"nowhere.*no such file"):
        registry.load("drafters", f"rest:corpus={file};nowhere")


def holds(memory: Memory, namespace: str, string: Sequence[int]) -> bool:
    """Whether a string occurs in the memory of a namespace."""
    places = Places().follow(memory.of(namespace), string)
    return any(cursor.length == len(string) for _, cursor in places)


def test_memory_separates_namespaces() -> None:
    memory, pick = Memory(1000), random.Random(5)
    added: dict[str, list[list[int]]] = {name: [] for name in "abc"}
    for i in range(90):
        name = pick.choice("abc")
        text = [1000 + i, *(pick.randrange(9) for _ in range(20)), 2000 + i]
        memory.add(name, text)
        added[name].append(text)
        assert len(memory) <= memory.limit
    for name in added:
        assert holds(memory, name, added[name][-1]) and not holds(memory, name, added[name][0])
        for other in set(added) - {name}:
            assert not any(holds(memory, name, text[:1]) for text in added[other])
    assert not memory.of("d")


def test_memory_is_bounded_and_forgets_the_oldest_first() -> None:
    memory = Memory(400)
    for i in range(50):
        memory.add("", [i, i, i])
        kept = [holds(memory, "", [k, k, k]) for k in range(i + 1)]
        assert kept == sorted(kept) and kept[-1] and len(memory) <= 400
        assert all(kept) or len(memory) > 400 * (SHARES - 1) // SHARES - 5
    memory.add("", list(range(1000, 9000)))
    assert len(memory) <= 400 and holds(memory, "", [8998, 8999]) and not holds(memory, "", [1000])
    for i in range(3000):
        memory.add(f"user {i}", [i])
    assert len(memory) <= 400 and not memory.of("user 0") and len(memory.of("user 2999")) == 1


def test_memory_is_saved_and_loaded_by_namespace(tmp_path: Path) -> None:
    memory, path = Memory(1000), tmp_path / "memory.tdm"
    for name, text in (("a", [1, 2, 3]), ("b", [4, 5]), ("a", [6, 7])):
        memory.add(name, text)
    memory.save(path)
    again = Memory(1000)
    again.load(path, None, vocabulary=8)
    assert holds(again, "a", [1, 2, 3]) and holds(again, "a", [6, 7]) and holds(again, "b", [4, 5])
    assert not holds(again, "a", [4]) and not holds(again, "b", [1]) and not holds(again, "a", [3, 6])
    with pytest.raises(Refused, match="holds token 7, and the model has 7"):
        again.load(path, None, vocabulary=7)
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(Refused, match="damaged"):
        Memory(1000).load(path, None, vocabulary=8)
    with pytest.raises(Refused, match="no such file"):
        again.load(tmp_path / "nowhere", None, vocabulary=8)
    Memory(10).save(tmp_path / "empty.tdm")
    again.load(tmp_path / "empty.tdm", None, vocabulary=8)


@pytest.mark.parametrize(
    "changes", [{"lengths": [3]}, {"lengths": [-1, 9]}, {"lengths": 5}, {"namespaces": [1]}, {"fingerprint": None}, {}]
)
def test_inconsistent_memory_file_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {"namespaces": ["a"], "lengths": [4], "fingerprint": ""} | changes
    token = np.array([1, 2, 3, -1], np.int32 if changes else np.float32)
    _file.write(tmp_path / "a.tdm", "memory", 2, config, {"token": token})
    memory = Memory(100)
    with pytest.raises(Refused, match="damaged"):
        memory.load(tmp_path / "a.tdm", None, vocabulary=8)
    assert not len(memory)


def test_accelerated_model_saves_and_loads_its_memory(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "memory.tdm"
    prompt = torch.tensor([[3, 9, 4, 1, 5]])

    def passes(fast: truedraft.Accelerated, namespace: str) -> int:
        fast.generate(prompt, max_new_tokens=40, do_sample=False, namespace=namespace)
        return len(fast.report().passes)

    first = truedraft.accelerate(model, draft="input-guided+suffix", control="fixed")
    alone = passes(first, "a")
    first.save_memory(path)
    later = truedraft.accelerate(model, draft="suffix+lookahead-pia", control="fixed")
    later.load_memory(path)
    other = passes(later, "b")
    assert passes(later, "a") < min(alone, other)
    with pytest.raises(Refused, match="prompt-lookup keeps no outputs"):
        truedraft.accelerate(model, draft="prompt-lookup").save_memory(path)


def test_least_recently_used_namespace_is_forgotten() -> None:
    tables: Tenants[list[int]] = Tenants(2, list)
    tables.of("a").append(1)
    tables.of("b").append(2)
    assert tables.of("a") == [1]
    tables.of("c").append(3)
    assert len(tables) == 2 and tables.of("a") == [1] and tables.of("b") == []


def test_command_builds_and_describes_a_corpus(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.txt").write_text("one day a cat saw a red ball. " * 20)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    out = str(tmp_path / "a.tdc")
    command = ["corpus", "build", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--tokenizer", "nano", "--out", out]
    assert main(command) == 0
    printed = capsys.readouterr()
    for part in ("1 documents", "bytes a token", "1 files that are not UTF-8"):
        assert part in printed.out
    assert printed.err == ""
    assert main(["corpus", "info", out, "--json"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["whole"] and config["documents"] == 1 and config["tokenizer"] == "nano" and config["fingerprint"]
    assert main([*command, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == config["tokens"]
    assert main(["corpus", "info", out]) == 0
    assert "whole" in capsys.readouterr().out
    assert main(["generate", "nano", "one day a", "--max-new-tokens", "5", "--draft", f"rest:corpus={out}"]) == 0


@pytest.mark.parametrize(
    "args, named",
    [
        (["{0}/a.txt", "--tokenizer", "nano", "--out", "{0}/none/a.tdc"], "is no folder that can be written"),
        (["{0}/a.txt", "--tokenizer", "nano", "--out", "{0}"], "is a folder: name a file"),
        (["{0}/a.txt", "--tokenizer", "nano", "--out", "{0}/old.tdc"], "--force"),
        (["{0}/a.txt", "--tokenizer", "nanos", "--out", "{0}/a.tdc"], "'nano'"),
        (["{0}/a.txt", "--tokenizer", "{0}", "--out", "{0}/a.tdc"], "--tokenizer"),
        (["{0}/a.txt", "{0}/nowhere", "--tokenizer", "nano", "--out", "{0}/a.tdc"], "nowhere' is no file or folder"),
        (["{0}/bad.txt", "--tokenizer", "nano", "--out", "{0}/a.tdc"], "1 files that are not UTF-8"),
        (["{0}/empty", "--tokenizer", "nano", "--out", "{0}/a.tdc"], "no text was found"),
        (["--tokenizer", "nano", "--out", "{0}/a.tdc"], "FILES"),
    ],
)
def test_invalid_build_is_refused_in_one_sentence(args: list[str], named: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "old.tdc").write_text("old")
    before = sorted(tmp_path.iterdir())
    assert main(["corpus", "build", *(arg.format(tmp_path) for arg in args)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and named in err
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "old.tdc").read_text() == "old"


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(babble(1, 4_000_000))
    command = ["corpus", "build", str(tmp_path / "a.txt"), "--tokenizer", "nano", "--out", str(tmp_path / "a.tdc")]
    begun, check = [], building.check_writable
    monkeypatch.setattr(building, "check_writable", lambda *a: (begun.append(time.monotonic()), check(*a)))
    assert interrupted(command, lambda: len(begun) == 2 and time.monotonic() > begun[1] + 0.3) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
