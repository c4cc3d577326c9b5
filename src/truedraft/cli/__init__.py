"""The command line: `truedraft generate`, `truedraft correct`, `truedraft translate`, `truedraft demo`,
`truedraft bench`, `truedraft audit`, `truedraft corpus`, `truedraft train`, `truedraft methods`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from truedraft.cli import audit, bench, corpus, correct, demo, generate, methods, train, translate
from truedraft.cli._text import notes_on_stderr

app = typer.Typer(
    name="truedraft",
    help="Generation with transformers, several tokens per pass, exactly what the model alone would have said.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (
    generate.generate, correct.correct, translate.translate, demo.demo, bench.bench, audit.audit, train.train,
    methods.methods,
):  # fmt: skip
    app.command()(command)
app.add_typer(corpus.app, name="corpus")


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line, that of the process by default, and return its exit code.

    Expected errors (`Refused`, OSError, ValueError, a wrong option) become one line on stderr and code 2; Ctrl-C
    is 130.
    """
    args = list(sys.argv[1:] if args is None else args)
    try:
        with notes_on_stderr():
            return app(args or ["--help"], prog_name="truedraft", standalone_mode=False) or 0
    except Exception as e:
        usage = getattr(e, "format_message", None)  # typer's own errors; their class moved between its versions
        if usage is None and not isinstance(e, OSError | ValueError):
            raise
        message = " ".join(str(usage() if usage else e).split())
        print(f"error: {message}", file=sys.stderr)
        return 2
