"""A tiny encoder-decoder with its own tokenizer, whose outputs end, and a scripted one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

from truedraft.stats import Emission, Pass, Report

POSITIONS = 96
TEXTS = [
    "One day a cat saw a red ball. The cat saw a red ball and a dog.",
    "She said that the dog and the cat went to the park.",
    "He go to school every day, and they was here.",
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, so that any text can be encoded and decoded; a source ends with `</s>`."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tok.train_from_iterator(TEXTS, trainer)
    tok.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=80,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@cache
def model() -> BartForConditionalGeneration:
    """Large untied random weights, so that no token repeats on and on, and a bias to the end: texts of all lengths."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=len(tokenizer()), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=POSITIONS,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None,
        tie_word_embeddings=False, init_std=0.15,
    )  # fmt: skip
    found = BartForConditionalGeneration(config).eval()
    found.final_logits_bias[0, 1] = 1.2
    return found


class Scripted:
    """A fake accelerated encoder-decoder, which outputs `respond(source)` for each source.

    batches: the lengths of the sources of every call, without padding.
    """

    def __init__(self, respond: Callable[[str], str], ends: bool = True):
        self.tokenizer, self.respond, self.ends = tokenizer(), respond, ends
        self.model = SimpleNamespace(
            config=SimpleNamespace(max_position_embeddings=None, pad_token_id=0),
            generation_config=SimpleNamespace(eos_token_id=1, forced_eos_token_id=None, num_beams=1, do_sample=False),
            device="cpu", generate=self.generate,
        )  # fmt: skip
        self.target = SimpleNamespace(reads_sources=True, hard_limit=None, vocabulary=len(tokenizer()))
        self.batches: list[list[int]] = []
        self.interrupt = False  # at the next call

    def generate(self, input_ids: Any, attention_mask: Any, max_new_tokens: int, **_: Any) -> torch.Tensor:
        assert (input_ids.ne(0) == attention_mask.bool()).all()
        if self.interrupt:
            raise KeyboardInterrupt
        self.batches.append(attention_mask.sum(-1).tolist())
        sources = self.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        outputs = [self.tokenizer(self.respond(source))["input_ids"][: None if self.ends else -1] for source in sources]
        outputs = [[1, *ids[:max_new_tokens]] for ids in outputs]
        longest = max(map(len, outputs))
        return torch.tensor([ids + [0] * (longest - len(ids)) for ids in outputs])

    def report(self) -> Report:
        report = Report("scripted", "greedy", "tokens", "cost", "nothing")
        report.passes.append(Pass(0, tuple(Emission(i, (5,), 0, 0) for i in range(len(self.batches[-1])))))
        return report
