"""Train a small translation model from a parallel text given by path; not part of the package.

    python tools/train_translation.py --source train.en.gz --target train.de.gz --out RUN --minutes 60

The two files (plain or .gz) are parallel, line by line. One joint byte-level BPE, an encoder-decoder of 7 M parameters,
written to RUN/model in the format of transformers; one pair in a hundred is held out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PegasusConfig, PegasusForConditionalGeneration, PreTrainedTokenizerFast

from truedraft.files import read_lines
from truedraft.train.batches import Line, bucketed, longer_side, pad_to, shuffled
from truedraft.train.loop import Plan, Run, fit

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
LONGEST = 120  # tokens of a side; longer pairs are left out
SHAPE = dict(
    d_model=256,
    encoder_layers=3,
    decoder_layers=3,
    encoder_ffn_dim=1024,
    decoder_ffn_dim=1024,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
)


def tokenizer_of(lines: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """One byte-level BPE for both languages; each line ends with the end token."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(lines, trainer)
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.TemplateProcessing(f"$A {END}", None, [(END, tok.token_to_id(END))])
    marks = dict(pad_token=PAD, eos_token=END, unk_token=UNKNOWN)
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, model_max_length=256, clean_up_tokenization_spaces=False, **marks
    )


def build(tokenizer: PreTrainedTokenizerFast, shape: dict[str, int], dropout: float) -> PegasusForConditionalGeneration:
    """An encoder-decoder with pre-norm layers and sinusoidal positions, which trains fast.

    Its attention is not fused: torch's fused attention doubles the time of the backward pass on a CPU.
    """
    config = PegasusConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        scale_embedding=True,
        init_std=0.06,
        dropout=dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation_function="gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        forced_eos_token_id=None,
        **shape,
    )
    return PegasusForConditionalGeneration._from_config(config, attn_implementation="eager")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="lines to translate")
    parser.add_argument("--target", type=Path, required=True, help="their translations")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--start", type=Path, help="continue from these weights")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=10.0, help="minutes between validations")
    parser.add_argument("--batch", type=int, default=3072, help="positions of a batch, on either side")
    parser.add_argument("--vocabulary", type=int, default=5120)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--smoothing", type=float, default=0.1, help="of the labels")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--bf16", action="store_true", help="products in bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    sources, targets = read_lines(args.source), read_lines(args.target)
    if len(sources) != len(targets):
        parser.error(f"--source has {len(sources)} lines and --target {len(targets)}: they do not belong together")
    tokenizer = tokenizer_of(sources + targets, args.vocabulary)
    model = build(tokenizer, SHAPE, args.dropout)
    if args.start:
        model.load_state_dict(PegasusForConditionalGeneration.from_pretrained(args.start).state_dict())
    pairs: list[Line] = list(zip(tokenizer(sources)["input_ids"], tokenizer(targets)["input_ids"], strict=True))
    kept, pairs = pairs[::100], [pair for i, pair in enumerate(pairs) if i % 100 and longer_side(pair) <= LONGEST]
    print(f"{model.num_parameters():,} parameters, {len(pairs):,} pairs", flush=True)

    def loss(group: list[Line], smoothing: float = args.smoothing) -> torch.Tensor:
        ids, labels = pad_to([a for a, _ in group], tokenizer.pad_token_id), pad_to([b for _, b in group], -100)
        fed = model.prepare_decoder_input_ids_from_labels(labels=labels)
        mask = (ids != tokenizer.pad_token_id).long()
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=fed, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)

    def validate() -> dict[str, float]:
        parts = [kept[i : i + 50] for i in range(0, len(kept), 50)]
        return {"held_out": round(sum(loss(part, 0.0).item() * len(part) for part in parts) / len(kept), 4)}

    def save(_: Run) -> None:
        model.save_pretrained(args.out / "model")
        tokenizer.save_pretrained(args.out / "model")

    def groups() -> Iterator[list[Line]]:
        return bucketed(shuffled(pairs, args.seed), args.batch, args.seed)

    plan = Plan(minutes=args.minutes, lr=args.lr, every=args.every, bf16=args.bf16, seed=args.seed)
    fit(model, loss, groups(), plan, validate=validate, save=save, log=args.out / "log.jsonl")


if __name__ == "__main__":
    sys.exit(main())
