"""Describe a package, or a bare ``.pte`` file of any origin: ``pteline inspect``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from tokenizers import Tokenizer

from runners.check_report import CheckReport, read_report
from runners.errors import UserError
from runners.inspect_render import render
from runners.inspection import CacheKind, Inspection
from runners.manifest import Manifest
from runners.package import Package, open_package
from runners.pte import read_program
from runners.stock_contract import stock_runner_verdict


def inspect(target: Path) -> Inspection:
    """Describe a package directory or a ``.pte`` file. Nothing is executed, no weight is loaded.

    Raises:
        UserError: the target is missing, is neither, or is damaged.
    """
    if not target.exists():
        raise UserError(f"{target}: no such file or directory; expected a package or a .pte file")
    return _inspect_package(open_package(target)) if target.is_dir() else _inspect_file(target)


def _inspect_file(path: Path) -> Inspection:
    program = read_program(path)
    return Inspection(path=str(path), program=program, stock_runner=stock_runner_verdict(program))


def _inspect_package(package: Package) -> Inspection:
    program = read_program(package.program_path)
    return Inspection(
        path=str(package.path),
        program=program,
        stock_runner=stock_runner_verdict(program, _tokenizer_vocabulary(package)),
        manifest=package.manifest,
        cache=tuple(_cache_kinds(package.manifest)),
        check=_check_report(package),
    )


def _tokenizer_vocabulary(package: Package) -> int | None:
    path = package.tokenizer_path
    return None if path is None else Tokenizer.from_file(str(path)).get_vocab_size()


def _cache_kinds(manifest: Manifest) -> Iterator[CacheKind]:
    """The cache's tensors, gathered by kind, in the order in which the kinds first occur."""
    tensors = manifest.cache.tensors if manifest.cache is not None else []
    order = list(dict.fromkeys(tensor.kind for tensor in tensors))
    for kind, group in groupby(
        sorted(tensors, key=lambda tensor: order.index(tensor.kind)), lambda tensor: tensor.kind
    ):
        members = list(group)
        shapes = {f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]": None for tensor in members}
        yield CacheKind(kind, len(members), sum(tensor.bytes for tensor in members), tuple(shapes))


def _check_report(package: Package) -> CheckReport | None:
    summary = package.manifest.check
    return None if summary is None else read_report(package.path / summary.report)


def to_json(inspection: Inspection) -> str:
    """Everything that is known, as JSON."""
    return TypeAdapter(Inspection).dump_json(inspection, indent=2).decode()


def command(target: Path, json: bool = False) -> None:
    """``pteline inspect PACKAGE|FILE.pte [--json]``: print the description.

    Raises:
        UserError: see :func:`inspect`.
    """
    inspection = inspect(target)
    if json:
        sys.stdout.write(to_json(inspection) + "\n")
    else:
        Console().print(render(inspection))
