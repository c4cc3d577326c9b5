"""The files for deployment agree with the settings of the server, and with each other."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from truedraft.cli import app
from truedraft.serve.config import ServeConfig, configured

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DEFAULTS = ServeConfig(model="nano")


def parsed(args: list[str]) -> dict[str, Any]:
    """The options of a command line of `truedraft serve`."""
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return dict(command.make_context("serve", list(args)).params)


@pytest.fixture(scope="module")
def unit() -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "truedraft.service").read_text())
    return dict(parser["Service"])


@pytest.fixture(scope="module")
def pods() -> dict[str, Any]:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    return deployment["spec"]["template"]["spec"]


def test_the_settings_are_settings() -> None:
    assert configured(DEPLOY / "serve.toml", {}).model == "nano"


def test_the_unit_starts_the_server_and_leaves_it_time_to_end(unit: dict[str, str]) -> None:
    program, command, *args = shlex.split(unit["ExecStart"])
    assert Path(program).name == "truedraft" and command == "serve"
    options = parsed(args)
    assert str(options["config"]) == "/etc/truedraft/serve.toml"
    assert unit["LoadCredential"].split(":")[0] == Path(options["api_keys"]).name
    assert unit["KillSignal"] == "SIGTERM" and float(unit["TimeoutStopSec"]) > DEFAULTS.shutdown_seconds
    assert int(unit["LimitNOFILE"]) > DEFAULTS.max_connections
    memory = configured(DEPLOY / "serve.toml", {}).memory
    assert memory is not None and memory.parent == Path("/var/lib") / unit["StateDirectory"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_passes_systemd_analyze_verify(tmp_path: Path) -> None:
    program = tmp_path / "truedraft"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / "truedraft.service"
    text = (DEPLOY / "truedraft.service").read_text()
    for faulty in (False, True):
        copy.write_text(text.replace("/opt/truedraft/bin/truedraft", str(program)) + "Frob=1\n" * faulty)
        done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
        assert ("Frob" in done.stderr) == faulty
        assert faulty or (done.returncode == 0 and "truedraft.service" not in done.stderr), done.stderr


def test_pods_have_time_to_end_and_are_asked_for_their_health(pods: dict[str, Any]) -> None:
    (container,) = pods["containers"]
    assert pods["terminationGracePeriodSeconds"] > DEFAULTS.shutdown_seconds
    options = parsed(container["args"])
    assert options["host"] == "0.0.0.0" and Path(options["memory"]).parent.as_posix() == "/data"
    assert container["ports"][0]["containerPort"] == DEFAULTS.port
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert all(probe == {"path": "/health", "port": container["ports"][0]["name"]} for probe in probes)


def test_the_proxy_buffers_nothing_and_takes_what_the_server_takes() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    assert "proxy_buffering off;" in text and f"server 127.0.0.1:{DEFAULTS.port};" in text
    size = re.search(r"client_max_body_size (\d+)m;", text)
    assert size and int(size[1]) << 20 == DEFAULTS.max_body_bytes
    assert text.count("{") == text.count("}")


def test_prometheus_scrapes_the_server() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"][0]["targets"] == [f"127.0.0.1:{DEFAULTS.port}"]


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_the_image_copies_what_exists_and_what_is_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        name
        for kind, rest in instructions()
        if kind == "COPY" and not rest.startswith("--")
        for name in rest.split()[:-1]
    }
    assert copied == kept and all((ROOT / name).exists() for name in copied) and "*" in lines


def test_the_image_runs_the_server_as_an_unprivileged_user() -> None:
    found = dict(instructions())
    assert found["ENTRYPOINT"] == '["truedraft", "serve"]' and int(found["USER"]) >= 1000
    options = parsed(yaml.safe_load(found["CMD"]))
    assert options["model"] == "nano" and options["host"] == "0.0.0.0"
    assert f"http://127.0.0.1:{DEFAULTS.port}/health" in found["HEALTHCHECK"] and found["EXPOSE"] == str(DEFAULTS.port)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"serve", "ray"} <= set(extras) and ("ARG", "EXTRAS=serve") in instructions()
