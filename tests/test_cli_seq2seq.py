"""`truedraft correct` and `translate`, and the other commands with encoder-decoders."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
)

from interrupts import interrupted
from seq2seq_models import TEXTS, Scripted, model, tokenizer
from truedraft import Refused, accelerated, files
from truedraft.cli import _diff, _lines, main
from truedraft.text import languages

LINES = b"One day a cat.  He go to school!\r\n\n\t\nthe red ball"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("tiny")
    model().save_pretrained(found)
    tokenizer().save_pretrained(found)
    return str(found)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_bytes(LINES)
    return tmp_path / "text.txt"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Loads a scripted model instead, which corrects `go` and `is`."""
    fast = Scripted(lambda source: source.replace("go ", "goes ").replace("is", "are"))
    monkeypatch.setattr(_lines.ModelOptions, "load", lambda _: fast)
    return fast


def refused(capsys: Any, *args: str) -> str:
    """The one line that a refused command line writes."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return str(err)


def given(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("draft", ["iad", "auto", "none"])
@pytest.mark.parametrize("command", ["correct", "translate"])
def test_lines_are_those_of_model_generate(
    command: str, draft: str, folder: str, text: Path, capsysbinary: Any
) -> None:
    args = [command, str(text), "--model", folder, "--draft", draft, "--check", "--report", "--batch", "2"]
    assert main(args) == 0
    out, err = capsysbinary.readouterr()
    assert out.count(b"\n") == 3 and out.startswith(out.split(b"\r\n")[0] + b"\r\n\n\t\n")
    assert b"identical: yes" in err and b"guarantee: tokens" in err and b"passes per source" not in out
    if command == "translate":
        expected = fast_text(b"the red ball").encode()
        assert out.split(b"\n")[-1] == expected


def fast_text(source: bytes) -> str:
    encoded = tokenizer()(source.decode(), return_tensors="pt", return_token_type_ids=False)
    most = 2 * encoded["input_ids"].shape[1] + 32
    output = tokenizer().decode(model().generate(**encoded, max_new_tokens=most)[0], skip_special_tokens=True)
    return " ".join(output.split("\n")).strip()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", b""),
        (b"\n", b"\n"),
        (b"he go away", b"he goes away"),
        (b"\xef\xbb\xbfhe go away\r\n\r\n", b"\xef\xbb\xbfhe goes away\r\n\r\n"),
        (b"he go away\nx\xff\xfe\n\xc3\xa9 is\n", b"he goes away\nx\xff\xfe\n\xc3\xa9 are\n"),
        ("he go\x0b is\u2028is\x0c\n".encode(), "he go\x0b are\u2028are\x0c\n".encode()),
        (b"  He go home.   It is.  \n\n\n\x1a", b"  He goes home.   It are.  \n\n\n\x1a"),
    ],
)
def test_bytes_outside_of_corrections_are_preserved(
    data: bytes,
    expected: bytes,
    scripted: Scripted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: Any,
) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert main(["correct", str(tmp_path / "a.txt")]) == 0
    out, err = capsysbinary.readouterr()
    assert out == expected and (b"not UTF-8" in err) == (b"\xff" in data)
    given(monkeypatch, data)
    assert main(["correct", "-"]) == 0
    assert capsysbinary.readouterr().out == expected
    assert main(["correct", str(tmp_path / "a.txt"), "--out", str(tmp_path / "b.txt")]) == 0
    assert capsysbinary.readouterr().out == b"" and (tmp_path / "b.txt").read_bytes() == expected
    (tmp_path / "a.txt").chmod(0o640)
    (tmp_path / "link").symlink_to("a.txt")
    assert main(["correct", str(tmp_path / "link"), "--in-place"]) == 0
    assert (tmp_path / "a.txt").read_bytes() == expected and (tmp_path / "link").is_symlink()
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "b.txt", "link"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("he go away\n".encode("utf-16"), "is UTF-16: convert it"),
        ("he go away\n".encode("utf-16-le"), "NUL bytes"),
        (b"he go away\n" * 9 + b"\x7fELF\0\1", "NUL bytes"),
    ],
)
def test_binary_files_are_refused(
    data: bytes,
    message: str,
    scripted: Scripted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    out = tmp_path / "out.txt"
    out.write_text("as it was")
    assert message in refused(capsys, "correct", str(tmp_path / "a.txt"), "--out", str(out))
    given(monkeypatch, data)
    assert "standard input" in refused(capsys, "correct", "-", "--out", str(out))
    assert out.read_text() == "as it was" and len(list(tmp_path.iterdir())) == 2
    assert scripted.batches == []


def test_invalid_paths_and_numbers_are_refused(scripted: Scripted, text: Path, tmp_path: Path, capsys: Any) -> None:
    name = str(text)
    for args, message in (
        ([str(tmp_path / "none")], f"FILE {tmp_path / 'none'}: No such file"),
        ([str(tmp_path)], "Is a directory"),
        ([name, "--out", name], "is the input: give --in-place"),
        ([name, "--out", str(tmp_path / ".." / tmp_path.name / "text.txt")], "is the input"),
        ([name, "--out", str(tmp_path)], "is not a regular file"),
        ([name, "--out", os.devnull], "is not a regular file"),
        ([name, "--out", str(tmp_path / "no" / "b.txt")], "is no folder that can be written"),
        ([name, "--out", "b.txt", "--in-place"], "choose one"),
        (["-", "--in-place"], "standard input"),
        ([name, "--batch", "0"], "--batch 0 must be at least 1"),
        ([name, "--max-new-tokens", "0"], "--max-new-tokens 0"),
        ([name, "--num-beams", "4"], "--num-beams 4: drafts are verified against greedy search"),
    ):
        assert message in refused(capsys, "correct", *args)
    assert scripted.batches == [] and text.read_bytes() == LINES


def test_unsuitable_models_are_refused(folder: str, text: Path, tmp_path: Path, capsys: Any) -> None:
    tiny: dict[str, Any] = dict(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(LlamaConfig(**tiny, intermediate_size=8)).save_pretrained(tmp_path / "llama")
    BertForMaskedLM(BertConfig(**tiny, intermediate_size=8)).save_pretrained(tmp_path / "bert")
    model().save_pretrained(tmp_path / "mute")
    (tmp_path / "damaged").mkdir()
    for file in Path(folder).iterdir():
        (tmp_path / "damaged" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no tensors")
    for name, message in (
        ("llama", "is a decoder language model, and `truedraft {}` needs an encoder-decoder"),
        ("bert", "is not generative: it is a BertForMaskedLM"),
        ("mute", "has no tokenizer"),
        ("damaged", "cannot be loaded"),
        ("none", "does not exist"),
    ):
        for command in ("correct", "translate"):
            out = tmp_path / "out.txt"
            error = refused(capsys, command, str(text), "--model", str(tmp_path / name), "--out", str(out))
            assert f"--model '{tmp_path / name}' " in error and message.format(command) in error
            assert not out.exists()
    assert "'sufix': did you mean" in refused(capsys, "correct", str(text), "--model", folder, "--draft", "sufix")
    assert "--model" in refused(capsys, "translate", str(text))


def test_differences_are_shown(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "a.txt").write_bytes(b"He go home.  It is.\n\nAs was.\n\xff\n")
    marked = "He [-go-]{+goes+} home.  It [-is-]{+are+}.\n\nAs was.\n\N{REPLACEMENT CHARACTER}\n"
    assert main(["correct", str(tmp_path / "a.txt"), "--diff"]) == 0
    assert capsys.readouterr().out == marked
    assert main(["correct", str(tmp_path / "a.txt"), "--diff", "--in-place"]) == 0
    assert capsys.readouterr().out == marked
    assert (tmp_path / "a.txt").read_bytes() == b"He goes home.  It are.\n\nAs was.\n\xff\n"
    (tmp_path / "a.txt").write_bytes(b"He go home.\n" + b"it " * 70 + b"\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["correct", str(tmp_path / "a.txt")]) == 0
    out = capsys.readouterr().out
    assert "He \x1b[9;31mgo\x1b[0m\x1b[32mgoes\x1b[0m home.\n" in out and out.count("\n") == 2  # long lines stay lines
    assert main(["correct", str(tmp_path / "a.txt"), "--plain"]) == 0
    assert capsys.readouterr().out.startswith("He goes home.\n")


@pytest.mark.parametrize(
    ("before", "after", "marked"),
    [
        ("a b c", "a b c", "a b c"),
        ("a bad cat", "a good cat", "a [-bad-]{+good+} cat"),
        ("he have goed home", "he has gone home", "he [-have goed-]{+has gone+} home"),
        ("the the cat", "the cat", "[-the -]the cat"),
        ("a cat", "a big cat", "a {+big +}cat"),
        ("its", "it's", "[-its-]{+it's+}"),
        ("end", "end.", "end{+.+}"),
        ("", "new", "{+new+}"),
        ("Well ,yes", "Well, yes", "Well[- ,-]{+, +}yes"),
    ],
)
def test_a_difference_by_words(before: str, after: str, marked: str) -> None:
    parts = [(before, after), ("  ", "  ")]
    assert _diff.marked(parts) == marked + "  "
    assert "".join(removed for removed, _ in _diff.changes(parts)) == before + "  "
    assert "".join(inserted for _, inserted in _diff.changes(parts)) == after + "  "
    assert _diff.coloured(parts).plain == "".join(a if a == b else a + b for a, b in _diff.changes(parts))


def test_a_difference_from_model_generate_is_exit_code_1(
    folder: str,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    generate = accelerated.Accelerated.generate

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = generate(self, *args, **kwargs)
        out[-1, 1] += 1
        return out

    monkeypatch.setattr(accelerated.Accelerated, "generate", wrong)
    assert main(["correct", str(text), "--model", folder, "--check"]) == 1
    out, err = capsys.readouterr()
    assert out.count("\n") == 3 and "identical: no; line 1 first: model.generate gives '" in err


def test_output_files_are_written_atomically(
    scripted: Scripted,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    out = tmp_path / "out.txt"
    out.write_text("as it was")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        count = 0

        def fails(line: Any, file: Any, shown: Any, error: BaseException = error) -> None:
            nonlocal count
            count += 1
            file.write(b"half")
            if count == 3:
                raise error

        monkeypatch.setattr(_lines, "_write", fails)
        code = main(["correct", str(text), "--out", str(out)])
        output = capsys.readouterr()
        assert code == (2 if isinstance(error, OSError) else 130) and output.out == ""
        assert ("No space left" in output.err) if code == 2 else (f"{out} is unchanged" in output.err)
        assert out.read_text() == "as it was" and sorted(p.name for p in tmp_path.iterdir()) == ["out.txt", "text.txt"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_keeps_whole_lines(folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{text} {i}\n" for i in range(3000) for text in TEXTS))
    printed = tmp_path / "printed.txt"
    args = ["translate", str(tmp_path / "text.txt"), "--model", folder, "--batch", "2"]
    with (
        printed.open("wb") as stdout,
        subprocess.Popen(
            [sys.executable, "-m", "truedraft", *args],
            stdout=stdout,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits it ignored
        ) as process,
    ):
        deadline = time.monotonic() + 100
        while not printed.stat().st_size:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    *lines, last = printed.read_bytes().split(b"\n")
    assert not last and f"interrupted: {len(lines)} lines" in err.decode()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_keeps_whole_files(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{text} {i}\n" for i in range(3000) for text in TEXTS))
    (tmp_path / "out.txt").write_text("as it was")
    args = ["translate", str(tmp_path / "text.txt"), "--model", folder, "--batch", "2"]
    args += ["--out", str(tmp_path / "out.txt")]
    assert interrupted(args, lambda: any(path.stat().st_size for path in begun(tmp_path))) == 130
    out, err = capsys.readouterr()
    assert not out and f"interrupted: {tmp_path / 'out.txt'} is unchanged" in err and "Traceback" not in err
    assert (tmp_path / "out.txt").read_text() == "as it was" and not begun(tmp_path)


def begun(folder: Path) -> list[Path]:
    """The files of a command that has not ended."""
    return [path for path in folder.iterdir() if path.name not in ("text.txt", "out.txt")]


def test_a_file_that_is_replaced_stays_private(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("secret")
    (tmp_path / "old").chmod(0o600)
    for name, modes in (("old", {0o600}), ("new", {0o644, 0o664})):
        with files.whole(tmp_path / name) as file:
            (part,) = tmp_path.glob(".*")
            assert part.stat().st_mode & 0o777 in modes
            file.write(b"text")
        assert (tmp_path / name).stat().st_mode & 0o777 in modes and (tmp_path / name).read_text() == "text"


def test_closed_streams_and_damaged_files_are_refused(
    folder: str, text: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    for stream, args, message in (
        ("stdin", ["-"], "standard input is closed"),
        ("stdout", [str(text)], "standard output is closed"),
    ):
        with monkeypatch.context() as m:
            m.setattr(sys, stream, None)
            with pytest.raises(Refused, match=message):
                _lines.TextPaths(args[0], None, False)
    with pytest.raises(Refused, match="--out -: text goes to standard output"):
        _lines.TextPaths(str(text), Path("-"), False)
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"a" * 999)[:12] + b"not deflated")
    with pytest.raises(Refused, match=r"bad.gz cannot be read"):
        files.read_lines(tmp_path / "bad.gz")


def test_a_terminal_without_colours_shows_marks(
    scripted: Scripted, text: Path, capfdbinary: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["correct", str(text), "--diff"]) == 0
    assert b"He [-go-]{+goes+} to school!" in capfdbinary.readouterr().out


def test_the_embedded_model_keeps_text_outside_of_its_vocabulary(tmp_path: Path, capsys: Any) -> None:
    """Characters that its training text did not have; typographic quotes are read as plain ones."""
    lines = ["It cost $5, or 10% more.", "| a | b |", "He go to the café.", "It’s a nice day.", "She has a cat.\x1a"]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    assert main(["correct", str(tmp_path / "a.txt")]) == 0
    out, err = capsys.readouterr()
    assert out.split("\n") == lines
    assert "note: 4 places, on lines 1, 2, 3, 5: left as it is: the tokenizer has no tokens" in err


def test_beams_of_the_models_own_settings_are_noted(scripted: Scripted, text: Path, capsys: Any) -> None:
    scripted.model.generation_config.num_beams = 4
    assert main(["correct", str(text)]) == 0
    assert "search with 4 beams; lines are decoded greedily" in capsys.readouterr().err


def vocabulary(kind: type) -> Any:
    """A multilingual tokenizer of single letters."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *map(chr, range(97, 123))]
    if kind is NllbTokenizer:
        return kind(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    return kind(vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)])


@pytest.fixture(scope="module")
def polyglot(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """A folder with a multilingual model and its tokenizer, and both objects."""
    found = tmp_path_factory.mktemp("polyglot")
    reads = vocabulary(NllbTokenizer)
    torch.manual_seed(0)
    config = M2M100Config(
        vocab_size=len(reads), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=96,
        pad_token_id=reads.pad_token_id, eos_token_id=reads.eos_token_id, bos_token_id=reads.bos_token_id,
        decoder_start_token_id=reads.eos_token_id, init_std=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    model = M2M100ForConditionalGeneration(config).eval()
    model.save_pretrained(found)
    reads.save_pretrained(found)
    return str(found), model, reads


def test_languages_are_set(polyglot: tuple[str, Any, Any], tmp_path: Path, capsys: Any) -> None:
    name, model, reads = polyglot
    (tmp_path / "a.txt").write_text("one day\na cat\n")
    args = ["translate", str(tmp_path / "a.txt"), "--model", name]
    output = []
    for source, target in (("eng_Latn", "deu_Latn"), ("eng_Latn", "fra_Latn"), ("deu_Latn", "fra_Latn")):
        assert main([*args, "--source-lang", source, "--target-lang", target, "--max-new-tokens", "20"]) == 0
        out = capsys.readouterr().out
        reads.src_lang = source
        for line, text in zip(("one day", "a cat"), out.splitlines(), strict=True):
            encoded = reads(line, return_tensors="pt")
            ids = model.generate(**encoded, forced_bos_token_id=reads.convert_tokens_to_ids(target), max_new_tokens=20)
            assert text == reads.decode(ids[0], skip_special_tokens=True).strip()
        output.append(out)
    assert len(set(output)) == 3, "the languages make no difference"
    assert "give --source-lang and --target-lang" in refused(capsys, *args)
    assert "give --source-lang and --target-lang" in refused(capsys, *args, "--target-lang", "deu_Latn")
    assert "'deu_Latn'?" in refused(capsys, *args, "--source-lang", "eng_Latn", "--target-lang", "deu_latin")
    assert "names none" in refused(capsys, "correct", str(tmp_path / "a.txt"), "--model", name)


def test_languages_are_refused_for_a_model_without_language_codes(folder: str, text: Path, capsys: Any) -> None:
    error = refused(capsys, "translate", str(text), "--model", folder, "--target-lang", "de")
    assert "--target-lang de: this model's tokenizer has no language codes" in error


@pytest.mark.parametrize(
    ("kind", "setting"), [(MBart50Tokenizer, "forced_bos_token_id"), (MBartTokenizer, "decoder_start_token_id")]
)
def test_languages_become_generation_settings(kind: type, setting: str, polyglot: tuple[str, Any, Any]) -> None:
    reads, model = vocabulary(kind), polyglot[1]
    german = reads.convert_tokens_to_ids("de_DE")
    assert languages.languages(model, reads, "en_XX", "de_DE") == {setting: german}
    assert reads("cat")["input_ids"].count(reads.convert_tokens_to_ids("en_XX")) == 1
    with pytest.raises(Refused, match="give --source-lang"):
        languages.languages(model, reads, "en_XX", None)


SIZES = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=96, init_std=0.2,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["marian", "m2m"])
def test_sentencepiece_tokenizers(kind: str, text: Path, tmp_path: Path, capsys: Any) -> None:
    """The output is that of `generate`, without the language token."""
    pieces = pytest.importorskip("sentencepiece")
    pieces.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20), model_prefix=str(tmp_path / "p"), vocab_size=40, minloglevel=2
    )
    read = pieces.SentencePieceProcessor(model_file=str(tmp_path / "p.model"))
    vocab = {"</s>": 0, "<unk>": 1, "<pad>": 2, "<s>": 3}
    for i in range(read.get_piece_size()):
        vocab.setdefault(read.id_to_piece(i), len(vocab))
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    files = [str(tmp_path / name) for name in ("vocab.json", "p.model")]
    torch.manual_seed(0)
    ends: dict[str, Any] = dict(pad_token_id=2, eos_token_id=0, bos_token_id=3, forced_eos_token_id=None)
    if kind == "marian":
        reads: Any = MarianTokenizer(source_spm=files[1], target_spm=files[1], vocab=files[0])
        translator: Any = MarianMTModel(
            MarianConfig(vocab_size=len(vocab), decoder_start_token_id=2, scale_embedding=True, **ends, **SIZES)
        )
        language_options, settings = [], {}
    else:
        reads = M2M100Tokenizer(vocab_file=files[0], spm_file=files[1])
        reads.src_lang, german = "en", reads.get_lang_id("de")
        translator = M2M100ForConditionalGeneration(
            M2M100Config(vocab_size=german + 100, decoder_start_token_id=0, **ends, **SIZES)
        )
        language_options, settings = ["--source-lang", "en", "--target-lang", "de"], {"forced_bos_token_id": german}
    translator.eval().save_pretrained(tmp_path / "model")
    reads.save_pretrained(tmp_path / "model")
    args = ["translate", str(text), "--model", str(tmp_path / "model"), *language_options, "--max-new-tokens", "12"]
    assert main(args) == 0
    output = capsys.readouterr().out.splitlines()
    if kind == "m2m":
        translator.generation_config.forced_bos_token_id = german
        translator.generation_config.save_pretrained(tmp_path / "model")
        assert main([*args[:6], "--max-new-tokens", "12"]) == 0
        assert capsys.readouterr().out.splitlines() == output
        data = ["--data", str(text), "--out", str(tmp_path / "out")]
        assert "names none" in refused(capsys, "train", "gad", "--target", str(tmp_path / "model"), *data)
    for at, line in ((0, "One day a cat.  He go to school!"), (3, "the red ball")):
        ids = translator.generate(**reads(line, return_tensors="pt"), max_new_tokens=12, num_beams=1, **settings)
        assert output[at] == reads.decode(ids[0], skip_special_tokens=True).removeprefix("__de__").strip()


def test_a_tokenizer_without_its_library_is_refused(folder: str, text: Path, capsys: Any, monkeypatch: Any) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError(
            "\nMarianTokenizer requires the SentencePiece library but it was not found. Check out\nmore.\n"
        )

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", missing)
    error = refused(capsys, "translate", str(text), "--model", folder)
    assert "requires the SentencePiece library but it was not found; pip install 'truedraft[translate]'" in error


# ---------------------------------------------------------------- the other commands


def test_generate_reads_a_source(folder: str, capsys: Any) -> None:
    for more in ((), ("--draft", "iad"), ("--stream",)):
        assert main(["generate", folder, "the red ball", "--max-new-tokens", "46", *more]) == 0
        assert capsys.readouterr().out.strip() == fast_text(b"the red ball")
    options = ["--sample", "-n", "3", "--seed", "4", "--max-new-tokens", "20", "--json"]
    assert main(["generate", folder, "the red ball", *options]) == 0
    output = json.loads(capsys.readouterr().out)
    encoded = tokenizer()("the red ball", return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(4)
    expected = model().generate(**encoded, do_sample=True, num_return_sequences=3, max_new_tokens=20)[:, 1:].tolist()
    assert [
        ids + [0] * (len(row) - len(ids)) for ids, row in zip(output["token_ids"], expected, strict=True)
    ] == expected
    assert "--chat: this model is an encoder-decoder" in refused(capsys, "generate", folder, "x", "--chat")
    assert "num_beams=1 searches greedily" in refused(capsys, "generate", folder, "x", "--set", "num_beams=2")


def test_audit_of_an_encoder_decoder(folder: str, capsys: Any) -> None:
    options = ["--draft", "iad", "--draft", "suffix", "--max-new-tokens", "12", "--json"]
    prompts = [part for text in TEXTS for part in ("--prompt", text)]
    assert main(["audit", folder, *prompts, *options]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["exact"] and output["tokens"] > 300 and output["rows"] == output["tokens"] and output["worst_row"] > 0
    assert main(["audit", folder, "--draft", "iad", "--max-new-tokens", "8", "--batch", "2"]) == 0
    assert "exact" in capsys.readouterr().out
    assert "--laws tests decoder language models" in refused(capsys, "audit", folder, "--laws")


def test_audit_detects_swapped_sources(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Rows attend to the sources of other rows."""
    from truedraft.caches.seq2seq import Seq2SeqCache

    begin = Seq2SeqCache.begin

    def swapped(self: Any, states: torch.Tensor, source_mask: torch.Tensor) -> None:
        begin(self, states.flip(0), source_mask.flip(0))

    monkeypatch.setattr(Seq2SeqCache, "begin", swapped)
    prompts = [part for text in TEXTS for part in ("--prompt", text)]
    args = ["audit", folder, *prompts, "--draft", "iad", "--max-new-tokens", "8", "--batch", "3", "--json"]
    assert main(args) == 1
    assert not json.loads(capsys.readouterr().out)["exact"]


def test_bench_of_an_encoder_decoder(folder: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS))
    options = ["--prompts", str(tmp_path / "lines.txt"), "--max-new-tokens", "10", "--rounds", "1", "--draft", "iad"]
    args = ["bench", folder, *options, "--batch", "1", "--batch", "3"]
    assert main([*args, "--json", "--html", str(tmp_path / "page.html")]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert {f["side"] for f in figures} == {"transformers", "transformers lookup", "no drafts", "iad"}
    assert all(f["differs"] is None for f in figures) and len({f["tokens"] for f in figures}) == 1
    assert "iad" in (tmp_path / "page.html").read_text()
    assert main(["bench", folder, "--limit", "2", "--max-new-tokens", "5", "--rounds", "1", "--no-baselines"]) == 0
    assert "mistakes" in capsys.readouterr().out
    for measured in ("--oracle", "--roofline"):
        assert f"{measured} measures decoder language models" in refused(capsys, "bench", folder, measured)


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from truedraft.cli import main\n"
        "for command in ('correct', 'translate'): assert main([command, '--help']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "--in-place" in done.stdout and "--target-lang" in done.stdout and "num-beams" not in done.stdout
