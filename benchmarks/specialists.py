"""Drafters of one language each, and how a row gets its own: tokens per pass of every way to use them.

    python benchmarks/specialists.py --data FOLDER --runs FOLDER [--texts 40] --json FILE

The languages are the English and German captions of Multi30k (FOLDER has train.LANGUAGE.gz and test_2016_flickr.
LANGUAGE.gz). One small target is trained on both; then, of the same size and for as many steps, a draft model and an
EAGLE-2 head on either language and on both, by the target's distributions. What was trained is kept in --runs and is
not trained again. The figures are counts, which do not depend on other load.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import truedraft
from truedraft import Drafter, registry
from truedraft.files import read_lines, write_whole
from truedraft.train.drafter import train_drafter
from truedraft.train.loop import Plan, Run, fit
from truedraft.train.responses import Responding

LANGUAGES = ("en", "de")
KINDS = ("draft model", "head")
VOCABULARY, LENGTH, CAPTIONS = 2048, 128, 6  # of the tokenizer; tokens of a training text, and captions of a document
TARGET = dict(hidden_size=160, intermediate_size=432, num_hidden_layers=4, num_attention_heads=5)
SMALL = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=1, num_attention_heads=4)
STEPS = {"target": 280, "draft model": 160, "head": 110}  # of training, each of 2,048 tokens
TOKENS, GIVEN = 48, 3  # new tokens of a text, and captions of its prompt, the last one cut


def documents(data: Path, name: str, language: str) -> list[str]:
    """Captions of a language, some in each document."""
    lines = [line.strip() for line in read_lines(data / f"{name}.{language}.gz") if line.strip()]
    return ["\n".join(lines[i : i + CAPTIONS]) for i in range(0, len(lines), CAPTIONS)]


def tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of both languages; a text begins with <s>."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", clean_up_tokenization_spaces=False)


def built(shape: Mapping[str, int], seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=None,
        pad_token_id=0, **shape,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def windows(ids: list[list[int]], count: int = 16) -> Iterator[torch.Tensor]:
    """Endless batches, (count, LENGTH) ids of whole documents in random order."""
    rng = random.Random(0)
    while True:
        rng.shuffle(ids)
        line = torch.tensor([token for text in ids for token in text])
        lines = line[: len(line) // LENGTH * LENGTH].view(-1, LENGTH)
        yield from lines.split(count)[: len(lines) // count]


def plan(steps: int) -> Plan:
    return Plan(minutes=1e9, steps=steps, every=1e9, warmup=20)


def trained(model: Any, loss: Callable[[Any], torch.Tensor], batches: Iterator[Any], steps: int, out: Path) -> None:
    def save(_: Run) -> None:
        model.save_pretrained(out)

    fit(model, loss, batches, plan(steps), validate=lambda: {}, save=save, log=out / "log.jsonl")


def train(data: Path, runs: Path) -> None:
    """Train what the folder of runs lacks."""
    texts = {language: documents(data, "train", language) for language in LANGUAGES}
    texts["generic"] = [text for pair in zip(*texts.values(), strict=False) for text in pair]
    if not (runs / "target").exists():
        tokenizer, target = tokenizer_of(texts["generic"]), built(TARGET, 0)

        def likelihood(ids: torch.Tensor) -> torch.Tensor:
            return target(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

        ids = tokenizer(texts["generic"]).input_ids
        trained(target, likelihood, windows(ids), STEPS["target"], runs / "target")
        tokenizer.save_pretrained(runs / "target")
    target, tokenizer = loaded(runs)
    for name, some in texts.items():
        if not (runs / f"draft model {name}").exists():
            small = built(SMALL, 1)

            def divergence(ids: torch.Tensor, small: Any = small) -> torch.Tensor:
                with torch.no_grad():
                    laws = target(input_ids=ids, use_cache=False).logits.log_softmax(-1).flatten(0, 1)
                own = small(input_ids=ids, use_cache=False).logits.log_softmax(-1).flatten(0, 1)
                return torch.nn.functional.kl_div(own, laws, log_target=True, reduction="batchmean")

            ids = tokenizer(some).input_ids
            trained(small, divergence, windows(ids), STEPS["draft model"], runs / f"draft model {name}")
        if not (runs / f"head {name}").exists():
            torch.manual_seed(1)
            learner = registry.method("drafters", "eagle2").learner()
            train_drafter(
                learner, target, tokenizer, some, runs / f"head {name}", plan(STEPS["head"]),
                answers=[None] * len(some), how=Responding(max_length=LENGTH),
            )  # fmt: skip


def loaded(runs: Path) -> tuple[Any, Any]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(runs / "target")
    return AutoModelForCausalLM.from_pretrained(runs / "target").eval(), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(given.data, given.runs)


if __name__ == "__main__":
    main()
