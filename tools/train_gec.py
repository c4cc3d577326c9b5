"""Train `nano-gec`, the embedded encoder-decoder that corrects English.

Text that may be shipped, given by path (stories, articles, speeches, the examples of a dictionary) and the docstrings
of the Python that runs this script; new errors are inserted each time it is read (`gec_errors`).

    python tools/train_gec.py data      --stories FILE --chats FILE --articles FILE FILE --speeches FOLDER \\
                                        --examples FOLDER --out RUN
    python tools/train_gec.py tokenizer --out RUN
    python tools/train_gec.py model     --out RUN --misspelt FILE --minutes 120 [--start FOLDER]
    python tools/train_gec.py export    --out RUN --to src/truedraft/assets/nano-gec
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PegasusForConditionalGeneration, PreTrainedTokenizerFast

from gec_errors import WORD, Errors, misspellings
from train_nano import NAMES, library
from train_translation import LONGEST, build, tokenizer_of
from truedraft.train.batches import bucketed, longer_side, pad_to
from truedraft.train.loop import Plan, Run, fit

VOCABULARY = 6144
RARE = 100  # a character with fewer occurrences in the text is mapped to the unknown token
MARKS = {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\xa0": " "}
SHAPE = dict(
    d_model=256,
    encoder_layers=5,
    decoder_layers=3,
    encoder_ffn_dim=1024,
    decoder_ffn_dim=1024,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
)
CHANGED = 2.0  # weight in the loss of a token that is not copied, and of the first one copied again
TOKENIZED = 0.15  # share of sentences in the style of tokenized corpora, with spaces around punctuation


# ---------------------------------------------------------------- text

BREAK = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z])")


def sentences(paragraph: str) -> Iterator[str]:
    """Sentences of a paragraph that read like plain English."""
    for sentence in BREAK.split(" ".join(paragraph.split())):
        words = WORD.findall(sentence)
        letters = sum(map(len, words))
        if (
            4 <= len(words) <= 45
            and len(sentence) <= 260
            and letters > 0.74 * len(sentence)
            and sentence[0].isupper()
            and sentence[-1] in ".!?\"'"
            and sentence.isprintable()
            and not re.search(r"[_<>{}|\\=`*@/#~^$%]|[^\x00-\x7f–—’‘“”é]", sentence)
            and sentence.count("(") == sentence.count(")")
        ):
            yield sentence.translate(str.maketrans("‘’“”–—", "''\"\"--"))


def stories(path: Path) -> Iterator[str]:
    """Lower-cased stories with their capitals back: at the beginnings of sentences, for `I` and for names."""
    names = re.compile(rf"\b({'|'.join(NAMES)}|god|christmas|monday|sunday|mr|mrs)\b")
    for paragraph in path.read_text().split("\n"):
        text = names.sub(lambda m: m.group().capitalize(), paragraph)
        text = re.sub(r"\bi\b", "I", text)
        text = re.sub(r"(^|[.!?]['\"]? |[\"] ?)([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)
        text = re.sub(
            r"([,a-z]\" )([A-Z])(?=\w* (said|asked|replied|and)|e |he |hey )",
            lambda m: m.group(1) + m.group(2).lower(),
            text,
        )
        yield from sentences(text)


def articles(path: Path) -> Iterator[str]:
    """Articles from a tokenized corpus, as they are printed."""
    for line in path.read_text().split("\n"):
        if line.strip().startswith("="):
            continue
        line = re.sub(r" @(.)@ ", r"\1", line.strip())
        line = re.sub(r'" (.*?) "', r'"\1"', line)
        line = re.sub(r" ([,.;:!?)\]%]|'s\b|'\s|n't\b|'re\b|'ve\b|'ll\b|'d\b|'m\b)", r"\1", line)
        line = re.sub(r"([(\[]) ", r"\1", line)
        for sentence in sentences(line):
            if "unk" not in sentence:
                yield sentence


def chats(path: Path) -> Iterator[str]:
    for line in path.read_text().split("\n"):
        yield from sentences(line.partition(": ")[2].replace("<|endoftext|>", ""))


def speeches(folder: Path) -> Iterator[str]:
    """State of the Union addresses since 1900."""
    for path in sorted(folder.glob("*.txt")):
        if int(path.name[:4]) >= 1900:
            text = re.sub(r"\(?(Applause|Laughter)\.?\)?", "", path.read_text(errors="ignore"))
            yield from sentences(text)


def examples(folder: Path) -> Iterator[str]:
    """The example sentences of WordNet, as sentences."""
    for name in ("data.noun", "data.verb", "data.adj", "data.adv"):
        for line in (folder / name).read_text(errors="ignore").split("\n"):
            for example in re.findall(r'"([^"]+)"', line.partition("|")[2]):
                example = re.sub(r"\bi\b", "I", example.strip())
                whole = example[:1].upper() + example[1:] + ("" if example[-1:] in ".!?" else ".")
                if len(whole.split()) >= 5:
                    yield from sentences(whole)


def docstrings() -> Iterator[str]:
    for source in library():
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    yield from sentences(paragraph)


def held_out(text: str) -> bool:
    return int(hashlib.sha1(text.encode()).hexdigest(), 16) % 200 == 0


def gather(args: argparse.Namespace) -> None:
    """Sentences of every source, each once, in one file per use."""
    sources = {
        "stories": stories(args.stories),
        "chats": chats(args.chats),
        "articles": (s for path in args.articles for s in articles(path)),
        "speeches": speeches(args.speeches),
        "examples": examples(args.examples),
        "docstrings": docstrings(),
    }
    seen: set[str] = set()
    files: dict[bool, list[str]] = {False: [], True: []}
    rng = random.Random(0)
    for name, source in sources.items():
        found = [s for s in source if s not in seen]
        found = list(dict.fromkeys(found))
        if name == "stories":  # many similar sentences
            found = rng.sample(found, min(len(found), 30_000))
        seen.update(found)
        for sentence in found:
            files[held_out(sentence)].append(sentence)
        print(name, len(found), found[:2], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for val, lines in files.items():
        rng.shuffle(lines)
        (args.out / ("held_out.txt" if val else "train.txt")).write_text("\n".join(lines))


def tokenized(sentence: str) -> str:
    """A sentence in the style of tokenized corpora: `do n't`, `Tom 's`, ` ,`."""
    sentence = re.sub(r"(?<=[a-z])n't\b", " n't", sentence)
    sentence = re.sub(r"(?<=\w)'(s|re|ve|ll|d|m)\b", r" '\1", sentence)
    sentence = re.sub(r"([,;:!?()\"])", r" \1 ", sentence)
    return " ".join(re.sub(r"\.(?=[\"')\s]*$)", " .", sentence).split())


# ---------------------------------------------------------------- tokenizer, batches


def train_tokenizer(args: argparse.Namespace) -> None:
    """Train the byte-level BPE; each line ends with the end token."""
    lines = (args.out / "train.txt").read_text().split("\n")
    fast = restricted(tokenizer_of(lines, VOCABULARY), lines)
    fast.save_pretrained(args.out / "tokenizer")
    for line in lines[:3]:
        print(fast.convert_ids_to_tokens(fast(line)["input_ids"]))
    counts = [len(ids) for ids in fast(lines[:5000])["input_ids"]]
    print("tokens a sentence", sum(counts) / len(counts), "words", sum(len(s.split()) for s in lines[:5000]) / 5000)


def restricted(fast: PreTrainedTokenizerFast, lines: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that maps typographic marks to plain ones, and rare characters to the unknown token."""
    whole = json.loads(fast.backend_tokenizer.to_str())
    split = fast.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    counts = Counter(c for line in lines for piece, _ in split(line) for c in piece)
    rare = {c for c in pre_tokenizers.ByteLevel.alphabet() if counts[c] < RARE}
    vocabulary = whole["model"]["vocab"]
    assert not any(rare & set(token) for token in vocabulary if len(token) > 1 and token not in fast.all_special_tokens)
    whole["model"]["vocab"] = {f"<rare {i}>" if token in rare else token: i for token, i in vocabulary.items()}
    whole["model"]["unk_token"] = fast.unk_token
    tok = Tokenizer.from_str(json.dumps(whole))
    tok.normalizer = normalizers.Sequence([normalizers.Replace(mark, plain) for mark, plain in MARKS.items()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, model_max_length=fast.model_max_length, clean_up_tokenization_spaces=False,
        **fast.special_tokens_map,
    )  # fmt: skip


class Pairs:
    """Endless batches of sentences with errors and without, of about `tokens` positions, longest padded."""

    def __init__(self, args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer, self.tokens, self.seed = tokenizer, args.batch, args.seed
        self.lines = (args.out / "train.txt").read_text().split("\n")
        self.kept = (args.out / "held_out.txt").read_text().split("\n")
        words = Counter(w.lower() for s in self.lines for w in WORD.findall(s))
        self.errors = Errors(misspellings(args.misspelt, {w for w, n in words.items() if n >= 3}))

    def pair(self, line: str, rng: random.Random) -> tuple[str, str]:
        right = tokenized(line) if rng.random() < TOKENIZED else line
        return self.errors.hurt(right, rng), right

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for group in bucketed(self.endless(), self.tokens, self.seed):
            yield self.batch([a for a, _ in group], [b for _, b in group])

    def endless(self) -> Iterator[tuple[list[int], list[int]]]:
        rng = random.Random(self.seed)
        while True:
            lines = [self.pair(rng.choice(self.lines), rng) for _ in range(256)]
            sources = self.tokenizer([a for a, _ in lines])["input_ids"]
            pairs = zip(sources, self.tokenizer([b for _, b in lines])["input_ids"], strict=True)
            yield from (pair for pair in pairs if longer_side(pair) <= LONGEST)

    def batch(self, sources: list[list[int]], targets: list[list[int]]) -> dict[str, torch.Tensor]:
        """Sources, labels, and the weight of each label in the loss: larger where target and source differ."""
        pad = self.tokenizer.pad_token_id
        ids = pad_to(sources, pad)
        counts = [changes(a, b) for a, b in zip(sources, targets, strict=True)]
        return dict(
            input_ids=ids,
            attention_mask=(ids != pad).long(),
            labels=pad_to(targets, -100),
            counts=pad_to(counts, 0.0),
        )


def changes(source: list[int], target: list[int]) -> list[float]:
    """The weight of each token of the target in the loss."""
    weights = [1.0] * len(target)
    for kind, _, _, first, last in difflib.SequenceMatcher(None, source, target, autojunk=False).get_opcodes():
        if kind != "equal":
            weights[first : last + 1] = [CHANGED] * len(weights[first : last + 1])
    return weights


def train_model(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "tokenizer")
    pairs = Pairs(args, tokenizer)
    model = build(tokenizer, SHAPE, dropout=0.0)
    if args.start:
        model.load_state_dict(PegasusForConditionalGeneration.from_pretrained(args.start).state_dict())
    print(f"{model.num_parameters():,} parameters, {len(pairs.lines):,} sentences", flush=True)
    rng = random.Random(5)
    checks = [pairs.pair(line, rng) for line in pairs.kept[:400]]

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy of the labels, each with its weight."""
        fed = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        inputs = dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=fed)
        logits = model(**inputs, use_cache=False).logits.float()
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (each * batch["counts"].flatten()).sum() / batch["counts"].sum()

    def validate() -> dict[str, float]:
        """Loss on held-out sentences, and the fractions with and without errors whose output is correct."""
        total = right = hurt = kept = whole = 0.0
        for i in range(0, len(checks), 50):
            part = checks[i : i + 50]
            batch = pairs.batch(
                tokenizer([a for a, _ in part])["input_ids"], tokenizer([b for _, b in part])["input_ids"]
            )
            batch.pop("counts")
            out = model(**batch)
            total += out.loss.item() / len(checks) * len(part)
            hits = ((out.logits.argmax(-1) == batch["labels"]) | (batch["labels"] == -100)).all(-1)
            for (a, b), hit in zip(part, hits.tolist(), strict=True):
                if a == b:
                    whole, kept = whole + 1, kept + hit
                else:
                    hurt, right = hurt + 1, right + hit
        return {"held_out": round(total, 4), "corrected": round(right / hurt, 3), "left_alone": round(kept / whole, 3)}

    def save(_: Run) -> None:
        model.save_pretrained(args.out / "model")
        tokenizer.save_pretrained(args.out / "model")

    plan = Plan(minutes=args.minutes, lr=args.lr, decay=args.decay, every=args.every, bf16=args.bf16, seed=args.seed)
    fit(model, loss, iter(pairs), plan, validate=validate, save=save, log=args.out / "log.jsonl")


CARD = """---
license: apache-2.0
language: en
---
# nano-gec

An encoder-decoder of {parameters:,} parameters (Pegasus architecture, {encoder} + {decoder} layers x {hidden}, bf16,
byte-level BPE of {vocabulary} entries) that corrects English sentences, embedded in truedraft so that `truedraft
correct`, tests and benchmarks run with no download. It corrects common slips in spelling, agreement, articles,
prepositions, verb forms and punctuation, one sentence at a time, and is small: it misses more than it finds, and
now and then it changes what was right, names and rare words above all. Read what it changed.

What its text hardly has is unknown to it (accents and other alphabets, `$ % & * + / @ # | _` and the like): `truedraft
correct` leaves sentences with such characters as they are, and says how many. Typographic quotes and dashes are read as
plain ones.

## Data

{sentences:,} sentences; errors are put into each anew whenever it is read (`tools/gec_errors.py`).

| text | licence |
|---|---|
| TinyStories (Eldan and Li 2023), samples | CDLA-Sharing-1.0, CC BY 4.0 |
| WikiText-2, validation and test | CC BY-SA |
| State of the Union addresses since 1900 | public domain |
| example sentences of WordNet 3.0 | WordNet 3.0 |
| docstrings of the standard library of Python {python} | PSF-2.0 |
| errors: codespell's list of misspellings | CC BY-SA 3.0 |
| errors: lemminflect's inflections | MIT |

One sentence in two hundred is held out, by a hash.{note}

## Validation over time

Loss in nats per token on held-out sentences (tokens that change count twice), the share of sentences with errors that
come out without a wrong token, and of those without errors that are left alone, each token judged after the true ones.

| steps of about 80 sentences | loss | corrected | left alone |
|---|---|---|---|
{rows}

## Train it again

    python tools/train_gec.py data --stories FILE --chats FILE --articles FILE FILE --speeches FOLDER \\
                                   --examples FOLDER --out RUN
    python tools/train_gec.py tokenizer --out RUN
    python tools/train_gec.py model --out RUN --misspelt FILE --minutes 120
    python tools/train_gec.py export --out RUN --to src/truedraft/assets/nano-gec
"""


def export(args: argparse.Namespace) -> None:
    """bf16 weights, tokenizer and card, as they ship."""
    model = PegasusForConditionalGeneration.from_pretrained(args.out / "model", dtype=torch.bfloat16)
    model.save_pretrained(args.to)
    PreTrainedTokenizerFast.from_pretrained(args.out / "tokenizer").save_pretrained(args.to)
    (args.to / "model.safetensors").chmod(0o644)
    logs = [json.loads(line) for line in (args.out / "log.jsonl").read_text().splitlines()]
    rows, steps = [], 0
    for before, row in zip([{"steps": 0}, *logs], logs, strict=False):
        again = row["steps"] <= before["steps"]  # a continued run counts anew
        steps += row["steps"] - (0 if again else before["steps"])
        rows.append(f"| {steps:,} | {row['held_out']} | {row['corrected']:.0%} | {row['left_alone']:.0%} |")
    c = model.config
    card = CARD.format(
        parameters=model.num_parameters(), encoder=c.encoder_layers, decoder=c.decoder_layers, hidden=c.d_model,
        vocabulary=c.vocab_size, sentences=len((args.out / "train.txt").read_text().split("\n")),
        python=".".join(map(str, sys.version_info[:2])), rows="\n".join(rows),
        note=f"\n\n{args.note}" if args.note else "",
    )  # fmt: skip
    (args.to / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["data", "tokenizer", "model", "export"])
    parser.add_argument("--stories", type=Path, help="TinyStories, lower-cased")
    parser.add_argument("--chats", type=Path, help="lines `User: ...` and `Bot: ...`")
    parser.add_argument("--articles", type=Path, nargs="+", help="WikiText")
    parser.add_argument("--speeches", type=Path, help="State of the Union addresses, YEAR_name.txt")
    parser.add_argument("--examples", type=Path, help="WordNet's folder of data.noun, data.verb, ...")
    parser.add_argument("--misspelt", type=Path, help="lines `wrong->right`: codespell's dictionary.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--to", type=Path, help="where `export` writes")
    parser.add_argument("--note", help="a remark on the validation, for the card")
    parser.add_argument("--start", type=Path, help="continue from these weights")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=10.0, help="minutes between validations")
    parser.add_argument("--batch", type=int, default=3072, help="positions of a batch, on either side")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--decay", type=float, default=0.4, help="share of the time in which the learning rate falls")
    parser.add_argument("--bf16", action="store_true", help="products in bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    {"data": gather, "tokenizer": train_tokenizer, "model": train_model, "export": export}[args.job](args)


if __name__ == "__main__":
    sys.exit(main())
