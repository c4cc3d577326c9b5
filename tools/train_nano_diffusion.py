"""Train `nano-diffusion`, the embedded masked-diffusion model, on the text of `nano` with its tokenizer and a mask.

One set of weights for both ways in which such models attend: to the whole canvas (LLaDA), and to the own block and all
earlier ones (block diffusion, BD3-LM: noisy blocks beside clean ones in one forward). Logits are for the next position,
as those of `nano`, which it starts from. Noise of a level t is a mask with probability t, and its loss is divided by t.

    python tools/train_nano_diffusion.py model  --stories FILE --plays FILE --out RUN --start FOLDER --minutes 120
    python tools/train_nano_diffusion.py export --out RUN --to src/truedraft/assets/nano-diffusion
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from train_nano import GIVEN, Corpus
from truedraft.train.loop import Plan, Run, fit

MASK = "<|mask|>"
BLOCKS = [4, 8, 16, 32]  # sizes of blocks in training
LENGTHS = [96, 128, 192, 256, 320, 512]
LONG = 0.15  # share of the documents that may have the last of these lengths
AFTER_END = 0.1  # weight in the loss of the marks that fill a canvas behind its end
LEAST = 0.1  # level of noise that the loss is divided by at least


@dataclass
class Canvases:
    """A batch of one length.

    ids: (rows, S) the text, filled with end marks.
    weight: (rows, S) of each token in the loss, 0 where it is always known.
    block: size of a block, 0 where every position attends to all.
    """

    ids: Tensor
    weight: Tensor
    block: int


def canvas(corpus: Corpus, rng: random.Random, val: bool, length: int) -> tuple[list[int], list[float]]:
    """A document, its end and more marks of the end; a prefix is known: of an edit its prompt, else any length."""
    end = corpus.tokenizer.eos_token_id
    ids, weight = corpus.document(rng, val, length - 2)
    if not ids:
        return canvas(corpus, rng, val, length)
    if weight[0] == GIVEN:
        weight = [0.0 if w == GIVEN else w for w in weight]
    else:
        known = rng.randrange(int(0.7 * len(ids)) + 1) if rng.random() < 0.7 else 0
        weight = [0.0] * known + weight[known:]
    rest = length - 2 - len(ids)
    return [end, *ids, end] + [end] * rest, [0.0, *weight, 1.0] + [AFTER_END] * rest


def batches(corpus: Corpus, rng: random.Random, tokens: int, causal: float) -> Iterator[Canvases]:
    """Endless batches of about that many positions; a share `causal` of them in blocks, which take two each."""
    waiting: dict[int, list[tuple[list[int], list[float]]]] = {length: [] for length in LENGTHS}
    while True:
        in_blocks = rng.random() < causal
        length, rows = 0, 0
        while not rows or len(waiting[length]) < rows:
            longest = LENGTHS[-1 if rng.random() < LONG else -2]
            ids, weight = canvas(corpus, rng, False, longest)
            ids += [ids[-1]] * (LENGTHS[-1] - longest)
            weight += [AFTER_END] * (LENGTHS[-1] - longest)
            used = next((i for i in range(len(ids), 0, -1) if ids[i - 1] != ids[-1]), 1)
            length = next(n for n in LENGTHS if n > used or n == LENGTHS[-1])
            waiting[length].append((ids[:length], weight[:length]))
            rows = max(1, tokens // length // (2 if in_blocks else 1))
        taken, waiting[length] = waiting[length][:rows], waiting[length][rows:]
        block = rng.choice(BLOCKS) if in_blocks else 0
        yield Canvases(torch.tensor([i for i, _ in taken]), torch.tensor([w for _, w in taken]), block)


def noise(batch: Canvases, mask: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The ids with masks, and each masked position's weight; (rows, S) both.

    In blocks every block has its own level. Without, half of the rows have one level for the whole canvas, and half
    are as decoding from left to right has them: known up to a block, which has a level, and masks behind it.
    """
    rows, length = batch.ids.shape
    size = batch.block or BLOCKS[int(torch.randint(len(BLOCKS), (), generator=generator))]
    blocks = torch.arange(length) // size
    count = int(blocks[-1]) + 1
    spread = torch.rand(rows, count, generator=generator)
    level = (torch.rand(rows, 1, generator=generator) + torch.arange(count) / count + spread / count) % 1.0
    level = level.gather(1, torch.rand(rows, count, generator=generator).argsort(1))[:, blocks]
    if not batch.block:
        known = (batch.weight == 0).sum(1)
        first = known + (torch.rand(rows, generator=generator) * (length - known)).long()
        current = blocks[first.clamp(max=length - 1)][:, None]
        one = level[:, :1].expand(-1, length)
        ordered = torch.where(blocks < current, 0.0, torch.where(blocks == current, one, 1.0))
        level = torch.where((torch.arange(rows) % 2 == 0)[:, None], one, ordered)
    hidden = (torch.rand(rows, length, generator=generator) < level) & (batch.weight > 0)
    return torch.where(hidden, mask, batch.ids), hidden * batch.weight / level.clamp(min=LEAST)


def attended(length: int, block: int) -> Tensor:
    """(1, 1, 2 S, 2 S) bool of noisy blocks beside clean ones: what each position reads."""
    of = torch.arange(length) // block
    own, before = of[:, None] == of, of[:, None] > of
    nothing = torch.zeros_like(own)
    return torch.cat([torch.cat([own, before], 1), torch.cat([nothing, own | before], 1)])[None, None]


def logits(model: LlamaForCausalLM, noisy: Tensor, batch: Canvases, at: Tensor) -> Tensor:
    """(n, V) for the noisy positions where `at`, (rows, S) bool, is True: those of the position before, which for the
    first of a block is the last of the clean block before it."""
    length = noisy.shape[1]
    if batch.block:
        ids, positions = torch.cat([noisy, batch.ids], 1), torch.arange(length).repeat(2)[None]
        reads = attended(length, batch.block)
    else:
        ids, positions = noisy, torch.arange(length)[None]
        reads = torch.ones(1, 1, length, length, dtype=torch.bool)
    states = model.model(ids, attention_mask=reads, position_ids=positions, use_cache=False).last_hidden_state
    row, place = at.nonzero(as_tuple=True)
    before = place - 1
    if batch.block:
        before = torch.where(place % batch.block == 0, length + before, before)
    return model.lm_head(states[row, before]).float()


def loss(batch: Canvases, model: LlamaForCausalLM, mask: int, generator: torch.Generator) -> Tensor:
    """Weighted cross-entropy of the masked positions, over the weights of all."""
    noisy, weight = noise(batch, mask, generator)
    at = weight > 0
    each = torch.nn.functional.cross_entropy(logits(model, noisy, batch, at), batch.ids[at], reduction="none")
    return (each * weight[at]).sum() / batch.weight.sum()


def validate(model: LlamaForCausalLM, corpus: Corpus, mask: int) -> dict[str, float]:
    """Bounds of the loss per token in blocks of 32 and over the whole, and the share of an edit's tokens read at once.

    Levels of noise are 1/8, 3/8, 5/8 and 7/8.
    """
    report: dict[str, float] = {}
    end = corpus.tokenizer.eos_token_id
    generator = torch.Generator().manual_seed(7)
    for domain in ("story", "python", "play"):
        rows = [d[:255] for d in corpus.ids[domain, True] if len(d) >= 255][:24]
        ids = torch.tensor([[end, *d] for d in rows])
        for block, name in ((32, domain), (0, f"{domain}_full")):
            total = 0.0
            for level in (0.125, 0.375, 0.625, 0.875):
                hidden = torch.rand(ids.shape, generator=generator) < level
                hidden[:, 0] = False
                guess = logits(model, torch.where(hidden, mask, ids), Canvases(ids, hidden.float(), block), hidden)
                total += torch.nn.functional.cross_entropy(guess, ids[hidden]).item() / 4
            report[name] = round(total, 4)
    rng, right, count = random.Random(7), 0, 0
    for _ in range(24):
        prompt, result = corpus.edit(rng, True, 400)
        row = [end, *prompt, *result, end]
        row += [end] * (-len(row) % 32)
        ids = torch.tensor([row])
        hidden = torch.arange(len(row))[None] > len(prompt)
        guess = logits(model, torch.where(hidden, mask, ids), Canvases(ids, hidden.float(), 8), hidden).argmax(-1)
        right, count = right + int((guess == ids[hidden]).sum()), count + len(guess)
    report["edit_first"] = round(right / count, 4)
    return report


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.start)
    tokenizer.add_special_tokens({"additional_special_tokens": [MASK]}, replace_extra_special_tokens=False)
    mask = tokenizer.convert_tokens_to_ids(MASK)
    model = LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    if model.config.vocab_size <= mask:
        model.resize_token_embeddings(len(tokenizer))
    plain = PreTrainedTokenizerFast.from_pretrained(args.start)
    plain.backend_tokenizer.post_processor = None  # documents begin with their mark here
    corpus = Corpus(args, plain)
    rng = random.Random(args.seed)
    generator = torch.Generator().manual_seed(args.seed)

    def save(run: Run) -> None:
        model.save_pretrained(args.out / "model")
        tokenizer.save_pretrained(args.out / "model")

    fit(
        model,
        partial(loss, model=model, mask=mask, generator=generator),
        batches(corpus, rng, args.batch, args.causal),
        Plan(minutes=args.minutes, lr=args.lr, micro=args.micro, every=args.every, bf16=args.bf16, decay=args.decay),
        validate=partial(validate, model, corpus, mask),
        save=save,
        log=args.out / "log.jsonl",
    )


CARD = """---
license: apache-2.0
language: en
---
# nano-diffusion

A masked-diffusion Llama of {parameters:,} parameters (bf16), embedded in truedraft so that its demo, tests and
benchmarks run with no download: `truedraft demo --canvas`, `truedraft generate nano-diffusion`. It started from `nano`,
has its tokenizer and a mask, {mask}, and was trained on its data. Logits are for the next position. Its configuration
declares blocks of {block} positions that attend to themselves and to all earlier ones; blocks of 4 to 32, and attention
to the whole canvas (`accelerate(..., layout=Layout({mask}, "whole", 32, True))`), were trained in the same weights. It
is a toy, and a weaker writer than `nano`: do not expect facts or working code.

## Data

That of `nano`, with its licences and shares but for edits, which are 60 % of the documents. Prompts are as its are.

## Validation over time

Mean loss in nats per masked token of held-out documents, over levels of noise of 1/8, 3/8, 5/8 and 7/8, in blocks of
32 and, in brackets, over the whole canvas. The last column: of the tokens of held-out edits, in blocks of 8 whose masks
are filled at once behind the right text, the share that is right. `nano`, which reads from left to right, is at 2.36,
3.15 and 3.86 nats per token.

| minutes | steps | stories | Python | plays | edit tokens right |
|---|---|---|---|---|---|
{rows}

## Train it again

    python tools/train_nano_diffusion.py model --stories FILE --plays FILE --out RUN --start FOLDER --bf16
    python tools/train_nano_diffusion.py export --out RUN --logs RUN/log.jsonl --to src/truedraft/assets/nano-diffusion

FOLDER is that of `nano`, or of an earlier run.
"""


def export(args: argparse.Namespace) -> None:
    """bf16 weights, the layout, the tokenizer that puts the document mark in front, and the card, as they ship."""
    model = LlamaForCausalLM.from_pretrained(args.out / "model", dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "model")
    mask = tokenizer.convert_tokens_to_ids(MASK)
    model.config.canvas_config = {"mask": mask, "attention": "blocks", "block": args.block, "shifted": True}
    model.save_pretrained(args.to)
    tokenizer.save_pretrained(args.to)
    rows = [json.loads(line) for log in args.logs for line in log.read_text().splitlines()]
    lines = [
        f"| {row['minutes']:.0f} | {row['steps']} | "
        + " | ".join(f"{row[name]:.2f} ({row[f'{name}_full']:.2f})" for name in ("story", "python", "play"))
        + f" | {row['edit_first']:.1%} |"
        for row in rows
    ]
    card = CARD.format(parameters=model.num_parameters(), mask=mask, block=args.block, rows="\n".join(lines))
    (args.to / "README.md").write_text(card)
    (args.to / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["model", "export"])
    parser.add_argument("--stories", type=Path, help="TinyStories, one story a line block")
    parser.add_argument("--plays", type=Path, help="tiny Shakespeare")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--to", type=Path, help="where `export` writes")
    parser.add_argument("--logs", type=Path, nargs="+", default=[], help="of the runs, for the card of `export`")
    parser.add_argument("--block", type=int, default=8, help="the block length that `export` declares")
    parser.add_argument("--start", type=Path, help="the weights to start from: nano's, or of an earlier run")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=10.0, help="minutes between validations")
    parser.add_argument("--batch", type=int, default=6144, help="positions per forward")
    parser.add_argument("--micro", type=int, default=2, help="forwards per step")
    parser.add_argument("--causal", type=float, default=0.7, help="share of the batches that attend in blocks")
    parser.add_argument("--edits", type=float, default=0.6, help="share of the documents that are editing tasks")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--decay", type=float, default=0.5, help="share of the time in which the learning rate falls")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    {"model": train, "export": export}[args.job](args)


if __name__ == "__main__":
    sys.exit(main())
