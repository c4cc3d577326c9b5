"""The command line: its output, its refusals, and help without loading torch."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

import truedraft
from interrupts import interrupted
from truedraft import Refused, accelerated, assets, registry
from truedraft.cli import _models, app, demo, main
from truedraft.text.pieces import Pieces

pytestmark = pytest.mark.pythons

PROMPT = "one day a cat saw a red ball. the cat saw a red"
SENTENCES = [PROMPT, "the dog and the cat went to the park.", "she said, here is a ball for the dog."]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Measured curves do not land in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|end|>", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 4  # otherwise so small a random model repeats one token
    return model


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def plain(model, tokenizer, **settings):
    """The new ids of model.generate, and their text."""
    inputs = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings)
    rows = out[:, inputs["input_ids"].shape[1] :]
    return rows.tolist(), tokenizer.batch_decode(rows, skip_special_tokens=True)


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from truedraft.cli import main\n"
        "for command in ([], ['generate'], ['demo'], ['train'], ['methods']): assert main([*command, '--help']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for option in ("--draft", "--set", "--instruction", "--json"):
        assert option in done.stdout


def test_methods_lists_every_name(capsys):
    assert main(["methods"]) == 0
    table = capsys.readouterr().out
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    for kind in registry.KINDS:
        assert [entry["name"] for entry in listed[kind]] == registry.names(kind)
        assert all(name in table for name in (*registry.names(kind), *registry.presets(kind)))
    assert listed["drafters"][registry.names("drafters").index("prompt-lookup")]["knobs"] == {"n": 3, "length": 10}
    assert all("guarantee" in entry for entry in listed["accept"])


@pytest.mark.parametrize("more", [(), ("--stream",), ("--draft", "none"), ("--control", "fixed")])
def test_greedy_text_is_that_of_model_generate(more, model, tokenizer, folder, capsys):
    _, (text,) = plain(model, tokenizer, max_new_tokens=40, do_sample=False)
    assert main(["generate", folder, PROMPT, "--max-new-tokens", "40", *more]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_generation_stops_at_eos_and_stop_strings(model, tokenizer, folder, capsys):
    (ids,), (text,) = plain(model, tokenizer, max_new_tokens=40, do_sample=False)
    assert main(["generate", folder, PROMPT, "--max-new-tokens", "40", "--eos", str(ids[4]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == ids[: ids.index(ids[4]) + 1]
    word = next(word for i in ids if (word := tokenizer.decode([i])).isalpha() and word.isascii())
    assert main(["generate", folder, PROMPT, "--max-new-tokens", "40", "--stop", word]) == 0
    printed = capsys.readouterr().out.removesuffix("\n")
    assert text.startswith(printed) and printed.count(word) == 1 and printed.endswith(word)


def test_sampled_texts_are_those_of_model_generate(model, tokenizer, folder, capsys):
    torch.manual_seed(5)
    rows, texts = plain(
        model, tokenizer, max_new_tokens=30, do_sample=True, temperature=0.7, top_k=20, num_return_sequences=3
    )
    options = ["--sample", "--temperature", "0.7", "--top-k", "20", "-n", "3", "--seed", "5", "--max-new-tokens", "30"]
    assert main(["generate", folder, PROMPT, *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["text"] == texts
    assert [ids + [0] * (len(row) - len(ids)) for ids, row in zip(printed["token_ids"], rows, strict=True)] == rows
    assert main(["generate", folder, PROMPT, *options]) == 0
    assert capsys.readouterr().out == "".join(f"--- {i} of 3 ---\n{text}\n" for i, text in enumerate(texts, 1))


def test_json_has_the_report(folder, capsys):
    assert main(["generate", folder, PROMPT, "--max-new-tokens", "9", "--min-new-tokens", "9", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert isinstance(printed["text"], str) and len(printed["token_ids"]) == printed["tokens"] == 9
    assert printed["guarantee"] == "tokens" and printed["passes"] <= 9 and "seconds" in printed


def test_report_goes_to_stderr(folder, capsys):
    assert main(["generate", folder, PROMPT, "--max-new-tokens", "5", "--report"]) == 0
    assert "mean acceptance length" in capsys.readouterr().err


def test_progress_of_the_prompt_and_of_the_text_is_shown(folder, tokenizer, monkeypatch):
    shown = []
    monkeypatch.setattr(sys.modules["truedraft.cli.generate"], "waiting", lambda text: nullcontext(shown.append))
    assert main(["generate", folder, PROMPT, "--draft", "none", "--max-new-tokens", "3"]) == 0
    read = len(tokenizer(PROMPT)["input_ids"])
    assert shown == [f"reading the prompt: {read} of {read} tokens", *(f"writing: {n} tokens" for n in (1, 2, 3))]


def test_set_option_passes_generation_settings(model, tokenizer, folder, capsys):
    _, (text,) = plain(model, tokenizer, max_new_tokens=20, do_sample=False, bad_words_ids=[[70], [80]])
    assert main(["generate", folder, PROMPT, "--max-new-tokens", "20", "--set", "bad_words_ids=[[70], [80]]"]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_references_are_drafted_from(folder, tmp_path, capsys):
    assert main(["generate", folder, PROMPT, "--max-new-tokens", "20", "--min-new-tokens", "20"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "before.txt").write_text(PROMPT + printed)
    options = [
        "--max-new-tokens",
        "20",
        "--min-new-tokens",
        "20",
        "--reference",
        str(tmp_path / "before.txt"),
        "--json",
    ]
    assert main(["generate", folder, PROMPT, *options, "--control", "fixed"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "input-guided" in report["drafter"] and report["text"] + "\n" == printed


@pytest.mark.parametrize("given", [["-"], []])
def test_prompt_from_standard_input_and_file(given, folder, tmp_path, monkeypatch, capsys):
    assert main(["generate", folder, PROMPT, "--max-new-tokens", "8"]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert main(["generate", folder, *given, "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == expected
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    assert main(["generate", folder, "--file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == expected


def test_chat_uses_the_template(folder, tokenizer, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    assert main(["generate", folder, "<a cat>", "--max-new-tokens", "8"]) == 0
    expected = capsys.readouterr().out
    assert main(["generate", str(tmp_path / "chat"), "a cat", "--chat", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == expected
    assert main(["generate", folder, "a cat", "--max-new-tokens", "1", "--json"]) == 0
    end = str(json.loads(capsys.readouterr().out)["token_ids"][0])
    for args, said in (("--eos", end), True), (("--eos", end, "--chat"), False), (("--max-new-tokens", "1"), False):
        assert main(["generate", str(tmp_path / "chat"), "a cat", *args]) == 0
        assert ("add --chat" in capsys.readouterr().err) == said


def refused(capsys, *args: str) -> str:
    """The one line that a refused command line writes."""
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err


@pytest.mark.parametrize(
    "args, named",
    [
        (["x", "--temperature", "0.5"], "--temperature needs --sample"),
        (["x", "--eta-cutoff", "0.5"], "--eta-cutoff needs --sample"),
        (["x", "--sample", "--temperature", "0"], "--temperature 0 must be above 0: for the likeliest tokens drop"),
        (["x", "--sample", "--top-p", "2"], "--top-p 2"),
        (["x", "--sample", "--min-p=nan"], "--min-p nan"),
        (["x", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["x", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["x", "-n", "2"], "--num-return-sequences"),
        (["x", "--frob"], "--frob"),
        (["x", "--stop", ""], "--stop '' is empty"),
        (["x", "--min-new-tokens", "9", "--max-new-tokens", "3"], "--min-new-tokens 9 is above --max-new-tokens 3"),
        (["x", "--sample", "-n", "1000000000"], "--num-return-sequences 1000000000 must be between 1 and 10,000"),
        (["x", "--set", "max_length=5"], "use --max-new-tokens"),
        (["x", "--set", "bos_token_id=abc"], "--set bos_token_id=abc: give a token id"),
        (["x", "--set", "pad_token_id=True"], "--set pad_token_id=True: give a token id"),
        (["x", "--set", "forced_bos_token_id=[1]"], "--set forced_bos_token_id=[1]: give a token id"),
        (["x", "--set", "forced_eos_token_id=[9, -9]"], "give a token id or a list of them"),
        (["x", "--set", "forced_eos_token_id=[9, 300]"], "--set forced_eos_token_id 300: this model has 300 tokens"),
        (["x", "--set", "suppress_tokens=5"], "--set suppress_tokens=5: give a list of token ids"),
        (["x", "--set", "suppress_tokens=[300]"], "--set suppress_tokens 300: this model has 300 tokens"),
        (["x", "--set", "guidance_scale=much"], "--set guidance_scale=much: give a number"),
        (["x", "--set", "top_h=0.5"], "--set top_h needs --sample"),
        (["x", "--sample", "--set", "top_h={}"], "--set top_h={}: give a number"),
        (["x", "--set", "watermarking_config={'a': 1}"], "--set watermarking_config={'a': 1}: "),
        (["x", "--set", "cache_config={'a': 1}"], "cache_config={'a': 1}: truedraft keeps a cache of its own"),
        (["x", "--draft", "draft-model:model={}"], "model={}: give a model of transformers, or its name"),
        (["x", "--draft", "rest:corpus=3.5"], "corpus=3.5: give a Corpus, its file"),
        (["x", "--draft", "prompt-lookup:n=0"], "prompt-lookup:n=0: give a whole number, 1 to 1,024"),
        (["x", "--draft", "prompt-lookup:n=2,n=3"], "gives n twice"),
        (["x", "--draft", "early-exit:depth=3+skip-layers:depth=4"], "gives depth twice: its views share one drafter"),
        (["x", "--draft", "draft-model:model=5"], "model=5: give a model of transformers, or its name"),
        (["x", "--seed", "1"], "--seed 1 needs --sample"),
        (["x", "--sample", "--seed=-1"], "--seed -1"),
        (["x", "--sample", "--seed", str(2**64)], "--seed"),
        (["x", "--eos=-1"], "--eos -1"),
        (["x", "--eos", "300"], "--eos 300: this model has 300 tokens, 0 to 299"),
        (["x", "--threads", "0"], "--threads 0"),
        (["x", "--threads", "100000"], "--threads 100000"),
        (["x", "--json", "--json"], "--json was given 2 times"),
        (["x", "--draft", "none", "--draft", "auto"], "--draft was given 2 times"),
        (["x", "--sample", "--greedy"], "was given 2 times"),
        (["x", "--draft", "none:length=3"], "--draft none has no knobs"),
        (["x", "--draft", "suffix+"], "no drafter on one side of '+'"),
        (["x", "--draft", "suffix+non"], "'none'"),
        (["x", "--prompts", "nowhere.jsonl"], "--prompts and PROMPT were both given"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl cannot be read: No such file or directory"),
        (["--prompts", "."], "--prompts . cannot be read: Is a directory"),
        (["x", "--stream", "--json"], "--stream"),
        (["x", "--stream", "--sample", "-n", "2"], "--stream"),
        (["x", "--set", "num_beans=2"], "num_beams"),
        (["x", "--set", "num_beams"], "key=value"),
        (["x", "--set", "top_k=2"], "use --top-k"),
        (["x", "--set", "num_beams=2"], "num_beams"),
        (["x", "--set", "penalty_alpha=0.6"], "penalty_alpha"),
        (["x", "--dtype", "int8"], "--dtype int8"),
        (["x", "--draft", "prompt-lokup"], "prompt-lookup"),
        (["x", "--draft", "prompt-lookup:m=1"], "'m'"),
        (["x", "--control", "costs"], "'cost'"),
        (["x", "--chat"], "--chat"),
        (["x", "--file", "nowhere.txt"], "--file"),
        (["--file", "nowhere.txt"], "--file nowhere.txt"),
        (["x", "--reference", "nowhere.txt"], "--reference nowhere.txt"),
        ([""], "PROMPT is empty"),
        (["a " * 300], "the prompt has"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line_that_names_them(args, named, folder, capsys):
    assert named in refused(capsys, "generate", folder, *args)


EARLY = {
    "generate": [
        ["nano", "x", "--temperature", "0.5"], ["nano", "x", "--draft", "prompt-lokup"], ["nano", "x", "--rule", "foo"],
        ["nano", "x", "--draft", "suffix+prompt-lookup:m=1"], ["nano", "x", "--control", "foo"], ["nanoo", "x"],
        ["nano", "x", "--dtype", "int3"], ["nano", "x", "--quantize", "int3"], ["nano", "x", "--threads", "0"],
        ["./nowhere", "x"], ["nano", "--file", "nowhere"], ["nano", "--prompts", "nowhere"], ["nano", "x", "--eos=-1"],
        ["nano", "x", "--draft", "suffix:alpha=much"], ["nano", "x", "--reference", "nowhere"],
        ["nano", "x", "--draft", "suffix+prompt-lookup:n=1025"],
    ],
    "correct": [["nowhere"], ["README", "--draft", "foo"], ["-", "--model", "./nowhere"], ["-", "--batch", "0"]],
    "translate": [["nowhere", "--model", "nano-gec"], ["-", "--model", "./nowhere"]],
    "demo": [["--draft", "foo"], ["--model", "./nowhere"], ["--prompt", "nowhere"], ["--max-new-tokens", "0"]],
    "bench": [
        ["--draft", "auto", "--draft", "foo"], ["--prompts", "nowhere"], ["--html", "/nowhere/x"], ["--rounds", "0"],
        ["--max-new-tokens", "0"], ["--temperature", "nan"], ["--seed", "1"], ["--assistant", "./nowhere"],
        ["--replay", "nowhere", "--tokenizer", "nano", "--draft", "foo", "--threads", "1"], ["--control", "foo"],
        ["./nowhere"], ["--stretched", "0.7B"],
    ],
    "audit": [
        ["--draft", "foo"], ["--control", "foo"], ["--file", "nowhere"], ["--temperature", "1e-300"], ["--seed=-1"],
        ["./nowhere"], ["--threads", "0"],
    ],
    "train": [
        ["foo", "--target", "nano", "--data", "README", "--out", "x"],
        ["gad", "--target", "nano", "--data", "README", "--out", "README"],
        ["gad", "--target", "./nowhere", "--data", "README", "--out", "x"],
        ["gad", "--target", "nano", "--data", "nowhere", "--out", "x"],
    ],
    "corpus": [["build", "nowhere", "--tokenizer", "nano", "--out", "x"], ["info", "nowhere"]],
    "methods": [["--foo"]],
    "--version": [[]],
}  # fmt: skip


def test_arguments_are_checked_before_torch_is_loaded(tmp_path):
    """Names, numbers and files of every command; in one process, as a refused command loads nothing."""
    code = (
        "import contextlib, io, json, sys\n"
        "from truedraft.cli import main\n"
        "for command, lines in json.loads(sys.argv[1]).items():\n"
        "    for line in lines:\n"
        "        out, err = io.StringIO(), io.StringIO()\n"
        "        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "            code = main([command, *line])\n"
        "        expected = (0, 1, 0) if command == '--version' else (2, 0, 1)\n"
        "        found = (code, out.getvalue().count('\\n'), err.getvalue().count('\\n'))\n"
        "        assert found == expected, (command, line, found, err.getvalue())\n"
        "        assert not {'torch', 'transformers'} & set(sys.modules), (command, line)\n"
        "        assert 'Errno' not in err.getvalue(), err.getvalue()\n"
    )
    (tmp_path / "README").write_text("some text\n")
    command = [sys.executable, "-c", code, json.dumps(EARLY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def commands():
    """The arguments that call every command."""
    from typer.main import get_command

    for name, command in get_command(app).commands.items():
        yield from (
            ([name, sub] for sub in getattr(command, "commands", {})) if hasattr(command, "commands") else [[name]]
        )


@pytest.mark.parametrize("command", [[], ["corpus"], *commands()], ids=" ".join)
def test_help_has_an_example(command, capsys):
    assert main([*command, "-h"]) == 0
    assert f"Example: truedraft {' '.join(command)}" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"truedraft {truedraft.__version__} (Python 3.")


def test_version_names_compiled_parts_that_are_missing(capsys, monkeypatch):
    monkeypatch.setenv("TRUEDRAFT_NATIVE", "0")
    monkeypatch.setattr("truedraft.stores._native.library", lambda: None)
    assert main(["--version"]) == 0
    _, passes, drafts = capsys.readouterr().out.splitlines()
    assert "TRUEDRAFT_NATIVE=0" in passes and drafts.startswith("drafts are made by Python code")


def test_threads_option_sets_torch_threads(folder, capsys):
    before = torch.get_num_threads()
    try:
        assert main(["generate", folder, PROMPT, "--max-new-tokens", "2", "--threads", "1"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


PROMPTS = [PROMPT, "the dog", "she said, here is"]


@pytest.mark.parametrize("lines", [True, False])
def test_prompts_of_a_file_are_generated_in_order(lines, folder, tmp_path, capsys):
    options = ["--max-new-tokens", "8", "--sample", "--seed", "3"]
    alone = []
    for prompt in PROMPTS:
        assert main(["generate", folder, prompt, *options, "--json"]) == 0
        alone.append(json.loads(capsys.readouterr().out))
    path = tmp_path / ("many.jsonl" if lines else "many.txt")
    rows = [{"prompt": PROMPTS[0], "category": "b"}, {"turns": [PROMPTS[1]], "category": "a"}, {"text": PROMPTS[2]}]
    path.write_text("\n".join(map(json.dumps, rows)) if lines else "\n\n".join(PROMPTS))
    assert main(["generate", folder, "--prompts", str(path), *options, "--json"]) == 0
    many = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["token_ids"] for one in many] == [one["token_ids"] for one in alone]
    for stream in ("--stream", "--no-stream"):
        assert main(["generate", folder, "--prompts", str(path), *options, stream]) == 0
        written = [f"--- prompt {i} of 3 ---\n{one['text']}\n" for i, one in enumerate(alone, 1)]
        assert capsys.readouterr().out == "".join(written)


def test_invalid_prompts_are_refused_before_any_is_generated(folder, tmp_path, capsys):
    path = tmp_path / "many.txt"
    path.write_text("a cat\n\n" + "a " * 300)
    assert "prompt 2 of 2: the prompt has" in refused(capsys, "generate", folder, "--prompts", str(path))
    path.write_text("\n\n")
    assert "there are no prompts in it" in refused(capsys, "generate", folder, "--prompts", str(path))
    path.write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in refused(capsys, "generate", folder, "--prompts", str(path))
    path = tmp_path / "many.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    assert "line 2: its prompt is empty" in refused(capsys, "generate", folder, "--prompts", str(path))


def test_prompts_of_an_encoder_decoder_are_lines(tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("He go home.\nShe have a cat.\n")
    args = ["generate", "nano-gec", "--prompts", str(tmp_path / "lines.txt"), "--max-new-tokens", "12", "--json"]
    assert main(args) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("draft", ["none", "auto", "none+suffix", "none|prompt-lookup", "none>suffix", "suffix?none"])
def test_none_auto_and_compositions_are_accepted_as_drafters(draft, model, tokenizer):
    inputs = tokenizer(PROMPT, return_tensors="pt")
    settings = dict(max_new_tokens=30, do_sample=False, attention_mask=inputs["attention_mask"])
    fast = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed")
    assert fast.generate(inputs["input_ids"], **settings).equal(model.generate(inputs["input_ids"], **settings))
    assert (fast.report().drafter == "plain") == (draft == "none")


def test_none_in_lists_of_drafters(folder, tmp_path, capsys):
    (tmp_path / "p.txt").write_text(PROMPT)
    few = ["--max-new-tokens", "6"]
    bench = ["bench", folder, "--prompts", str(tmp_path / "p.txt"), "--draft", "none", "--rounds", "1", *few]
    assert main([*bench, "--no-baselines", "--json"]) == 0
    assert [f["side"] for f in json.loads(capsys.readouterr().out)["figures"]] == ["transformers", "no drafts"]
    assert main(["audit", folder, "--prompt", PROMPT, "--draft", "none", "--batch", "1", *few, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafters"] == ["plain"]
    assert main(["demo", "--model", folder, "--prompt", str(tmp_path / "p.txt"), "--draft", "none", *few]) == 0


def test_invalid_standard_input_is_refused(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "PROMPT is empty" in refused(capsys, "generate", folder)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x80"), encoding="utf-8"))
    assert "PROMPT on standard input is not UTF-8" in refused(capsys, "generate", folder)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "PROMPT is missing" in refused(capsys, "generate", folder)


def test_models_that_cannot_be_loaded_are_refused(tmp_path, folder, capsys):
    assert f"MODEL '{tmp_path / 'none'}' does not exist" in refused(capsys, "generate", str(tmp_path / "none"), "x")
    assert "no config.json" in refused(capsys, "generate", str(tmp_path), "x")
    BertModel(
        BertConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
            max_position_embeddings=8,
        )
    ).save_pretrained(tmp_path / "bert")  # fmt: skip
    assert "is not generative: it is a BertModel" in refused(capsys, "generate", str(tmp_path / "bert"), "x")
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"no tensors")
    assert f"MODEL '{damaged}' cannot be loaded" in refused(capsys, "generate", str(damaged), "x")


def changed(folder, path, change):
    """A copy of a model's folder whose checkpoint's tensors are changed."""
    shutil.copytree(folder, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda t: t.pop(UP), f"lacks 1 tensor ({UP})"),
        (lambda t: t.update({"model.layer": t.pop(UP)}), f"lacks 1 tensor ({UP})"),
        (lambda t: t.update({UP: torch.zeros(3, 32)}), f"has, in other shapes, 1 tensor ({UP} is 3x32, not 64x32)"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.1" in name], "lacks 9 tensors (model.layers.1."),
    ],
)
@pytest.mark.parametrize("as_draft", [False, True])
def test_a_checkpoint_without_some_of_its_weights_is_refused(change, named, as_draft, folder, tmp_path, capsys):
    name = changed(folder, tmp_path / "changed", change)
    args = [folder, "x", "--draft", f"draft-model:model={name}"] if as_draft else [name, "x"]
    printed = refused(capsys, "generate", *args, "--max-new-tokens", "2")
    assert named in printed and f"{name!r}" in printed and "config.json" in printed


def test_missing_experts_of_a_checkpoint_are_named(tokenizer, tmp_path, capsys):
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3,
    )  # fmt: skip
    for part in (MixtralForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path / "whole")
    lacking = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    name = changed(tmp_path / "whole", tmp_path / "changed", lambda tensors: tensors.pop(lacking))
    assert "model.layers.0.mlp.experts.gate_up_proj" in refused(capsys, "generate", name, "x")


def test_unused_tensors_are_noted_and_tied_heads_are_not(folder, tmp_path, capsys):
    assert main(["generate", folder, PROMPT, "--max-new-tokens", "5"]) == 0
    expected, silent = capsys.readouterr()
    assert silent == ""
    extra = changed(folder, tmp_path / "extra", lambda t: t.update({f"mtp.{i}": torch.zeros(1) for i in range(5)}))
    for draft, argument in (("none", "MODEL"), (f"draft-model:model={extra}", "the draft model")):
        given = extra if draft == "none" else folder
        assert main(["generate", given, PROMPT, "--max-new-tokens", "5", "--draft", draft]) == 0
        out, err = capsys.readouterr()
        assert out == expected
        assert err == (
            f"note: {argument} '{extra}': its checkpoint has 5 tensors (mtp.0, mtp.1, mtp.2 and 2 more) that "
            "LlamaForCausalLM does not use\n"
        )
    assert main(["generate", "nano", PROMPT, "--max-new-tokens", "2"]) == 0  # its head is its embedding
    assert capsys.readouterr().err == ""


def test_embedded_models(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(assets, "ROOT", tmp_path)
    shutil.copytree(folder, tmp_path / "nano")
    assert assets.names() == ["nano"] and assets.path("nano") == tmp_path / "nano"
    with pytest.raises(Refused, match="'nan': did you mean 'nano'"):
        assets.path("nan")
    assert "did you mean 'nano'" in refused(capsys, "generate", "nanoo", "x")
    model, tokenizer = _models.load("nano")
    assert model.dtype == torch.float32 and not model.training
    assert tokenizer.padding_side == "left" and tokenizer.pad_token == tokenizer.eos_token


def test_pieces_concatenate_to_the_text_and_hold_back_incomplete_characters(tokenizer):
    text = "a cat, één ‘naïve’ 🐈‍⬛ in 日本"
    pieces = Pieces(tokenizer)
    parts = [pieces.feed([i]) for i in tokenizer(text)["input_ids"]]
    assert "".join(parts) == text and not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert pieces.end() == ""
    cut = Pieces(tokenizer)
    assert cut.feed(tokenizer("a 🐈")["input_ids"][:-1]) + cut.end() == "a \N{REPLACEMENT CHARACTER}"


def test_demo_compares_both(folder, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    args = ["demo", "--model", folder, "--prompt", str(tmp_path / "prompt.txt"), "--max-new-tokens", "16"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert PROMPT in out and "speed-up" in out and "yes" in out and "\x1b" not in out


def test_demo_stretches_a_model(capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("one day, a little girl")
    args = ["demo", "--stretched", "7x512", "--draft", "eagle3", "--prompt", str(tmp_path / "prompt.txt")]
    assert main([*args, "--max-new-tokens", "12"]) == 0
    assert "nano stretched to 7x512, greedy." in capsys.readouterr().out
    assert "--stretched big: give 0.1B or 0.5B" in refused(capsys, "demo", "--stretched", "big")


def test_demo_prints_where_tokens_differ(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    generate = accelerated.Accelerated.generate

    def wrong(self, *args, **kwargs):
        out = generate(self, *args, **kwargs)
        out[0, -1] += 1
        return out

    monkeypatch.setattr(accelerated.Accelerated, "generate", wrong)
    args = ["demo", "--model", folder, "--prompt", str(tmp_path / "prompt.txt"), "--max-new-tokens", "1"]
    assert main(args) == 1
    assert "prompt.txt: differs from new token 0 on" in capsys.readouterr().out


def test_audit_refuses_a_length_beyond_the_context(folder, capsys):
    assert "leaves no room" in refused(capsys, "audit", folder, "--prompt", "x", "--max-new-tokens", str(10**30))


def test_demo_refuses_encoder_decoders_and_long_prompts(folder, tmp_path, capsys):
    assert "'nano-gec' is an encoder-decoder" in refused(capsys, "demo", "--model", "nano-gec")
    (tmp_path / "long.txt").write_text("a " * 300)
    args = ["demo", "--model", folder, "--prompt", str(tmp_path / "long.txt")]
    assert "the model's context has 256" in refused(capsys, *args)


def test_first_difference():
    assert demo.first_difference([1, 2], [1, 2]) is None
    assert demo.first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert demo.first_difference([1, 2], [1, 2, 3]) == 2


def test_demo_prompts(tmp_path, capsys):
    story, edit = demo.cases(None, None, None)
    instruction, _, source = edit.text.removeprefix("<|edit|>").removesuffix("<|result|>").partition("\n")
    assert (story.tokens, edit.tokens) == (200, 400)
    assert ast.parse(source) and 25 <= source.count("\n") + 1 <= 40 and instruction == "Rename total to amount."
    (tmp_path / "a.py").write_text("x = 1\n")
    assert demo.cases(tmp_path / "a.py", "Rename x to y.", 7)[0].text == "<|edit|>Rename x to y.\nx = 1<|result|>"
    assert "--instruction needs --prompt" in refused(capsys, "demo", "--instruction", "Rename x to y.")
    assert "--prompt nowhere.py" in refused(capsys, "demo", "--prompt", "nowhere.py")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_prints_the_text_so_far(folder, tmp_path, monkeypatch, capsys):
    many = "20000"
    options = ["--stream", "--report", "--min-new-tokens", many, "--max-new-tokens", many]
    with (tmp_path / "printed").open("w") as printed:
        monkeypatch.setattr(sys, "stdout", printed)
        wrote = (tmp_path / "printed").stat
        assert interrupted(["generate", folder, PROMPT, *options], lambda: wrote().st_size > 4) == 130
    err = capsys.readouterr().err
    assert (tmp_path / "printed").read_bytes().endswith(b"\n")
    assert "interrupted" in err and "Traceback" not in err and "warn" not in err.lower()
