"""The server under a load tool from outside: GuideLLM, unchanged, on both endpoints.

    python benchmarks/outside.py --guidellm PATH [--seconds 20] [--port 8191] [--json FILE]

PATH is the command of an environment of its own (`pip install guidellm`); it reads the tokenizer of the embedded model
and writes a report that is kept here in short. Prompts are GuideLLM's synthetic ones, of 64 tokens, and it asks for 64
tokens more with `ignore_eos` and a stream. Every run must end without an errored request, with 64 tokens in each.
Server and tool share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import truedraft
from loadclient import process
from truedraft.files import write_whole

NANO = Path(truedraft.__file__).parent / "assets" / "nano"
FORMATS = ("/v1/chat/completions", "/v1/completions")
PROFILES = ("synchronous", "concurrent,streams=4", "concurrent,streams=16", "throughput,max_concurrency=16")
TOKENS = 64
WORKERS = {"GUIDELLM__MAX_WORKER_PROCESSES": "2"}  # of the tool: with its default of 10, two cores run mostly those
METRICS = (
    "requests_per_second", "request_concurrency", "request_latency", "time_to_first_token_ms",
    "inter_token_latency_ms", "time_per_output_token_ms", "output_tokens_per_second", "prompt_token_count",
    "output_token_count",
)  # fmt: skip


def benchmarked(guidellm: str, port: int, form: str, profile: str, seconds: int) -> dict[str, Any]:
    """GuideLLM's report of one run, as it wrote it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = {
            "--backend": f"kind=openai_http,target=http://127.0.0.1:{port},request_format={form}",
            "--profile": f"kind={profile}",
            "--constraint": f"kind=max_duration,seconds={seconds}",
            "--tokenizer": f"kind=huggingface_auto,model={NANO}",
            "--data": f"kind=synthetic_text,prompt_tokens={TOKENS},output_tokens={TOKENS}",
            "--output": f"kind=json,path={report}",
        }
        command = [guidellm, "run", "--disable-console", *(text for pair in options.items() for text in pair)]
        subprocess.run(command, check=True, env=os.environ | WORKERS, timeout=60 * 10)
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def shortened(report: dict[str, Any], form: str) -> dict[str, Any]:
    """The part of a report that is kept: what ran, how its requests ended, and their figures.

    Raises:
        AssertionError: a request failed, or one that ended has not all of its tokens.
    """
    (run,) = report["benchmarks"]
    totals, metrics = run["metrics"]["request_totals"], run["metrics"]
    lengths = metrics["output_token_count"]["successful"]
    assert totals["errored"] == 0 and totals["successful"] > 0, f"{form}: {totals}"
    assert lengths["min"] == lengths["max"] == TOKENS, f"{form}: {lengths}"
    return {
        "request_format": form,
        "strategy": run["config"]["strategy"],
        "duration": run["duration"],
        "request_totals": totals,
        "metrics": {name: _figures(metrics[name]["successful"]) for name in METRICS},
        "warnings": [warning["message"] for warning in run["warnings"]],
    }


def _figures(of: dict[str, Any]) -> dict[str, float]:
    percentiles = {name: of["percentiles"][name] for name in ("p05", "p95", "p99")}
    return {
        name: round(of.get(name, percentiles.get(name)), 3) for name in ("mean", "median", "min", "max", *percentiles)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", required=True)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--port", type=int, default=8191)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kept: dict[str, Any] = {"truedraft_version": truedraft.__version__, "guidellm_version": "", "runs": []}
    command = [sys.executable, "-m", "truedraft", "serve", "nano", "--port", str(args.port), "--log-level", "warning"]
    with process(command, args.port):
        for form in FORMATS:
            for profile in PROFILES:
                report = benchmarked(args.guidellm, args.port, form, profile, args.seconds)
                kept["guidellm_version"] = report["metadata"]["guidellm_version"]
                kept["runs"].append(run := shortened(report, form))
                speed = run["metrics"]["output_tokens_per_second"]["mean"]
                print(f"{form} {profile}: {run['request_totals']}, {speed:.0f} tokens/s", flush=True)
    if args.json is not None:
        write_whole(args.json, json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
