"""Passes that write arithmetic another way: the approximate GELU, and complex numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from pipeline.backends import xnnpack
from pipeline.passes.complex_as_real import complex_as_real
from pipeline.passes.gelu_tanh_as_products import gelu_tanh_as_products

pytestmark = pytest.mark.export


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def exported(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, dynamic: bool = False) -> ExportedProgram:
    tokens = Dim("tokens", max=20)
    shapes = {"inputs": tuple({1: tokens} for _ in inputs)} if dynamic else None
    return torch.export.export(Applied(function), inputs, dynamic_shapes=shapes, strict=False).run_decompositions({})


def operators(program: ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def approximate(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x, approximate="tanh")


def test_the_approximate_gelu_becomes_products_of_equal_value() -> None:
    x = torch.linspace(-9, 9, 4001)
    program = gelu_tanh_as_products(exported(approximate, x))
    assert "aten.gelu.default" not in operators(program)
    torch.testing.assert_close(program.module()(x), approximate(x), atol=1e-6, rtol=1e-6)


def test_the_exact_gelu_is_left_alone() -> None:
    program = exported(nn.functional.gelu, torch.randn(8))
    before = str(program.graph)
    assert str(gelu_tanh_as_products(program).graph) == before


def test_a_lowered_approximate_gelu_is_not_the_exact_one() -> None:
    """They differ by up to 5e-4; executorch's own lowering makes no difference between them."""
    from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer

    x = torch.linspace(-4, 4, 801)
    program = xnnpack.lower({"forward": exported(lambda x: approximate(x) + 0.0, x)}, {}).to_executorch()
    (said,) = _load_for_executorch_from_buffer(program.buffer).forward((x,))
    assert (said - approximate(x)).abs().max() < 1e-5
    assert (nn.functional.gelu(x) - approximate(x)).abs().max() > 1e-4


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of Llama 4: x ``[1, S, H, 2 W]``, angle ``[1, S, W]``."""
    turns = torch.polar(torch.ones_like(angle), angle) * 0.5
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, :, None, :]).flatten(3)


def test_a_complex_rotation_becomes_real_of_equal_value() -> None:
    x, angle = torch.randn(1, 5, 3, 8), torch.randn(1, 5, 4)
    program = complex_as_real(exported(turned, x, angle, dynamic=True))
    found = operators(program)
    assert not {name for name in found if "complex" in name or "polar" in name or "real" in name}
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(value.is_complex() for value in values if isinstance(value, torch.Tensor))
    x, angle = torch.randn(1, 9, 3, 8), torch.randn(1, 9, 4)
    torch.testing.assert_close(program.module()(x, angle), turned(x, angle))


def test_an_operator_that_is_not_written_keeps_what_leads_to_it() -> None:
    def angle(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x).reciprocal())

    x = torch.randn(3, 2)
    program = complex_as_real(exported(angle, x))
    assert "aten.view_as_complex.default" in operators(program)
    torch.testing.assert_close(program.module()(x), angle(x))


def test_a_real_program_is_left_alone() -> None:
    program = exported(lambda x, y: (x * y).unsqueeze(0)[:, 1:], torch.randn(3, 4), torch.randn(3, 4))
    before = str(program.graph)
    assert str(complex_as_real(program).graph) == before
