"""Passes over edge programs: what they drop, what they leave, and that whole models say the same, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.pass_base import ExportedProgramPassBase
from torch import nn
from torch.export import Dim, ExportedProgram

from pipeline.artifacts import EmittedFacts, Quantized
from pipeline.backends import xnnpack
from pipeline.config import CacheSettings, LowerSettings
from pipeline.emit import emit
from pipeline.export import export
from pipeline.lower import lower
from pipeline.passes.copies_of_the_same import CopiesOfTheSame
from pipeline.passes.inferred_size import InferredViewSize
from pipeline.tasks import TASKS
from runners.manifest import PROGRAM_NAME
from runners.package import Package
from runners.program import Program
from tests.zoo import build, encoder_decoders, families
from tests.zoo.encoder_decoders import random_input
from tests.zoo.greedy import random_ids
from tests.zoo.row import Family

pytestmark = pytest.mark.export


Function = Callable[[torch.Tensor], torch.Tensor]


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def edge(module: nn.Module, dynamic: dict[int, Dim] | None = None) -> ExportedProgram:
    """The edge program of ``module``, whose input ``x`` is float32 ``[1, 4, 6, 8]``."""
    example = (torch.randn(1, 4, 6, 8),)
    found = torch.export.export(module, example, dynamic_shapes={"x": dynamic}, strict=False)
    return to_edge(found, compile_config=EdgeCompileConfig(_skip_dim_order=True)).exported_program()


def dynamic_edge(function: Function) -> ExportedProgram:
    """That of a function, with any number of tokens on the third axis."""
    return edge(Applied(function), {2: Dim("tokens", max=32)})


def operators(program: ExportedProgram) -> Counter[str]:
    return Counter(
        n.target.__name__ for n in program.graph.nodes if n.op == "call_function" and "aten" in str(n.target)
    )


# Copies of the same


SAME: dict[str, Function] = {
    "expand": lambda x: x.exp().expand(1, 4, x.shape[2], 8),
    "expand with -1": lambda x: x.exp().expand(-1, -1, -1, -1),
    "permute": lambda x: x.exp().permute(0, 1, 2, 3),
    "view": lambda x: x.exp().view(1, 4, x.shape[2], 8),
    "slice": lambda x: x.exp()[:, :4, :, 0:8],
    "clone": lambda x: x.exp().clone(),
    "repeat": lambda x: x.exp().repeat(1, 1, 1, 1),
}


@pytest.mark.parametrize("function", SAME.values(), ids=SAME.keys())
def test_a_copy_of_the_same_is_dropped(function: Function) -> None:
    program = CopiesOfTheSame()(dynamic_edge(lambda x: function(x).sin())).exported_program
    assert operators(program) == {"aten.exp.default": 1, "aten.sin.default": 1}
    for length in (1, 11):
        x = torch.randn(1, 4, length, 8)
        assert torch.equal(program.module()(x), x.exp().sin())


OTHERS: dict[str, Function] = {
    "expand": lambda x: x.exp().expand(3, 4, x.shape[2], 8),
    "permute of equal sizes": lambda x: x[..., :4].exp().permute(0, 3, 2, 1),
    "view": lambda x: x.exp().view(4, x.shape[2], 8),
    "slice": lambda x: x.exp()[..., 1:],
    "slice of a dynamic axis": lambda x: x.exp()[:, :, -1:],
    "every second": lambda x: x.exp()[..., ::2],
    "another order in memory": lambda x: x.exp().clone(memory_format=torch.channels_last),
    "another type": lambda x: x.exp().to(torch.float64),
    "repeat": lambda x: x.exp().repeat(1, 2, 1, 1),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS.keys())
def test_another_copy_stays(function: Function) -> None:
    before = dynamic_edge(lambda x: function(x).sin())
    wanted = operators(before)
    assert operators(CopiesOfTheSame()(before).exported_program) == wanted


class Remembering(nn.Module):
    """Gives what it was given the time before. x [1, 4, 6, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1, 4, 6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.last.clone()
        self.last.copy_(x)
        return before.sin()


@pytest.mark.parametrize("module", [Remembering(), Applied(lambda x: x.clone())], ids=["written buffer", "output"])
def test_a_copy_that_keeps_a_value_stays(module: nn.Module) -> None:
    program = CopiesOfTheSame()(edge(module)).exported_program
    assert operators(program)["aten.clone.default"] == 1


class Before(nn.Module):
    """Writes rows x [1, 8] at pos [1] and gives what was there before, seen in another shape, plus one."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4, 8))
        self.shape = shape

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        before = self.last.view(self.shape).clone()
        self.last.index_put_((pos,), x)
        return before + 1


@pytest.mark.parametrize("shape", [(4, 8), (1, 4, 8)], ids=["the same shape", "another shape"])
def test_what_a_view_of_a_buffer_held_is_kept_where_the_runtime_writes_in_place(shape: tuple[int, ...]) -> None:
    from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer

    calls = [(torch.full((1, 8), float(count)), torch.tensor([count % 4])) for count in range(6)]
    config = EdgeCompileConfig(_skip_dim_order=True)
    exported = torch.export.export(Before(shape), calls[0], strict=False).run_decompositions({})
    lowered = to_edge_transform_and_lower(exported, transform_passes=[CopiesOfTheSame()], compile_config=config)
    built = lowered.to_executorch(ExecutorchBackendConfig(run_reinplace_pass=True))
    assert "index_put_" in str(built.exported_program().graph), "nothing is written in place: there is nothing to test"
    program, model = _load_for_executorch_from_buffer(built.buffer), Before(shape)
    said = [(program.forward(inputs)[0].clone(), model(*inputs)) for inputs in calls]
    assert all(torch.equal(found, wanted) for found, wanted in said[4:])  # from here on each row was written


# Views


def sizes_of_views(program: ExportedProgram) -> list[list[str]]:
    return [[str(size) for size in n.args[1]] for n in program.graph.nodes if "view_copy" in str(n.target)]


def test_the_views_around_a_product_have_no_symbol_afterwards() -> None:
    def scores(x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, torch.ones(1, 4, 8, 5))

    program = InferredViewSize()(dynamic_edge(scores)).exported_program
    assert sorted(sizes_of_views(program)) == [["1", "4", "-1", "5"], ["4", "-1", "8"], ["4", "8", "5"]]
    for length in (1, 11):
        x = torch.randn(1, 4, length, 8)
        assert torch.equal(program.module()(x), scores(x))


def test_a_view_with_two_dynamic_sizes_stays() -> None:
    before = dynamic_edge(lambda x: torch.matmul(x, x.transpose(-2, -1)))
    *_, wanted = sizes_of_views(before)
    assert len([size for size in wanted if size.isidentifier()]) == 2
    assert sizes_of_views(InferredViewSize()(before).exported_program)[-1] == wanted


# Whole models


def family(name: str, modules: tuple[Family, ...]) -> Family:
    return next(each for each in modules if each.name == name)


WHOLE = [family(name, encoder_decoders.FAMILIES) for name in ("whisper", "t5")]
WHOLE += [family(name, families.FAMILIES) for name in ("gemma2",)]


def built(family: Family, folder: Path) -> tuple[EmittedFacts, Package]:
    folder.mkdir()
    model, task, extras = family.model(), TASKS[family.task], family.extras()
    cache = CacheSettings(max_length=build.LENGTH, max_encoder_length=family.encoder_length)
    registered = task.register(Quantized(model, {}, extras), cache, family.export)
    exported = export(registered, task.plan(registered, family.export), {})
    facts = emit(lower(exported, LowerSettings(), {}), {}, folder / PROGRAM_NAME).facts
    return facts, Package(folder, build.manifest(family, model, facts))


def said(package: Package) -> list[torch.Tensor]:
    """All that a program gives in a few calls of several lengths, the encoder's first."""
    program, found = Program(package), []
    methods = package.manifest.methods
    if "encode" in methods:
        (spec,) = methods["encode"].inputs
        encode = program.method("encode")
        found += encode.call([random_input(spec, spec.shape[-1], 64, 1)])
    name = "decode" if "decode" in methods else "forward"
    position, method = 0, program.method(name)
    for length in (7, 1, 3, 8, 1):
        rest = [torch.ones(spec.shape, dtype=torch.int64) for spec in methods[name].inputs[2:]]
        found += method.call([torch.tensor([random_ids(length, 64)]), torch.tensor([position]), *rest])
        position += length
    return found


def counted(facts: EmittedFacts) -> tuple[int, int]:
    """Operators outside delegates, and delegates."""
    found = [method.delegation for method in facts.methods.values()]
    return sum(o.count for each in found for o in each.undelegated), sum(each.delegates for each in found)


@pytest.mark.parametrize("family", WHOLE, ids=lambda family: family.name)
def test_a_model_says_the_same_with_less_outside_its_delegates(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, package = built(family, tmp_path / "with")
    passes: list[type[ExportedProgramPassBase]] = []
    monkeypatch.setattr(xnnpack, "EDGE_PASSES", passes)
    plain_facts, plain = built(family, tmp_path / "without")
    operators, delegates = counted(facts)
    plain_operators, plain_delegates = counted(plain_facts)
    assert operators < plain_operators
    assert delegates < plain_delegates
    outputs, expected = said(package), said(plain)
    assert all(x.isfinite().all() for x in expected)
    assert [torch.equal(x, y) for x, y in zip(outputs, expected, strict=True)] == [True] * len(expected)
