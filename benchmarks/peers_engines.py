"""The engines of `peers.py`, each run in a process of its own by the interpreter that has it.

    python benchmarks/peers_engines.py ENGINE FOLDER DTYPE

Converts the model in FOLDER where the engine needs another format, then writes one JSON line per request. Only the
standard library and the engine itself are imported.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
NGRAM = 3  # longest n-gram that prompt lookup searches for, in every engine
BITS = {"int8": 8, "int4": 4}  # quantised weights, with a bf16 model around them; the others are dtypes
GROUP = 32  # weights that share a scale in four bits, in every engine that lets one choose


def computed(dtype: str) -> str:
    """The dtype of the model around its weights."""
    return "bfloat16" if dtype in BITS else dtype


class Clock:
    """Times of new tokens: the count of each arrival, and the seconds from the first to the last."""

    def __init__(self) -> None:
        self.stamps: list[tuple[float, int]] = []

    def tick(self, tokens: int = 1) -> None:
        self.stamps.append((time.perf_counter(), tokens))

    @property
    def speed(self) -> float:
        """Tokens per second after the first arrival."""
        (start, _), (end, _) = self.stamps[0], self.stamps[-1]
        return sum(n for _, n in self.stamps[1:]) / (end - start)


class Engine:
    """`generate` writes `new` tokens greedily, `lookup` of them drafted at a time by prompt lookup; 0 drafts none."""

    packages: tuple[str, ...] = ()
    lookups: tuple[int, ...] = ()  # lengths of prompt lookup to try; none where the engine has no such mode
    precision = ""

    def __init__(self, folder: Path, dtype: str):
        raise NotImplementedError

    def generate(self, prompt: list[int], new: int, lookup: int, clock: Clock) -> list[int]:
        raise NotImplementedError


class Transformers(Engine):
    packages = ("transformers", "torch")
    lookups = (10,)

    def __init__(self, folder: Path, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(THREADS)
        path, given = folder / computed(dtype), self.quantization(dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=computed(dtype), **given).eval()
        self.precision = f"weights {dtype}, cache and results {computed(dtype)}"

    def quantization(self, dtype: str) -> dict[str, Any]:
        """Arguments for a model whose weights torchao quantises as it is loaded."""
        if dtype not in BITS:
            return {}
        import torch
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
        from transformers import TorchAoConfig

        four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))
        chosen = Int8WeightOnlyConfig() if dtype == "int8" else four
        return {"quantization_config": TorchAoConfig(chosen, include_input_output_embeddings=False)}

    def call(self, prompt: list[int], new: int, generate: Callable[..., Any], **more: Any) -> list[int]:
        import torch

        ids = torch.tensor([prompt])
        out = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **more)
        return out[0, len(prompt) :].tolist()

    def generate(self, prompt: list[int], new: int, lookup: int, clock: Clock) -> list[int]:
        from transformers.generation.streamers import BaseStreamer

        class Stream(BaseStreamer):
            started = False

            def put(self, value: Any) -> None:
                if self.started:  # the prompt comes first
                    clock.tick(value.numel())
                self.started = True

            def end(self) -> None:
                pass

        more = {"prompt_lookup_num_tokens": lookup, "max_matching_ngram_size": NGRAM} if lookup else {}
        return self.call(prompt, new, self.model.generate, streamer=Stream(), **more)


class Truedraft(Transformers):
    packages = ("truedraft", "transformers", "torch")
    lookups = (10, 40)

    def __init__(self, folder: Path, dtype: str):
        import truedraft

        super().__init__(folder, dtype)
        if dtype in BITS:
            self.model = truedraft.accelerate(self.model, quantize=dtype).target.model
        drafts = {0: None, **{n: f"prompt-lookup:n={NGRAM},length={n}" for n in self.lookups}}
        self.sides = {n: truedraft.accelerate(self.model, draft=draft, strict=True) for n, draft in drafts.items()}

    def quantization(self, dtype: str) -> dict[str, Any]:
        return {}

    def generate(self, prompt: list[int], new: int, lookup: int, clock: Clock) -> list[int]:
        def on_pass(done: Any) -> None:
            clock.tick(sum(len(e.tokens) for e in done.emitted))

        return self.call(prompt, new, self.sides[lookup].generate, on_pass=on_pass)


class OpenVINO(Engine):
    packages = ("openvino-genai", "openvino", "optimum-intel")
    lookups = (10, 20, 40)

    def __init__(self, folder: Path, dtype: str):
        import openvino
        import openvino_genai  # noqa: F401

        self.folder = converted(folder / f"openvino-{dtype}", lambda out: self.convert(folder, out, dtype))
        self.hint = {"float32": "f32", "bfloat16": "bf16"}[computed(dtype)]
        able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        # without instructions for bf16 it computes in fp32 all the same, and prompt lookup refuses another cache
        self.cache = "bf16" if self.hint == "bf16" and "BF16" in able else "f32"
        self.precision = f"weights {dtype}, hint {self.hint}, cache {self.cache}; it computes in {', '.join(able)} here"
        self.pipelines: dict[bool, Any] = {}

    def convert(self, models: Path, out: Path, dtype: str) -> None:
        import openvino_tokenizers
        from openvino import save_model
        from optimum.exporters.openvino import main_export
        from transformers import AutoTokenizer

        folder, given = models / computed(dtype), {}
        if dtype in BITS:
            from optimum.intel import OVConfig, OVWeightQuantizationConfig

            four = dict(group_size=GROUP, ratio=1.0, all_layers=True) if dtype == "int4" else {}
            weights = OVWeightQuantizationConfig(bits=BITS[dtype], sym=True, **four)
            given["ov_config"] = OVConfig(quantization_config=weights)
        main_export(str(folder), str(out), task="text-generation-with-past", convert_tokenizer=False, **given)
        one, other = openvino_tokenizers.convert_tokenizer(AutoTokenizer.from_pretrained(folder), with_detokenizer=True)
        save_model(one, out / "openvino_tokenizer.xml")
        save_model(other, out / "openvino_detokenizer.xml")

    def generate(self, prompt: list[int], new: int, lookup: int, clock: Clock) -> list[int]:
        import numpy
        import openvino
        import openvino_genai as genai

        if (pipeline := self.pipelines.get(bool(lookup))) is None:
            settings: dict[str, Any] = dict(
                INFERENCE_PRECISION_HINT=self.hint, KV_CACHE_PRECISION=self.cache, INFERENCE_NUM_THREADS=THREADS
            )
            if lookup:
                settings["prompt_lookup"] = True
            pipeline = self.pipelines[bool(lookup)] = genai.LLMPipeline(str(self.folder), "CPU", **settings)
        config = genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = lookup, NGRAM

        class Stream(genai.StreamerBase):
            def write(self, token: int | list[int]) -> Any:
                clock.tick(1 if isinstance(token, int) else len(token))
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        inputs = genai.TokenizedInputs(ids, openvino.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64)))
        return list(pipeline.generate(inputs, config, Stream()).tokens[0])


class CTranslate2(Engine):
    packages = ("ctranslate2",)

    def __init__(self, folder: Path, dtype: str):
        import ctranslate2

        types = ctranslate2.get_supported_compute_types("cpu")
        chosen = next((t for t in (f"{dtype}_bfloat16", dtype, f"{dtype}_float32") if t in types), None)
        if chosen is None:
            raise Unsupported(f"{dtype} is not among its types on this CPU")
        model = folder / computed(dtype)
        path = converted(folder / f"ctranslate2-{dtype}", lambda out: self.convert(model, out, chosen))
        self.generator = ctranslate2.Generator(str(path), compute_type=chosen, inter_threads=1, intra_threads=THREADS)
        self.precision = f"compute type {self.generator.compute_type}; int8 ones quantise what is multiplied, too"
        self.pieces = json.loads((model / "pieces.json").read_text())

    def convert(self, folder: Path, out: Path, dtype: str) -> None:
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(folder)).convert(str(out), quantization=dtype)

    def generate(self, prompt: list[int], new: int, lookup: int, clock: Clock) -> list[int]:
        def came(step: Any) -> bool:
            clock.tick()
            return False

        result = self.generator.generate_batch(
            [[self.pieces[i] for i in prompt]], max_length=new, min_length=new, beam_size=1, sampling_topk=1,
            include_prompt_in_result=False, callback=came,
        )  # fmt: skip
        return list(result[0].sequences_ids[0])


class LlamaCpp(Engine):
    """Its own prompt lookup is `ngram-simple`, which looks for longer n-grams: 12 tokens by default."""

    packages = ("xllamacpp",)
    lookups = (10, 20, 40)

    def __init__(self, folder: Path, dtype: str):
        import xllamacpp

        self.path = converted(folder / f"llama-{dtype}.gguf", lambda out: self.convert(folder / "float32", out, dtype))
        name = {"float32": "GGML_TYPE_F32", "bfloat16": "GGML_TYPE_BF16"}[computed(dtype)]
        self.kind = getattr(xllamacpp.ggml_type, name)
        self.servers: dict[int, Any] = {}
        integers = ", what is multiplied quantised to eight bits, too" if dtype in BITS else ""
        self.precision = (
            f"weights {dtype}{integers}, cache {computed(dtype)}; {xllamacpp.get_system_info().strip(' |')}"
        )

    def server(self, lookup: int) -> Any:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(self.path)
        settings.n_ctx, settings.n_parallel, settings.verbosity = 1024, 1, -1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = THREADS
        settings.cache_type_k = settings.cache_type_v = self.kind
        if lookup:
            kinds = xllamacpp.common_speculative_type
            settings.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            settings.speculative.ngram_simple.size_n = NGRAM
            settings.speculative.ngram_simple.size_m = lookup
        return xllamacpp.Server(settings)

    def convert(self, folder: Path, out: Path, dtype: str) -> None:
        import gguf
        from gguf.quants import quantize
        from safetensors import safe_open

        c = json.loads((folder / "config.json").read_text())
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        name = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}[dtype]
        kind = gguf.GGMLQuantizationType[name]
        writer = gguf.GGUFWriter(out, "llama")
        writer.add_context_length(c["max_position_embeddings"])
        writer.add_embedding_length(c["hidden_size"])
        writer.add_block_count(c["num_hidden_layers"])
        writer.add_feed_forward_length(c["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv)
        writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
        writer.add_rope_dimension_count(c["hidden_size"] // heads)
        writer.add_vocab_size(c["vocab_size"])
        writer.add_tokenizer_model("llama")
        writer.add_token_list(json.loads((folder / "pieces.json").read_text()))
        writer.add_token_scores([0.0] * c["vocab_size"])
        writer.add_token_types([gguf.TokenType.NORMAL] * c["vocab_size"])
        writer.add_file_type(gguf.LlamaFileType[("ALL_" if name == "F32" else "MOSTLY_") + name])
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c["num_hidden_layers"])
        with safe_open(folder / "model.safetensors", "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                x = tensors.get_tensor(name)
                for part, n in (("q_proj", heads), ("k_proj", kv)):
                    if part in name:  # rotary pairs are adjacent there
                        x = x.reshape(n, 2, len(x) // n // 2, -1).swapaxes(1, 2).reshape(x.shape)
                as_kind = kind if x.ndim > 1 else gguf.GGMLQuantizationType.F32
                there = names.get_name(name, try_suffixes=(".weight",))
                writer.add_tensor(there, quantize(x, as_kind), raw_dtype=as_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def generate(self, prompt: list[int], new: int, lookup: int, clock: Clock) -> list[int]:
        if lookup not in self.servers:
            self.servers[lookup] = self.server(lookup)
        tokens: list[int] = []
        errors: list[str] = []

        def came(part: dict[str, Any]) -> None:
            if "choices" in part:
                got = [int(number) for number in part["choices"][0]["text"].split("w")[1:]]  # pieces are w0, w1, ...
                tokens.extend(got)
                clock.tick(len(got))
            else:
                errors.append(str(part))

        request = dict(prompt=prompt, n_predict=new, temperature=0.0, stream=True, ignore_eos=True, cache_prompt=False)
        self.servers[lookup].handle_completions(request, came)
        if errors:
            raise RuntimeError(errors[0])
        return tokens


ENGINES: dict[str, type[Engine]] = {
    "truedraft": Truedraft,
    "transformers": Transformers,
    "openvino": OpenVINO,
    "ctranslate2": CTranslate2,
    "llama.cpp": LlamaCpp,
}


class Unsupported(Exception):
    """Raised with the reason where an engine does not support this setting."""


def converted(path: Path, convert: Callable[[Path], None]) -> Path:
    """`path`, created by `convert` where it is missing; never left incomplete."""
    if not path.exists():
        part = path.with_name(f"part-{path.name}")
        shutil.rmtree(part, ignore_errors=True)
        convert(part)
        part.rename(path)
    return path


@contextmanager
def responder() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes a JSON line to standard output, which other prints do not reach."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def respond(payload: dict[str, Any]) -> None:
            out.write(json.dumps(payload) + "\n")
            out.flush()

        yield respond


def main() -> None:
    name, folder, dtype = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    kind = ENGINES[name]
    with responder() as respond:
        try:
            engine = kind(folder, dtype)
        except (ImportError, Unsupported) as e:
            return respond({"absent": f"not installed ({e})" if isinstance(e, ImportError) else str(e)})
        versions = {}
        for package in kind.packages:
            with suppress(Exception):
                versions[package] = version(package)
        respond({"versions": versions, "lookups": engine.lookups, "precision": engine.precision})
        for line in sys.stdin:
            clock = Clock()
            try:
                tokens = engine.generate(**json.loads(line), clock=clock)
                respond({"tokens": tokens, "speed": clock.speed})
            except Exception as e:
                respond({"error": f"{type(e).__name__}: {e}"})


if __name__ == "__main__":
    main()
