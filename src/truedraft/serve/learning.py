"""Training of a server's drafter in the background, on what the server records: a better one takes its place.

Continued training as in ReSpec (arXiv 2510.26475): responses of live use, weighted by how they were emitted, train the
drafter in a process of its own, of the lowest priority. The checkpoint that results is loaded only where it has more
tokens per pass on held-out responses than the one that drafts, none of which either was trained on; requests that
began before keep their drafter. What a drafter does not change is the text.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from truedraft import assets, registry
from truedraft.call.surroundings import defaults
from truedraft.canvas.accelerated import AcceleratedCanvas
from truedraft.errors import Refused, why
from truedraft.files import read_lines
from truedraft.parts import fitted
from truedraft.serve.config import ServeConfig
from truedraft.serve.loop import EngineLoop
from truedraft.serve.model import ServedModel
from truedraft.train.checkpoints import LOG, STATE

DRAFT_MODEL = "draft-model"  # the training of drafters whose draft model is all that there is to train
POLL = 1.0  # seconds between two looks at the file, and at the process
LINES = 10_000  # newest responses that are trained on, at most
GRACE = 10.0  # seconds in which a process has to end that was asked to
LOWEST = 19  # priority of the process
WORK, LOCK = ".training", "lock"  # names in the folder: of the training that runs, and of what keeps others out
SIGNS = ",=" + registry.SIGNS  # characters that a folder in a spec must not have
log = logging.getLogger("truedraft.serve")


@dataclass(frozen=True)
class Trained:
    """The part of a drafter that can be trained.

    spec: of the part. knob: that names its checkpoint. start: the checkpoint. training: the drafter that `truedraft
    train` is given. learner: its training.
    """

    spec: str
    knob: str
    start: str
    training: str
    learner: Any

    def with_checkpoint(self, folder: Path) -> str:
        """The part with another checkpoint."""
        name, knobs = registry.parsed(self.spec)
        given = {**knobs, self.knob: folder}
        return f"{name}:{','.join(f'{key}={value}' for key, value in given.items())}"

    def command(self, knobs: str, folder: str) -> str:
        """The training as `truedraft train` names it, from a checkpoint."""
        model = f"model={folder}" if self.training == DRAFT_MODEL else ""
        return f"{self.training}:{','.join(filter(None, (model, knobs)))}"


def trained_part(spec: str, source: str | None) -> Trained:
    """What can be trained of a drafter.

    source: the folder that the target was loaded from.

    Raises:
        Refused: nothing, or more than one part; or it has no checkpoint that training goes on from.
    """
    found = [(side, *learnt) for side in parts_of(spec) if (learnt := _learnt(side)) is not None]
    if len(found) != 1:
        reason = f"{len(found)} of its parts learn: name one" if found else "it has nothing to learn: leave train out"
        raise Refused(f"train: draft={spec!r} cannot be trained on, since {reason}")
    side, training, knob, learner = found[0]
    name, knobs = registry.parsed(side)
    start = knobs.get(knob)
    if start is None and training != DRAFT_MODEL:
        start = assets.head(training, source)
    if start is None:
        raise Refused(f"train: draft={spec!r} names no checkpoint to begin with: give one, as in {name}:FOLDER")
    if training != DRAFT_MODEL:
        folder = assets.ROOT / str(start) if start in assets.HEADS.values() else Path(start).expanduser()
        if not (folder / learner.checkpoint).is_file():
            raise Refused(f"train: {str(start)!r} is no checkpoint of `truedraft train {training}`, which goes on")
        start = folder
    return Trained(side, knob, str(start), training, learner)


def parts_of(spec: str) -> list[str]:
    """The drafters that a spec names."""
    sign, sides = registry.split(spec)
    return [part for side in sides for part in parts_of(side)] if sign else [spec]


def replaced(spec: str, part: str, other: str) -> str:
    """A spec with another drafter in the place of one that it names."""
    sign, sides = registry.split(spec)
    return sign.join(replaced(side, part, other) for side in sides) if sign else other if spec == part else spec


def _learnt(spec: str) -> tuple[str, str, Any] | None:
    """What a drafter is trained as, the knob of its checkpoint, and its training; None where it learns nothing."""
    if spec in (registry.AUTO, registry.NONE):
        return None
    name, given = registry.parsed(spec)
    kind = "views" if registry.is_view(name) else "drafters"
    name, _ = registry.presets(kind).get(name, (name, {}))
    method = registry.method(kind, name)
    if method.learner is not None:
        knobs = inspect.signature(method).parameters
        return method.learner.name, "head" if "head" in knobs else "model", method.learner
    if "model" in given:  # a draft model, whatever its trees
        return DRAFT_MODEL, "model", registry.method("drafters", DRAFT_MODEL).learner
    return None


class Learning(threading.Thread):
    """Trains the default drafter of a server each time that so many responses were recorded.

    Folders in `config.train` are numbered: each has a checkpoint that was better than the one before, of which the
    newest alone is kept. A server that is started with the same folder begins with that. What is trained on are the
    responses recorded since the last training that led to a better one began, so that no drafter was trained on those
    by which it is compared.

    Args:
        model: the served model; its default drafter is replaced.
        loop: the engine's thread, in which a drafter is loaded, between two passes.

    Raises:
        Refused: the drafter cannot be trained on, the knobs of the training do not fit, or the folder cannot be used.
    """

    def __init__(self, model: ServedModel, loop: EngineLoop, config: ServeConfig):
        super().__init__(name="truedraft-learning", daemon=True)
        assert config.train is not None and config.record is not None
        self.model, self.loop, self.config = model, loop, config
        self.folder, self.file = config.train.expanduser().resolve(), config.record
        if isinstance(model.fast, AcceleratedCanvas) or model.fast.target.reads_sources:
            raise Refused(f"train={str(config.train)!r}: drafters of decoders are trained on token ids: leave it out")
        if any(sign in str(self.folder) for sign in SIGNS):
            raise Refused(f"train={str(self.folder)!r}: name a folder without any of {' '.join(SIGNS)}")
        self.part = trained_part(config.draft, model.fast.model.config.name_or_path)
        self.current = self.part.start
        self._lock = self._claimed()
        try:
            if newest := self._numbers()[-1:]:
                self.install(self._numbered(newest[0]))
            self._check()
        except BaseException:
            self._lock.close()
            raise
        self._begin = self._end = self.file.stat().st_size  # bytes of the file: what is trained on begins and ends,
        self.fresh = 0  # and lines in it since the last training
        self._ending = threading.Event()

    def _claimed(self) -> IO[str]:
        """Make the folder, and remove what an earlier server has left half done; a file that keeps others out while it
        is open."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open(self.folder / LOCK, "w")  # noqa: SIM115
        except OSError as e:
            raise Refused(f"train={str(self.folder)!r}: {why(e)}") from e
        with contextlib.suppress(ImportError):  # on Windows
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                lock.close()
                raise Refused(f"train={str(self.folder)!r}: another server trains there: name another folder") from e
        shutil.rmtree(self.folder / WORK, ignore_errors=True)
        return lock

    def _check(self) -> None:
        """Raises Refused where the training could not go on from the checkpoint."""
        target = self.model.fast.model
        target = getattr(getattr(target, "stretch", None), "source", target)
        spec = self.part.command(self.config.train_knobs, self.current)
        learner = registry.built(self.part.learner, f"the training of {self.part.training}", spec, _knobs(spec))
        learner.tokenizer = self.model.fast.tokenizer
        frozen = [weight.requires_grad for weight in target.parameters()]
        try:
            with target.device:
                learner.begin(target)
                learner.restore(Path(self.current), target)
        except Refused as e:
            raise Refused(f"train_knobs={self.config.train_knobs!r}, to train {self.current} on: {e}") from e
        finally:
            for weight, before in zip(target.parameters(), frozen, strict=True):
                weight.requires_grad_(before)

    def _numbers(self) -> list[int]:
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def _numbered(self, number: int) -> Path:
        return self.folder / f"{number:04}"

    def install(self, folder: Path) -> None:
        """Draft with the checkpoint in a folder from now on; in the engine's thread, or before it starts: to load a
        model changes torch's settings for all threads.

        Raises:
            Refused: it does not fit the target.
        """
        spec = replaced(self.config.draft, self.part.spec, self.part.with_checkpoint(folder))
        with defaults():
            drafter = fitted(registry.load("drafters", spec), self.model.fast.target, self.model.fast.tokenizer)
        self.model.replace(drafter, spec)
        self.current = str(folder)

    # ---------------------------------------------------------------- the thread

    def run(self) -> None:
        while not self._ending.wait(POLL):
            try:
                self._read()
                if self.fresh >= self.config.train_every:
                    self.fresh = 0
                    self._trained()
            except Exception:  # the server goes on without
                log.exception("the drafter was not trained")

    def stop(self) -> None:
        """End the thread, and the training that runs."""
        self._ending.set()
        if self.is_alive():
            self.join()
        self._lock.close()

    def _read(self) -> None:
        """Count the lines that were added to the file; one that was made anew is read from its beginning."""
        if self.file.stat().st_size < self._end:
            self._begin = self._end = 0
        with open(self.file, "rb") as file:
            file.seek(self._end)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._end += len(whole) + len(newline)
        self.fresh += whole.count(b"\n") + len(newline)

    def _trained(self) -> None:
        """Train on what was recorded, and draft with the outcome where it is better."""
        end, work = self._end, self.folder / WORK
        work.mkdir(mode=0o700)
        try:
            with open(self.file, "rb") as file:
                file.seek(self._begin)
                lines = file.read(end - self._begin).splitlines(keepends=True)[-LINES:]
            (work / "lines.jsonl").write_bytes(b"".join(lines))
            log.info("training", extra={"fields": {"responses": len(lines), "from": self.current}})
            if self._ran(work):
                before, *after = [json.loads(row)["tokens_per_pass"] for row in read_lines(work / "out" / LOG)]
                fields = {"before": before, "after": max(after), "responses": len(lines)}
                if max(after) > before:
                    self._take(work / "out", fields)
                    self._begin = end
                else:
                    log.info("the trained drafter is no better", extra={"fields": fields})
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _ran(self, work: Path) -> bool:
        """Run the training in a process of its own; whether it was completed."""
        config = self.config
        command = [
            sys.executable, "-m", "truedraft", "train", self.part.command(config.train_knobs, self.current),
            "--target", config.model, "--data", str(work / "lines.jsonl"), "--labels", "given",
            "--weights", config.train_weights, "--from", self.current, "--out", str(work / "out"),
            "--minutes", str(config.train_minutes), "--every", str(max(config.train_minutes / 5, 1e-3)),
            "--threads", str(config.train_threads),
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": str(config.train_threads), "OMP_WAIT_POLICY": "passive"}
        with open(work / "output", "wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        try:
            with contextlib.suppress(OSError, AttributeError):  # AttributeError: on Windows
                os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST)
            while process.poll() is None:
                if self._ending.wait(POLL):
                    return False
        finally:
            _end(process)
        if process.returncode:
            reason = (work / "output").read_text(errors="replace").strip().rpartition("\n")[2]
            log.error("a training failed", extra={"fields": {"code": process.returncode, "reason": reason}})
        return process.returncode == 0

    def _take(self, made: Path, fields: dict[str, Any]) -> None:
        """Keep a checkpoint under the next number, and draft with it. It is whole, as its training has ended."""
        folder = self._numbered((self._numbers() or [0])[-1] + 1)
        (made / STATE).unlink(missing_ok=True)
        os.rename(made, folder)
        try:
            self._in_engine(folder)
        except Exception as e:
            shutil.rmtree(folder, ignore_errors=True)
            log.exception("the trained drafter cannot be used: %s", why(e))
            return
        for number in self._numbers()[:-1]:
            shutil.rmtree(self._numbered(number), ignore_errors=True)
        log.info("a better drafter drafts from now on", extra={"fields": {**fields, "folder": str(folder)}})

    def _in_engine(self, folder: Path) -> None:
        """Call `install` in the engine's thread.

        Raises:
            TimeoutError: that has ended.
        """
        future = self.loop.call(lambda: self.install(folder))
        while True:
            try:
                return future.result(POLL)
            except TimeoutError:
                if not self.loop.is_alive():
                    raise


def _knobs(spec: str) -> dict[str, Any]:
    return registry.parsed(spec)[1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that may have ended."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    if process.poll() is None:
        process.kill()
        process.wait()
