"""Lowering with the shortcuts gives the bytes that lowering without them gives."""

from __future__ import annotations

import pytest
import torch
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.pass_base import _ExportPassBase
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, traceback
from torch.fx.experimental.sym_node import SymNode
from torch.utils import _pytree as pytree
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from pipeline.quick.cached_shapes import cached_shapes
from pipeline.quick.compiled_when_called import compiled_when_called
from pipeline.quick.decomposed_once import decomposed_once, is_decomposed
from pipeline.quick.lowering import quick_lowering
from pipeline.quick.remembered_sizes import remembered_sizes
from pipeline.quick.remembered_values import remembered_values
from pipeline.quick.short_provenance import short_provenance
from pipeline.quick.trees import quick_trees
from pipeline.quick.xnnpack_passes import only_needed_passes

SCOPES = [
    only_needed_passes,
    short_provenance,
    remembered_values,
    decomposed_once,
    cached_shapes,
    compiled_when_called,
    remembered_sizes,
    quick_trees,
    quick_lowering,
]


class GatedNorm(nn.Module):
    """RMSNorm, two linears and SiLU, as in a decoder's MLP."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96, bias=False), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class ManyParts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, x + 1, x * 2, x - 3, x / 4, x * x], dim=1)
        return torch.cat([y.transpose(-1, -2).clone(), y.transpose(-1, -2)], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(torch.bmm(x[0], x[0].transpose(-1, -2)), dim=-1)
        whole = nn.functional.scaled_dot_product_attention(x, x * 2, x - 1, self.mask)
        return torch.bmm(scores, x[0]) + whole[0]


class Resized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False) * 2


class PaddedPool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(nn.functional.pad(x, (1, 1, 1, 1)), 2)
        return x.mean((-1, -2), keepdim=True) + x


class PaddedConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(nn.functional.pad(x, (1, 1, 1, 1))))
        return torch.cat([self.second(x), x, x, x, x, x], dim=1)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, x.t()) + torch.addmm(x, x, torch.full((8, 8), 2.0))


def _seeded(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module.eval().requires_grad_(False)


def _quantized(module: nn.Module) -> nn.Module:
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(module, config)
    return module


def _statically_quantized(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    value = (torch.rand(shape, generator=torch.Generator().manual_seed(1)),)
    prepared = prepare_pt2e(torch.export.export(module, value).module(), quantizer)
    prepared(*value)
    return convert_pt2e(prepared)


IMAGE, ROWS, HEADS = (1, 3, 8, 8), (1, 5, 64), (1, 2, 8, 16)
MODELS = {
    "quantized linear": lambda: (_quantized(_seeded(GatedNorm())), ROWS, True),
    "linear": lambda: (_seeded(GatedNorm()), ROWS, True),
    "static linear": lambda: (_seeded(nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))), (2, 64), False),
    "matrix products": lambda: (_seeded(Product()), (8, 8), False),
    "convolution": lambda: (
        _seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Hardtanh(), nn.PReLU(4), nn.BatchNorm2d(4))),
        IMAGE,
        False,
    ),
    "convolution 1d": lambda: (_seeded(nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4))), (1, 3, 8), False),
    "cat": lambda: (ManyParts(), ROWS, False),
    "attention": lambda: (_seeded(Attention()), HEADS, False),
    "resize": lambda: (Resized(), IMAGE, False),
    "static int8": lambda: (_statically_quantized(_seeded(PaddedConvolutions()), IMAGE), IMAGE, False),
    "pad and pool": lambda: (PaddedPool(), IMAGE, False),
}


def _export(name: str) -> ExportedProgram:
    module, shape, dynamic = MODELS[name]()
    value = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    sizes = ({1: Dim("S", min=1, max=32)},) if dynamic else None
    return torch.export.export(module, (value,), dynamic_shapes=sizes)


def _lower(program: ExportedProgram, skip_dim_order: bool) -> bytes:
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=skip_dim_order)
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
    passes = ConstraintBasedSymShapeEvalPass()
    return edge.to_executorch(ExecutorchBackendConfig(sym_shape_eval_pass=passes)).buffer


@pytest.mark.export
@pytest.mark.parametrize("skip_dim_order", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_lowered_bytes_are_the_same(name, skip_dim_order):
    plain = _lower(_export(name), skip_dim_order)
    assert b"XnnpackBackend" in plain
    with quick_lowering():
        assert _lower(_export(name), skip_dim_order) == plain


@pytest.mark.export
@pytest.mark.parametrize("name", ["quantized linear", "convolution"])
@pytest.mark.parametrize("scope", SCOPES[:-1])
def test_each_shortcut_alone_keeps_the_bytes(scope, name):
    plain = _lower(_export(name).run_decompositions({}), True)
    with scope():
        assert _lower(_export(name).run_decompositions({}), True) == plain


@pytest.mark.parametrize("scope", SCOPES)
def test_libraries_are_as_before_after_an_error(scope):
    def substituted() -> list[object]:
        names = [(xnnpack_preprocess, "XNNPACKPassManager"), (traceback, "NodeSource")]
        names += [(_ExportPassBase, "_fx"), (ExportedProgram, "run_decompositions"), (GraphModule, "recompile")]
        names += [(FakeTensorMode, "_validate_cache_key"), (SymNode, "_mul"), (pytree, "tree_map_only")]
        return [getattr(owner, name) for owner, name in names]

    before = substituted()
    with pytest.raises(RuntimeError, match="stop"), scope():
        assert substituted() != before
        raise RuntimeError("stop")
    assert substituted() == before


@pytest.mark.export
def test_a_program_is_decomposed_until_nothing_is_left():
    fresh = _export("linear")
    table = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)}
    assert not is_decomposed(fresh, {})
    functional = fresh.run_decompositions({})
    assert is_decomposed(functional, {}) and not is_decomposed(functional, table)
    with decomposed_once():
        split = functional.run_decompositions(table)
        again = split.run_decompositions(table)
    targets = [node.target for node in split.graph.nodes]
    assert torch.ops.aten.silu.default not in targets and torch.ops.aten.sigmoid.default in targets
    assert [node.target for node in again.graph.nodes] == targets and again.graph is not split.graph


def test_the_oldest_ancestor_is_kept():
    graph = Graph()
    node = graph.placeholder("first")
    with short_provenance():
        for name in ("second", "third", "fourth"):
            source = traceback.NodeSource(node, "pass")
            node = graph.placeholder(name)
            node.meta["from_node"] = [source]
    assert source.name == "third" and source.pass_name == "pass"
    assert [parent.name for parent in source.from_node] == ["first"] and source.from_node[0].from_node == []
