"""The command line: `truedraft generate`, `truedraft chat`, `truedraft correct`, `truedraft translate`,
`truedraft demo`, `truedraft bench`, `truedraft audit`, `truedraft corpus`, `truedraft train`, `truedraft shapes`,
`truedraft calibrate`, `truedraft export`, `truedraft serve`, `truedraft plan`, `truedraft methods`."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from truedraft import __version__
from truedraft.cli import (
    audit,
    bench,
    calibrate,
    chat,
    corpus,
    correct,
    demo,
    export,
    generate,
    methods,
    plan,
    serve,
    shapes,
    train,
    translate,
)
from truedraft.cli._options import Command
from truedraft.cli._streams import guarded
from truedraft.cli._text import notes_on_stderr
from truedraft.errors import Refused, why


def _print_version(requested: bool) -> None:
    """Print the versions that a bug report needs, and which compiled code is missing, and exit."""
    if requested:
        from truedraft.runtime import native
        from truedraft.stores import _native as stores

        packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
        print(f"truedraft {__version__} (Python {platform.python_version()}, {packages})")
        if why_not := native.missing():
            print(f"passes on the CPU are those of transformers: {why_not}")
        if stores.library() is None or stores.trees() is None:
            print(
                "drafts are made by Python code, which takes longer: its compiled parts were not built, or are disabled"
            )
        raise typer.Exit


app = typer.Typer(
    name="truedraft",
    epilog="Example: truedraft demo",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    add_completion=False,
)
EXAMPLES: dict[Callable[..., int | None], str] = {
    generate.generate: 'truedraft generate nano "one day, a little girl" --max-new-tokens 100',
    chat.chat: "truedraft chat MODEL --show-drafts",
    correct.correct: "truedraft correct notes.txt --diff",
    translate.translate: "truedraft translate FILE --model Helsinki-NLP/opus-mt-en-de --out OUT",
    demo.demo: "truedraft demo --model nano --threads 1",
    bench.bench: "truedraft bench nano --draft auto --draft none --limit 2 --html page.html",
    audit.audit: "truedraft audit nano --draft suffix --max-new-tokens 32",
    train.train: "truedraft train gad:k=6 --target MODEL --data FILE --out FOLDER --minutes 30",
    shapes.shapes: "truedraft shapes --target MODEL --data FILE --out RUN --parameters 100000000 --minutes 30",
    calibrate.calibrate: "truedraft calibrate sleb --target MODEL --data FILE --out sleb.json",
    export.export: "truedraft export FOLDER --target MODEL --format vllm --out OUT",
    serve.serve: "truedraft serve nano --port 8000",
    plan.plan: "truedraft plan nano --draft draft-model:nano-draft --rows 4 --tokens 1000 --memory 1GiB",
    methods.methods: "truedraft methods --json",
}
for command, example in EXAMPLES.items():
    app.command(cls=Command, epilog=f"Example: {example}")(command)
app.add_typer(corpus.app, name="corpus")

WRITERS = ("correct", "corpus", "export", "train", "translate")  # commands whose results may be files


@app.callback()
def truedraft(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding for transformers: several tokens per pass, exactly the output of the model alone."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line, that of the process by default, and return its exit code.

    Expected errors (`Refused`, OSError, ValueError, a wrong option) become one line on stderr and code 2; Ctrl-C
    is 130; a closed reader of standard output (`| head`) is 141.
    """
    given = list(sys.argv[1:] if args is None else args)
    return guarded(lambda: _run(given))


def _run(args: list[str]) -> int:
    try:
        if sys.stdout is None and not {*WRITERS} & {*args[:1]}:
            raise Refused("standard output is closed, and the result goes there: leave it open")
        with notes_on_stderr():
            code = app(args or ["--help"], prog_name="truedraft", standalone_mode=False, obj=args) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        raise
    except Exception as e:
        usage = getattr(e, "format_message", None)  # typer's own errors; their class moved between its versions
        if usage is None and not isinstance(e, OSError | ValueError):
            raise
        where = f"{e.filename}: " if isinstance(e, OSError) and e.filename else ""
        message = " ".join(f"{where}{usage() if usage else why(e)}".split())
        print(f"error: {message}", file=sys.stderr)
        return 2
