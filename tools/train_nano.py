"""Train the embedded models: `nano` and `nano-draft`, one tokenizer for both.

Real text only: stories and plays from files given by path, and the standard library of the Python that runs this
script. Editing tasks are made from both (a file, an instruction, the edited file), as training data of real
files for copy-heavy generation. Training is limited by time: the learning rate is constant, then falls to zero.

    python tools/train_nano.py tokenizer --stories FILE --plays FILE --out runs/nano
    python tools/train_nano.py model     --stories FILE --plays FILE --out runs/nano --size nano --minutes 120
    python tools/train_nano.py export    --out runs/nano --size nano --to src/truedraft/assets/nano
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import io
import json
import keyword
import os
import random
import re
import sys
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from truedraft.assets import edit_prompt
from truedraft.train.loop import Muon

END, EDIT, RESULT = "<|end|>", "<|edit|>", "<|result|>"
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{space}\p{{L}}+|\p{{N}}|_"
REST = r"| ?[^\s\p{L}\p{N}_]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPACED = 1200  # entries of the vocabulary that are another entry with a leading space
SIZES = {
    "nano": dict(hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8),
    "nano-draft": dict(hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4),
}
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "__pycache__"}
NAMES = [
    "lily",
    "tom",
    "tim",
    "max",
    "sue",
    "ben",
    "mia",
    "sam",
    "anna",
    "jack",
    "lucy",
    "spot",
    "bob",
    "sara",
    "timmy",
    "jane",
    "fin",
    "amy",
    "john",
    "leo",
    "ella",
    "kate",
]


# ---------------------------------------------------------------- text


def stories(path: Path) -> list[str]:
    return [s.strip() for s in re.split(r"(?<!\n)\n(?!\n)", path.read_text()) if len(s) > 200]


def plays(path: Path, lines: int = 40) -> list[str]:
    parts = path.read_text().split("\n\n")
    return ["\n\n".join(parts[i : i + lines // 4]) for i in range(0, len(parts), lines // 4)]


def library() -> list[str]:
    """Every module of the standard library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                try:
                    files.append((Path(folder) / name).read_text())
                except UnicodeDecodeError:
                    continue
    return files


def functions(source: str, longest: int = 45) -> Iterator[str]:
    """Functions and short classes of a module, dedented."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            first = min([node.lineno] + [d.lineno for d in node.decorator_list])
            block = lines[first - 1 : node.end_lineno]
            if 4 <= len(block) <= longest:
                indent = node.col_offset
                yield "\n".join(line[indent:] for line in block)


def variables(source: str) -> list[str]:
    """Names that a piece of code assigns, takes as arguments or keeps on self."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return []
    found = {n.arg for n in nodes if isinstance(n, ast.arg)}
    found |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    found |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return sorted(found)


def held_out(text: str) -> bool:
    return int(hashlib.sha1(text[:400].encode()).hexdigest(), 16) % 50 == 0


# ---------------------------------------------------------------- edits


@dataclass
class Edits:
    """Makes editing tasks: a text, an instruction, the edited text."""

    names: list[str]  # identifiers that a variable may be renamed to
    words: set[str]  # words frequent enough that a typo in them can be recognised

    def __post_init__(self) -> None:
        self.plain = sorted(self.words)

    def of(self, text: str, rng: random.Random, code: bool) -> tuple[str, str, str] | None:
        kind = rng.choices(["rename", "typos", "comments"], [6, 2, 2 if code else 0])[0]
        return getattr(self, kind)(text, rng, code)

    def disguised(self, text: str, rng: random.Random, code: bool) -> str:
        """The text with half of its words exchanged for others, so that it can be copied but not guessed."""
        pool = self.names if code else self.plain
        found = sorted(set(re.findall(r"\b[A-Za-z_]\w+\b" if code else r"\b[a-z]{4,}\b", text)))
        swapped = {
            w: rng.choice(pool) for w in found if w not in KEPT and not keyword.iskeyword(w) and rng.random() < 0.5
        }
        return re.sub(r"\b[A-Za-z_]\w+\b", lambda m: swapped.get(m.group(), m.group()), text)

    def rename(self, text: str, rng: random.Random, code: bool) -> tuple[str, str, str] | None:
        if code:
            found = Counter(re.findall(r"\b[A-Za-z_]\w+\b", text))
            olds = [w for w in variables(text) if found[w] >= 2 and w not in KEPT]
            pool = self.names
        else:
            found = Counter(re.findall(r"\b[a-z]+\b", text))
            olds = [w for w in NAMES if found[w] >= 2]
            pool = NAMES
        if not olds:
            return None
        old, new = rng.choice(olds), rng.choice(pool)
        if new in found:
            return None
        return text, f"Rename {old} to {new}.", re.sub(rf"\b{old}\b", new, text)

    def typos(self, text: str, rng: random.Random, code: bool) -> tuple[str, str, str] | None:
        spots = [m for m in re.finditer(r"\b[a-z]{5,}\b", text) if m.group() in self.words]
        if not spots:
            return None
        damaged = text
        for m in sorted(rng.sample(spots, min(len(spots), rng.randint(1, 4))), key=lambda m: -m.start()):
            i = m.start() + rng.randint(1, len(m.group()) - 3)
            a, b = damaged[i], damaged[i + 1]
            hurt = rng.choice([b + a, a, a + b + b])  # swapped, one lost, one doubled
            damaged = damaged[:i] + hurt + damaged[i + 2 :]
        return (damaged, "Fix the typos.", text) if damaged != text else None

    def comments(self, text: str, rng: random.Random, code: bool) -> tuple[str, str, str] | None:
        try:
            marks = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
        except (tokenize.TokenError, IndentationError, SyntaxError):
            return None
        if not marks:
            return None
        lines: list[str | None] = list(text.split("\n"))
        for mark in marks:
            row, col = mark.start
            line = (lines[row - 1] or "")[:col].rstrip()
            lines[row - 1] = line or None
        return text, "Remove the comments.", "\n".join(line for line in lines if line is not None)


KEPT = {"self", "cls", "None", "True", "False"} | set(dir(__builtins__))


# ---------------------------------------------------------------- corpus


class Corpus:
    """Documents by domain, tokenised once; `rows` packs whole documents from the start of each row."""

    def __init__(self, args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast):
        raw = {"story": stories(args.stories), "play": plays(args.plays), "python": library()}
        self.tokenizer, self.share = tokenizer, args.edits
        self.snippets: dict[str, dict[bool, list[str]]] = {
            "python": {True: [], False: []},
            "story": {True: [], False: []},
        }
        for source in raw["python"]:
            for block in functions(source):
                self.snippets["python"][held_out(source)].append(block)
        for story in raw["story"]:
            self.snippets["story"][held_out(story)].append(story)
        words = Counter(w for d in raw.values() for t in d for w in re.findall(r"\b[a-z]{5,}\b", t))
        identifiers = Counter(
            w for t in self.snippets["python"][False] for w in re.findall(r"\b[a-z_][a-z_0-9]{2,14}\b", t)
        )
        self.edits = Edits(
            [w for w, n in identifiers.items() if n >= 8 and not keyword.iskeyword(w) and w not in KEPT],
            {w for w, n in words.items() if n >= 60},
        )
        self.ids: dict[tuple[str, bool], list[list[int]]] = {}
        for domain, texts in raw.items():
            for val in (False, True):
                chosen = [t for t in texts if held_out(t) == val]
                self.ids[domain, val] = tokenizer(chosen)["input_ids"] if chosen else []
        print({k: (len(v), sum(map(len, v))) for k, v in self.ids.items()}, flush=True)

    def edit(self, rng: random.Random, val: bool, longest: int) -> tuple[list[int], list[int]]:
        """One editing task as (prompt ids, result ids), at most `longest` tokens together."""
        while True:
            code = rng.random() < 0.7
            text = rng.choice(self.snippets["python" if code else "story"][val])
            if not code:  # one to three paragraphs
                paragraphs = text.split("\n\n")
                start = rng.randrange(len(paragraphs))
                text = "\n\n".join(paragraphs[start : start + rng.randint(1, 3)])
            if not val and rng.random() < 0.5:
                text = self.edits.disguised(text, rng, code)
            made = self.edits.of(text, rng, code)
            if made is None:
                continue
            before, instruction, after = made
            prompt = self.tokenizer(edit_prompt(before, instruction))["input_ids"]
            result = self.tokenizer(after)["input_ids"]
            if len(prompt) + len(result) < longest:
                return prompt, result

    def document(self, rng: random.Random, val: bool, length: int) -> tuple[list[int], list[float]]:
        """Token ids and their weights in the loss: in an edit, changed tokens have the largest."""
        rest = 1 - self.share
        shares = [self.share, 0.51 * rest, 0.44 * rest, 0.05 * rest]
        domain = rng.choices(["edit", "story", "python", "play"], shares)[0]
        if domain == "edit":
            prompt, result = self.edit(rng, val, length - 2)
            return prompt + result, [GIVEN] * len(prompt) + changes(prompt, result)
        ids = rng.choice(self.ids[domain, val])
        if len(ids) > length:  # a long module: a window of it
            start = rng.randrange(len(ids) - length // 2)
            ids = ids[start : start + length]
        return ids, [1.0] * len(ids)

    def rows(self, rng: random.Random, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of whole documents, packed; (count, length + 1) each."""
        end = self.tokenizer.eos_token_id
        ids, weights = torch.empty(count, length + 1, dtype=torch.long), torch.empty(count, length + 1)
        for i in range(count):
            row, counts = [end], [1.0]
            while len(row) <= length:
                document, weight = self.document(rng, False, length)
                row += document + [end]
                counts += weight + [1.0]
            ids[i], weights[i] = torch.tensor(row[: length + 1]), torch.tensor(counts[: length + 1])
        return ids, weights


GIVEN, CHANGED = 0.1, 3.0  # weights in the loss: of the text to edit, and of changed tokens; copied ones have 1


def changes(prompt: list[int], result: list[int]) -> list[float]:
    """The weights of an edit's result: larger for tokens that are not copied, and for the first ones copied again."""
    weights = [1.0] * len(result)
    for kind, _, _, first, last in difflib.SequenceMatcher(None, prompt, result, autojunk=False).get_opcodes():
        if kind != "equal":
            for i in range(first, min(last + 1, len(result))):
                weights[i] = CHANGED
    return weights


def pre_tokenizer(space: str) -> pre_tokenizers.PreTokenizer:
    """A split into words and punctuation; `space` is the pattern of an optional space before a word."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD.format(space=space) + REST), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer(args: argparse.Namespace) -> None:
    """Byte-level BPE in which a word has the same entries in every context, except for a leading space.

    Merges are trained on bare words; those of the space with a first piece come last. With merges across spaces,
    brackets or dots one identifier has half a dozen spellings, and renaming it cannot be learnt in the training time
    of a CPU.
    """
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizer("")
    trainer = trainers.BpeTrainer(
        vocab_size=4096 - SPACED,
        special_tokens=[END, EDIT, RESULT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    code = library()
    texts = stories(args.stories) + plays(args.plays) + code[:: max(1, len(code) // 350)]
    tok.train_from_iterator(texts, trainer)
    tok.pre_tokenizer = pre_tokenizer(" ?")
    spaced: Counter[str] = Counter()
    for encoded in tok.encode_batch(texts, add_special_tokens=False):
        pairs = zip(encoded.tokens, encoded.tokens[1:], strict=False)
        spaced.update(piece for mark, piece in pairs if mark == "\u0120" and piece.isalpha() and piece.isascii())
    model = json.loads(tok.to_str())["model"]
    vocabulary, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    for piece, _ in spaced.most_common(SPACED):
        vocabulary["\u0120" + piece] = len(vocabulary)
        merges.append(("\u0120", piece))
    tok.model = models.BPE(vocabulary, merges)
    tok.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        eos_token=END,
        bos_token=END,
        pad_token=END,
        additional_special_tokens=[EDIT, RESULT],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(args.out / "tokenizer")
    for sample in ("    def name(self, total):\n        self.total += (total)\n", "one day, a little girl named lily"):
        print(fast.convert_ids_to_tokens(fast(sample)["input_ids"]))


def adopt(model: LlamaForCausalLM, old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast) -> None:
    """Embeddings for another tokenizer: of the same entry, else the mean of the old entries of its text."""
    before, old_ids = model.get_input_embeddings().weight.detach().clone(), old.get_vocab()
    model.resize_token_embeddings(len(new))
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        for entry, index in new.get_vocab().items():
            if entry in old_ids:
                table[index] = before[old_ids[entry]]
            else:
                spelt = old(new.decode([index]), add_special_tokens=False)["input_ids"]
                table[index] = before[spelt].mean(0) if spelt else before.mean(0)


# ---------------------------------------------------------------- model


def build(size: str, vocabulary: int, end: int) -> LlamaForCausalLM:
    shape = SIZES[size]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            num_key_value_heads=shape["num_attention_heads"] // 2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
            **shape,
        )
    )


@torch.no_grad()
def validate(model: LlamaForCausalLM, corpus: Corpus, length: int, edits: int) -> dict[str, float]:
    """Loss per domain on held-out documents, and the share of held-out edits done without a single wrong token."""
    model.eval()
    rng, report = random.Random(7), {}
    end = corpus.tokenizer.eos_token_id
    for domain in ("story", "python", "play"):
        docs = [d[:length] for d in corpus.ids[domain, True] if len(d) > 64][:48]
        total = count = 0.0
        for d in docs:
            ids = torch.tensor([[end] + d])
            total += model(ids, labels=ids).loss.item() * len(d)
            count += len(d)
        report[domain] = round(total / max(count, 1), 4)
    exact = right = count = 0.0
    for _ in range(edits):
        prompt, result = corpus.edit(rng, True, min(length, 700))
        ids = torch.tensor([[end] + prompt + result + [end]])
        guess = model(ids).logits[0, -len(result) - 2 : -1].argmax(-1)
        hit = guess == ids[0, -len(result) - 1 :]
        # teacher forcing: all argmaxes right is exactly "greedy decoding generates the whole result"
        exact, right, count = exact + bool(hit.all()), right + hit.sum().item(), count + len(hit)
    report["edit_exact"], report["edit_token"] = round(exact / edits, 4), round(right / count, 5)
    model.train()
    return report


def train_model(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "tokenizer")
    corpus = Corpus(args, tokenizer)
    folder = args.out / args.size
    folder.mkdir(parents=True, exist_ok=True)
    if args.start:
        model = LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
        before = PreTrainedTokenizerFast.from_pretrained(args.start)
        if before.get_vocab() != tokenizer.get_vocab():
            adopt(model, before, tokenizer)
    else:
        model = build(args.size, len(tokenizer), tokenizer.eos_token_id)
    model.train()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        Muon(matrices, lr=args.lr),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    log = (folder / "log.jsonl").open("a")
    print(f"{args.size}: {model.num_parameters():,} parameters", flush=True)
    start, step, tokens, smooth, last = time.monotonic(), 0, 0, None, 0.0
    while (progress := (time.monotonic() - start) / 60 / args.minutes) < 1:
        length = args.context // (1 if progress > 0.6 or args.start else 2 if progress > 0.15 else 4)
        scale = min(1.0, (step + 1) / 100) * min(1.0, (1 - progress) / args.decay + 0.01)
        for opt in optimizers:
            for group in opt.param_groups:
                group["lr"] = args.lr * scale
        batch, weights = corpus.rows(rng, args.batch // length, length)
        loss, share = 0.0, weights[:, 1:] / weights[:, 1:].sum()
        for part, counts in zip(batch.split(args.micro // length), share.split(args.micro // length), strict=True):
            logits = model(part[:, :-1]).logits
            each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
            piece = (each * counts.flatten()).sum()
            piece.backward()
            loss += piece.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in optimizers:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + batch[:, 1:].numel()
        smooth = loss if smooth is None else 0.97 * smooth + 0.03 * loss
        minutes = (time.monotonic() - start) / 60
        if step % 25 == 0:
            print(f"{minutes:6.1f} min  step {step}  {tokens / 1e6:.2f} M tokens  loss {smooth:.3f}", flush=True)
        if minutes - last >= args.every and minutes < args.minutes:
            last = minutes
            save(model, tokenizer, folder)
            row = {
                "run": args.seed,
                "edits": args.edits,
                "minutes": round(minutes, 1),
                "tokens": tokens,
                "train": round(smooth, 4),
                **validate(model, corpus, args.context, 40),
            }
            print(row, flush=True)
            print(json.dumps(row), file=log, flush=True)
    save(model, tokenizer, folder)
    row = {
        "run": args.seed,
        "edits": args.edits,
        "minutes": args.minutes,
        "tokens": tokens,
        "train": round(smooth or 0.0, 4),
        **validate(model, corpus, args.context, 200),
    }
    print(json.dumps(row), file=log, flush=True)
    print(row, flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


CARD = """---
license: apache-2.0
language: en
---
# {size}

A Llama of {parameters:,} parameters (bf16, {layers} layers x {hidden}, byte-level BPE of {vocabulary} entries,
trained at a context of {context}), embedded in truedraft so that its demo, tests and benchmarks run with no download.
It writes small stories and Python, and carries out simple edits of a text, renaming best, not always without a slip:
see the validation below. It is a toy: do not expect facts or working code.

An edit is asked for as `<|edit|>INSTRUCTION`, a new line, `TEXT<|result|>`, for instance with `Rename total to
amount.`, `Fix the typos.` or `Remove the comments.`; the answer ends with `<|end|>`.

## Data

| text | licence | share of the documents |
|---|---|---|
| editing tasks made from the Python functions and stories below | as below | {edits} |
| TinyStories (Eldan and Li 2023), a lower-cased sample of 4 MB | CDLA-Sharing-1.0 | half of the rest |
| the standard library of Python {python}, tests and tables left out | PSF-2.0 | most of the other half |
| tiny Shakespeare | public domain | a little |

One document in fifty is held out, by a hash of its beginning; editing tasks for validation come from held-out ones.

## Validation over time

Loss in nats per token on held-out documents; the last columns are held-out edits done without one wrong token under
greedy decoding, and the share of their tokens that are right given the true text before.{note}

| tokens seen | stories | Python | plays | edits right | edit tokens right |
|---|---|---|---|---|---|
{rows}

## Train it again

    python tools/train_nano.py tokenizer --stories FILE --plays FILE --out RUN
    python tools/train_nano.py model --stories FILE --plays FILE --out RUN --size {size} --minutes 120
    python tools/train_nano.py export --out RUN --size {size} --to src/truedraft/assets/{size}
"""


def export(args: argparse.Namespace) -> None:
    """bf16 weights, the tokenizer that puts the document mark in front, and the card, as they ship."""
    model = LlamaForCausalLM.from_pretrained(args.out / args.size / "model", dtype=torch.bfloat16)
    model.save_pretrained(args.to)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "tokenizer")
    mark = [(END, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{END} $A", None, mark)
    tokenizer.save_pretrained(args.to)
    logs = [json.loads(line) for line in (args.out / args.size / "log.jsonl").read_text().splitlines()]
    before = 0
    lines = []
    for i, row in enumerate(logs):  # a continued run counts its tokens anew
        last = logs[i - 1] if i else row
        if row["tokens"] < last["tokens"] or row.get("run") != last.get("run"):
            before += last["tokens"]
        cells = [f"{(before + row['tokens']) / 1e6:.1f} M", row["story"], row["python"], row["play"]]
        cells += [f"{row['edit_exact']:.0%}", f"{row['edit_token']:.1%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    config = model.config
    card = CARD.format(
        size=args.size,
        parameters=model.num_parameters(),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        context=args.context,
        python=".".join(map(str, sys.version_info[:2])),
        edits=", then ".join(dict.fromkeys(f"{row.get('edits', 0.45):.0%}" for row in logs)),
        rows="\n".join(lines),
        note=f"\n\n{args.note}" if args.note else "",
    )
    (args.to / "README.md").write_text(card)
    (args.to / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["tokenizer", "model", "export"])
    parser.add_argument("--stories", type=Path, help="TinyStories, one story a line block")
    parser.add_argument("--plays", type=Path, help="tiny Shakespeare")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--to", type=Path, help="where `export` writes")
    parser.add_argument("--note", help="a remark on the validation, for the card")
    parser.add_argument("--size", choices=list(SIZES), default="nano")
    parser.add_argument("--start", type=Path, help="continue from these weights, at full context")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=10.0, help="minutes between validations")
    parser.add_argument("--batch", type=int, default=6144, help="tokens per step")
    parser.add_argument("--micro", type=int, default=2048, help="tokens per forward")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--edits", type=float, default=0.45, help="share of the documents that are editing tasks")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--decay", type=float, default=0.35, help="share of the time in which the learning rate falls")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    {"tokenizer": train_tokenizer, "model": train_model, "export": export}[args.job](args)


if __name__ == "__main__":
    sys.exit(main())
