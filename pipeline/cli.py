"""The ``pteline`` command: the runners' commands, and those that need the pipeline."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from pipeline.quick.imports import quick_imports
from runners.cli import app, run_app
from runners.errors import UserError
from runners.quiet_libraries import quiet_libraries

_KEEP = ("export",)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated.")
]


@app.command()
def build(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006  # typer reads the default, nothing writes it
    keep: Annotated[list[str], typer.Option(help="Keep a stage's result beside the package: export.")] = [],  # noqa: B006
    check: Annotated[bool, typer.Option(help="Check the program before the package gets its name.")] = True,
    cache: Annotated[bool, typer.Option(help="Take unchanged stages from the cache.")] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="One line a stage, also where there is no terminal.")
    ] = False,
) -> None:
    """Build a package from a configuration."""
    if unknown := sorted(set(keep) - set(_KEEP)):
        raise UserError(f"--keep {unknown[0]}: no such stage result; accepted: {', '.join(_KEEP)}")
    from pipeline.config_errors import located
    from pipeline.config_reader import read_document, settings_of

    document = read_document(config, overrides)
    settings = settings_of(document)  # before the libraries that take seconds to import
    with quiet_libraries(), located(document):
        with quick_imports():
            from pipeline.build import BuildOptions
            from pipeline.build import build as build_package
            from pipeline.sources.pypi import cache_directory
            from pipeline.stage_cache import StageCache
            from pipeline.stages import Stages

        signal.signal(signal.SIGTERM, _terminate)
        root = cache_directory() / "stages" if cache else None
        stages = Stages(Console(stderr=True), verbose)
        package = build_package(settings, BuildOptions(check, tuple(keep)), stages, StageCache(root))
    sys.stdout.write(f"{package.path}\n")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a configuration, for editors."""
    from pipeline.config_reader import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


@app.command()
def caches(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List every cache and layer class of the installed transformers: registered how, or why not."""
    with quiet_libraries():
        from pipeline.caches.listing import listed_classes
        from pipeline.caches.listing_render import render

        listed = listed_classes()
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in listed], indent=2) + "\n")
    else:
        Console().print(render(listed))


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Leave through the stack, so that what is half written is removed."""
    sys.exit(128 + signum)


def main() -> None:
    """Run the command line."""
    # PyTorch reads this once, when it is loaded. Threads that spin while they wait would, on a busy machine, take the
    # processor from those that they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run_app(app)


if __name__ == "__main__":
    main()
