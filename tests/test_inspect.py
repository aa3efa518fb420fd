"""Describing programs and packages: what the file says, nothing executed, damage named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from runners.errors import UserError
from runners.inspect import command, inspect, to_json
from runners.inspect_render import render
from runners.manifest import CheckSummary, Manifest, StageFigure
from runners.pte import FILE_IDENTIFIER, backends_required, operators_required, read_program
from tests.packages import CHUNK, D, L, Program, V, program_bytes, write_package


def header(program: int, base: int, segments: int) -> bytes:
    """The first bytes of a program that announces these sizes."""
    numbers = b"".join(value.to_bytes(8, "little") for value in (program, base, segments))
    return bytes(4) + FILE_IDENTIFIER + b"eh00" + (32).to_bytes(4, "little") + numbers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an ExecuTorch program"),
        (b"GGUF" + bytes(100), "not an ExecuTorch program"),
        (bytes(4) + b"ET11" + bytes(100), "program format ET11, expected ET12"),
        (header(4096, 8192, 100) + bytes(100), "truncated: 140 bytes, its header announces 8292"),
        (header(4096, 0, 0) + bytes(100), "truncated: 140 bytes, its header announces 4096"),
    ],
)
def test_files_that_are_no_whole_program(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.pte").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_program(tmp_path / "x.pte")


def test_missing_target(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.pte"):
        inspect(tmp_path / "none.pte")


def test_folder_that_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest\.json"):
        inspect(tmp_path)


@pytest.fixture(scope="module")
def lowered() -> bytes:
    return program_bytes("buffer", decode=True)


@pytest.fixture
def file(lowered: bytes, tmp_path: Path) -> Path:
    (tmp_path / "model.pte").write_bytes(lowered)
    return tmp_path / "model.pte"


@pytest.mark.export
def test_signature_of_a_program(file: Path) -> None:
    program = read_program(file)
    assert [method.name for method in program.methods] == ["decode", "forward"]
    forward = program.method("forward")
    assert [(value.dtype, value.shape, value.dynamic) for value in forward.inputs] == [
        ("int64", (1, CHUNK), True),
        ("int64", (1,), False),
    ]
    assert [(value.dtype, value.shape, value.dynamic) for value in forward.outputs] == [
        ("float32", (1, CHUNK, V), True)
    ]
    assert [value.shape for value in program.method("decode").inputs] == [(1, 1), (1,)]
    assert program.size == file.stat().st_size
    assert not program.external_data


@pytest.mark.export
def test_operators_and_delegates_of_a_program(file: Path) -> None:
    program = read_program(file)
    uses = {use.name: use.count for use in program.method("forward").operators}
    assert uses["aten::embedding.out"] == 1
    assert sum(use.count for use in program.method("forward").delegates) >= 1
    assert backends_required(program) == ("XnnpackBackend",)
    assert "aten::embedding.out" in operators_required(program)


@pytest.mark.export
def test_the_runtime_agrees(file: Path) -> None:
    """Names and planned memory against ExecuTorch's own reader."""
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(file)
    program = read_program(file)
    assert {method.name for method in program.methods} | {c.name for c in program.constants} == loaded.method_names
    forward, meta = program.method("forward"), loaded.metadata("forward")
    assert [tuple(meta.input_tensor_meta(i).sizes()) for i in range(meta.num_inputs())] == [
        v.shape for v in forward.inputs
    ]
    assert tuple(meta.output_tensor_meta(0).sizes()) == forward.outputs[0].shape
    assert sum(forward.planned_bytes) > 4 * L * D  # the cache is planned memory
    known = Runtime.get().operator_registry.operator_names
    assert set(operators_required(program)) <= set(known)


@pytest.mark.export
def test_constants_and_names(tmp_path: Path) -> None:
    from executorch.exir import to_edge

    class Sum(torch.nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"total": left + right, "first": left * 2}

    exported = torch.export.export(Sum(), (), {"left": torch.ones(2, 3), "right": torch.ones(3)})
    constants = {"a_number": 16, "a_list": [1, 2], "a_flag": True, "a_float": 1.5, "a_text": "x"}
    (tmp_path / "sum.pte").write_bytes(to_edge(exported, constant_methods=constants).to_executorch().buffer)
    program = read_program(tmp_path / "sum.pte")
    forward = program.method("forward")
    assert [value.name for value in forward.inputs] == ["left", "right"]
    assert [value.name for value in forward.outputs] == ["total", "first"]
    assert {constant.name: constant.values for constant in program.constants} == {
        "a_number": (16,),
        "a_list": (1, 2),
        "a_flag": (True,),
        "a_float": (1.5,),
        "a_text": ("x",),
    }
    assert backends_required(program) == ()


@pytest.mark.export
@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_truncated_program(file: Path, kept: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(UserError, match="truncated"):
        inspect(file)


@pytest.mark.export
def test_damaged_program_table(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[64:2000] = b"\xff" * (2000 - 64)
    file.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        inspect(file)


def shown(inspection) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(inspection))
    return capture.get()


@pytest.mark.export
def test_bare_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspection = inspect(file)
    assert inspection.manifest is None
    assert not inspection.stock_runner.loads
    text = shown(inspection)
    assert "int64 ≤ [1, 8]" in text
    assert "aten::embedding.out" in text
    assert "no constant method 'get_max_seq_len'" in text
    command(file, json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(to_json(inspection))


def complete(manifest: Manifest) -> Manifest:
    """A manifest as a build writes it, with every part that the description shows."""
    tensors = manifest.cache.tensors
    sliding = tensors[0].model_copy(update={"kind": "sliding", "path": "cache.layers.1.keys", "bytes": 1024})
    cache = manifest.cache.model_copy(update={"tensors": [*tensors, sliding], "bytes": tensors[0].bytes + 1024})
    return manifest.model_copy(
        update={
            "cache": cache,
            "quantization": {"linear": "8da4w, group 32"},
            "timings": {"export": StageFigure(seconds=1.5, cpu_seconds=2.5, peak_bytes=2**30, cached=True)},
        }
    )


@pytest.mark.export
def test_package(lowered: bytes, tmp_path: Path) -> None:
    package = write_package(tmp_path / "toy", Program(lowered), change=complete)
    inspection = inspect(package)
    assert [(kind.kind, kind.tensors, kind.bytes) for kind in inspection.cache] == [
        ("full", 1, 4096),
        ("sliding", 1, 1024),
    ]
    text = shown(inspection)
    for expected in (
        "toy: program of",
        "8da4w, group 32",
        "from the stage cache",
        "tokenizer.json",
        "5.0 KiB",
        "1.5.1",
    ):
        assert expected in text
    assert json.loads(to_json(inspection))["manifest"]["name"] == "toy"


@pytest.mark.export
def test_damaged_package_is_not_described(lowered: bytes, tmp_path: Path) -> None:
    package = write_package(tmp_path / "toy", Program(lowered))
    data = bytearray((package / "model.pte").read_bytes())
    data[-1] ^= 1
    (package / "model.pte").write_bytes(data)
    with pytest.raises(UserError, match=r"model\.pte"):
        inspect(package)


@pytest.mark.export
def test_package_whose_report_is_missing(lowered: bytes, tmp_path: Path) -> None:
    def checked(manifest: Manifest) -> Manifest:
        return manifest.model_copy(update={"check": CheckSummary(passed=True, report="report/check.json")})

    package = write_package(tmp_path / "toy", Program(lowered), change=checked)
    with pytest.raises(UserError, match=r"check\.json"):
        inspect(package)
