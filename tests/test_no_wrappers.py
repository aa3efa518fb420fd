"""No module is wrapped around a model: its own ``forward`` is exported, and transformers' wrappers stay unused."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(file for half in ("pipeline", "runners") for file in (ROOT / half).rglob("*.py"))
WRAPPERS = ("transformers.integrations.executorch", "transformers.exporters")

IMPORT_ALL = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
for half in ("pipeline", "runners"):
    for file in sorted((root / half).rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        if not name.endswith("__main__"):
            importlib.import_module(name.removesuffix(".__init__"))
"""
LIST_CLASSES = """
import torch
seen = [cls for name, module in list(sys.modules.items()) if name.split(".")[0] in ("pipeline", "runners")
        for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == name]
print("classes", len(seen), *(f"{c.__module__}.{c.__name__}" for c in seen if issubclass(c, torch.nn.Module)))
"""
BUILD = """
from pipeline.cli import app
app(["build", "a.yaml", "--no-check", "--no-cache"], standalone_mode=False)
"""
LIST_MODULES = """
print("modules", *sys.modules)
"""


def printed(code: str, word: str, folder: Path) -> list[str]:
    """What ``code``, run by another Python, prints after ``word``."""
    command = [sys.executable, "-c", code, str(ROOT)]
    done = subprocess.run(command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith(word)).split()[1:]


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PTELINE_CACHE": str(folder / "cache")}


def wrappers_in(modules: list[str]) -> list[str]:
    return [name for name in modules if name.startswith(WRAPPERS)]


def test_no_class_of_either_half_is_a_module(tmp_path: Path) -> None:
    count, *modules = printed(IMPORT_ALL + LIST_CLASSES, "classes", tmp_path)
    assert int(count) > 100  # they were looked at
    assert modules == []


def test_importing_everything_loads_no_wrapper_of_transformers(tmp_path: Path) -> None:
    modules = printed(IMPORT_ALL + LIST_MODULES, "modules", tmp_path)
    assert {"pipeline.register", "runners.session", "transformers.cache_utils"} <= set(modules)
    assert wrappers_in(modules) == []


@pytest.mark.export
def test_a_build_loads_no_wrapper_of_transformers(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path / "m", tiny.Shape(layers=1))
    (tmp_path / "a.yaml").write_text("name: a\nmodel: {source: ./m}\ncache: {max_length: 64}\n")
    modules = printed("import sys" + BUILD + LIST_MODULES, "modules", tmp_path)
    assert (tmp_path / "dist" / "a" / "model.pte").is_file()
    assert "transformers.models.llama.modeling_llama" in modules
    assert wrappers_in(modules) == []


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every name, attribute, import and text that a source holds."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
                yield name
            case ast.ImportFrom(module=str(name)):
                yield name


def bases_in(tree: ast.AST) -> Iterator[str]:
    """The last part of the name of every base of every class, classes inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_source_names_a_wrapper_or_derives_from_a_module(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert [name for name in names_in(tree) if "TorchExportable" in name or any(w in name for w in WRAPPERS)] == []
    assert [base for base in bases_in(tree) if base.endswith(("Module", "PreTrainedModel", "ForCausalLM"))] == []


def test_a_wrapper_would_be_seen() -> None:
    source = (
        "from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM as Wrapped\n"
        "def export(model):\n    class Wrapper(torch.nn.Module):\n        pass\n    return Wrapper(model)\n"
    )
    tree = ast.parse(source)
    assert "TorchExportableModuleForDecoderOnlyLM" in list(names_in(tree))
    assert list(bases_in(tree)) == ["Module"]
    assert wrappers_in(["transformers.exporters.auto", "transformers.cache_utils"]) == ["transformers.exporters.auto"]
