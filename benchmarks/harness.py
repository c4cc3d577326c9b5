"""The server under lm-eval, the harness by which models are compared: the same figures as over `transformers`.

    python benchmarks/harness.py --python PATH [--model nano] [--port 8192] [--json FILE]

PATH is the interpreter of an environment of its own (`pip install lm_eval[api,hf]`); lm-eval is used unchanged, with
its model `local-completions` over the server and with `hf` over `transformers`, both in fp32. There are three small
tasks, made of a text (`--text`; by default the embedded stories): which of four phrases follows (loglikelihood), how
likely each story is (loglikelihood_rolling), and what follows up to the next full stop (generate_until). Each answer is
compared, not only the means: log-likelihoods within 0.001, whether they are greedy, and the generated text but for
white space at its ends, since `hf` decodes new tokens alone, which with some tokenizers loses the space before them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import truedraft
from loadclient import process
from truedraft.assets import prompt
from truedraft.files import write_whole

EMBEDDED = Path(truedraft.__file__).parent / "assets"
WITHIN = 1e-3  # of log-likelihoods, sums over a phrase or a story
WORDS, CHOICES = 3, 4  # words of a phrase, phrases to choose from
CONTEXT = 512  # positions that the tasks need at most
TASKS: dict[str, str] = {
    "phrases": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "stories": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "sentences": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{rest}}"
target_delimiter: ""
generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def documents(text: str) -> dict[str, list[dict[str, Any]]]:
    """The documents of each task; stories are separated by empty lines."""
    stories = [story.split() for story in text.split("\n\n") if story.strip()]
    places = [(story, at) for story in stories for at in range(2 * WORDS, len(story) - WORDS, WORDS)]
    phrases = [f" {' '.join(story[at : at + WORDS])}" for story, at in places]
    chosen = [[phrases[(i + k * 7) % len(phrases)] for k in range(CHOICES)] for i in range(len(places))]
    contexts = [" ".join(story[:at]) for story, at in places]
    return {
        "phrases": [
            {"context": context, "choices": choices, "answer": 0}
            for context, choices in zip(contexts, chosen, strict=True)
        ],
        "stories": [{"text": " ".join(story)} for story in stories],
        "sentences": [
            {"context": context, "rest": f" {' '.join(story[at:])}".split(".")[0]}
            for context, (story, at) in zip(contexts, places, strict=True)
        ],
    }


def write_tasks(folder: Path, text: str) -> None:
    """Write the tasks as lm-eval reads them: YAML, and documents as lines of JSON."""
    for name, found in documents(text).items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in found))
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{TASKS[name]}")


def evaluated(python: str, folder: Path, model: str, arguments: str) -> dict[str, Any]:
    """lm-eval's results of a model, and the answers to each document: `results` and by task `samples`."""
    out = folder / model
    command = [
        python, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", *TASKS,
        "--include_path", str(folder), "--output_path", str(out), "--log_samples", "--batch_size", "1",
        "--device", "cpu",
    ]  # fmt: skip
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=60 * 20)
    (found,) = out.rglob("results_*.json")
    samples = {}
    for name in TASKS:
        (file,) = out.rglob(f"samples_{name}_*.jsonl")
        read = [json.loads(line) for line in file.read_text().splitlines()]
        samples[name] = [one["resps"] for one in sorted(read, key=lambda one: one["doc_id"])]
    return {"results": json.loads(found.read_text())["results"], "samples": samples}


def answers(samples: Any) -> Iterator[tuple[float, str]]:
    """The single answers in nested lists: a log-likelihood with whether it is greedy, or 0 with a text."""
    if isinstance(samples, str):
        yield _number(samples)
    elif len(samples) == 2 and str(samples[1]) in ("True", "False"):
        yield _number(samples[0])[0], str(samples[1])
    else:
        for one in samples:
            yield from answers(one)


def _number(value: str) -> tuple[float, str]:
    try:
        return float(value), ""
    except ValueError:
        return 0.0, value.strip()


def differences(served: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """By task how many answers there are, how many differ, and the largest difference of log-likelihoods."""
    found = {}
    for name in TASKS:
        pairs = list(zip(answers(served["samples"][name]), answers(reference["samples"][name]), strict=True))
        gaps = [abs(one[0] - other[0]) for one, other in pairs]
        unlike = sum(one[1] != other[1] or gap > WITHIN for (one, other), gap in zip(pairs, gaps, strict=True))
        found[name] = {"answers": len(pairs), "different": unlike, "largest_gap": max(gaps)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="lm-eval over the server and over transformers")
    parser.add_argument("--python", required=True, help="interpreter of an environment with lm-eval")
    parser.add_argument("--model", default="nano", help="an embedded model's name, or a folder")
    parser.add_argument("--text", type=Path, help="stories, separated by empty lines")
    parser.add_argument("--port", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = EMBEDDED / args.model if (EMBEDDED / args.model).is_dir() else Path(args.model).resolve()
    command = [sys.executable, "-m", "truedraft", "serve", str(path), "--port", str(args.port)]
    command += ["--served-model-name", "served", "--log-level", "warning", "--dtype", "float32"]
    tokens = f"add_bos_token=True,max_length={CONTEXT}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, args.text.read_text() if args.text else prompt("stories.txt"))
        reference = evaluated(args.python, folder, "hf", f"pretrained={path},dtype=float32,{tokens}")
        with process(command, args.port, seconds=600):
            url = f"base_url=http://127.0.0.1:{args.port}/v1/completions"
            given = f"{url},model=served,tokenizer={path},tokenizer_backend=huggingface,num_concurrent=4,{tokens}"
            served = evaluated(args.python, folder, "local-completions", given)
    found = {
        "model": path.name,
        "differences": differences(served, reference),
        "served": served["results"],
        "transformers": reference["results"],
    }
    print(json.dumps(found, indent=1))
    if args.json:
        write_whole(args.json, json.dumps(found, indent=1) + "\n")
    sys.exit(any(one["different"] for one in found["differences"].values()))


if __name__ == "__main__":
    main()
