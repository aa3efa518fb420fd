"""Tracing with the shortcuts gives the program that tracing without them gives."""

from __future__ import annotations

import gc
import inspect
import operator
import pickle
import sys
import weakref
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module, resources
from io import StringIO
from pathlib import Path

import executorch.exir.dialects.edge
import pytest
import torch
from ruamel import yaml as ruamel
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerGroup

from pipeline.artifacts import Exported, ProgramFacts
from pipeline.kept import read_exported, write_exported
from pipeline.quick.cached_shapes import cached_shapes, is_cacheable
from pipeline.quick.compiled_when_called import compiled_when_called
from pipeline.quick.imports import quick_imports
from pipeline.quick.remembered_sizes import METHODS, remembered_sizes
from pipeline.quick.tracing import quick_tracing
from pipeline.quick.trees import quick_trees, tree_map_only


class Layer(nn.Module):
    """Two quantized linears, a cache that is written in place, and sizes that are computed."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.register_buffer("seen", torch.zeros(1, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[:, : x.shape[1]].copy_(x)
        halves = x.reshape(1, x.shape[1] * 2, 16).flip(-1).reshape(x.shape)
        return x + self.down(nn.functional.silu(self.up(halves))) + self.seen.sum()


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), Layer()).eval().requires_grad_(False)
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(model, config)
    return model


def _traced() -> ExportedProgram:
    sizes = ({1: Dim("S", min=1, max=16)},)
    with torch.no_grad():
        program = torch.export.export(_model(), (torch.ones(1, 5, 32),), dynamic_shapes=sizes, strict=False)
        return program.run_decompositions({})


def _described(program: ExportedProgram) -> list[object]:
    nodes = [(n.op, n.name, str(n.target), str(n.args), str(n.meta.get("val"))) for n in program.graph.nodes]
    return [*nodes, str(program.graph_signature), str(program.range_constraints)]


@pytest.mark.export
@pytest.mark.parametrize("scope", [cached_shapes, compiled_when_called, remembered_sizes, quick_trees, quick_tracing])
def test_the_traced_program_is_the_same(scope):
    plain = _described(_traced())
    with scope():
        assert _described(_traced()) == plain
    assert _described(_traced()) == plain


@pytest.mark.export
def test_a_kept_program_is_the_same_file_and_can_be_read(tmp_path):
    program = _traced()
    torch.export.save(program, tmp_path / "plain.pt2")
    (tmp_path / "kept").mkdir()
    facts = ProgramFacts(signatures={}, cache=None, quantization={})
    write_exported(Exported({"plain": program}, facts), tmp_path / "kept")
    assert (tmp_path / "kept" / "plain.pt2").read_bytes() == (tmp_path / "plain.pt2").read_bytes()
    assert read_exported(tmp_path / "kept").facts == facts


def test_torchao_s_operators_compute_a_shape_once(monkeypatch):
    quantize = torch.ops.torchao.quantize_affine.default
    computed: list[object] = []
    plain = FakeTensorMode._dispatch_impl

    def counted(self: FakeTensorMode, func: object, *rest: object) -> object:
        computed.extend([func] if func is quantize else [])
        return plain(self, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", counted)
    mode = FakeTensorMode()
    with cached_shapes():
        for rows in (4, 6, 4, 6):
            made = [torch.ones(rows, 64), torch.ones(rows, 2), torch.zeros(rows, 2, dtype=torch.int32)]
            values, scale, zero = (mode.from_tensor(tensor) for tensor in made)
            # As it comes from a tracer, which keeps the operator whole.
            found = mode.dispatch(quantize, (FakeTensor,), (values, [1, 32], scale, zero, torch.int8, -8, 7), {})
            assert (found.shape, found.dtype) == ((rows, 64), torch.int8)
    assert len(computed) == 2


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("torchao.quantize_affine.default", True),
        ("torchao.dequantize_affine.default", True),
        ("torchao.choose_qparams_affine.default", True),
        ("aten.add_.Tensor", False),
        ("aten.relu.default", False),
    ],
)
def test_which_operators_are_cached(target: str, expected: bool):
    assert is_cacheable(operator.attrgetter(target)(torch.ops)) is expected
    assert not is_cacheable(operator.mul)


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_graph_is_compiled_when_it_is_called(monkeypatch):
    compiled: list[GraphModule] = []
    plain = GraphModule.recompile
    monkeypatch.setattr(
        "pipeline.quick.compiled_when_called._compile", lambda self: (compiled.append(self), plain(self))[1]
    )
    module = symbolic_trace(_doubled)
    with compiled_when_called():
        product = next(node for node in module.graph.nodes if node.op == "call_function")
        for factor in (3, 4, 5):
            product.args = (product.args[0], factor)
            module.recompile()
        assert not compiled
        assert list(inspect.signature(module.forward).parameters) == ["x"]
        assert float(module(torch.ones(()))) == 5
        assert compiled == [module]
        product.args = (product.args[0], 6)
        module.recompile()
        assert "x * 6" in module.code and "x" not in str(module)
        product.args = (product.args[0], 7)
        module.recompile()
    assert float(module(torch.ones(()))) == 7  # outside too


def _changed(module: GraphModule) -> GraphModule:
    """The same, with a factor of 3."""
    product = next(node for node in module.graph.nodes if node.op == "call_function")
    product.args = (product.args[0], 3)
    module.recompile()
    return module


@pytest.mark.parametrize("is_older", [True, False], ids=["changed within", "made within"])
@pytest.mark.parametrize("read", [lambda module: module.code, str], ids=["code", "text"])
def test_what_was_changed_within_the_scope_is_read_after_it(read: Callable[[GraphModule], str], is_older: bool):
    module = symbolic_trace(_doubled) if is_older else None
    with compiled_when_called():
        module = _changed(module or symbolic_trace(_doubled))
    assert "x * 3" in read(module) and "x * 2" not in read(module)
    assert float(module(torch.ones(()))) == 3


@pytest.mark.parametrize("is_within", [True, False], ids=["within", "after"])
def test_a_module_that_was_changed_can_be_pickled(is_within: bool):
    module = symbolic_trace(lambda x: x * 2)
    with compiled_when_called():
        _changed(module)
        kept = pickle.dumps(module) if is_within else None
    again = pickle.loads(kept or pickle.dumps(module))
    assert float(again(torch.ones(()))) == 3
    assert float(module(torch.ones(()))) == 3


def _sizes() -> tuple[torch.SymInt, torch.SymInt, ShapeEnv]:
    environment = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    tensor = FakeTensorMode(shape_env=environment).from_tensor(torch.zeros(5, 7), symbolic_context=context)
    return tensor.shape[0], tensor.shape[1], environment


@pytest.mark.parametrize("method", METHODS)
def test_remembered_sizes_are_equal_and_objects_of_their_own(method: str):
    first, second, _ = _sizes()
    pairs = [(first.node, second.node), (second.node, first.node), (first.node, first.node.wrap_int(5))]
    pairs += [(first.node, first.node), (first.node.wrap_int(5), first.node)]
    operate = operator.attrgetter(method)
    plain = [operate(a)(b) for a, b in pairs]
    with remembered_sizes():
        once = [operate(a)(b) for a, b in pairs]
        again = [operate(a)(b) for a, b in pairs]
    for expected, *found in zip(plain, once, again, strict=True):
        assert all((n.expr, n.hint, n.pytype) == (expected.expr, expected.hint, expected.pytype) for n in found)
        assert found[0] is not found[1]


def test_what_is_learned_of_a_size_is_not_forgotten():
    first, second, environment = _sizes()
    with remembered_sizes():
        assert first.node.mul(second.node).expr == first.node.expr * second.node.expr
        assert bool(second == first + 2)  # from here on the one stands for the other
        assert environment._replacements_version_counter > 0
        product = first.node.mul(second.node).expr
    assert product == first.node.mul(second.node).expr


def test_an_environment_lives_as_long_as_what_is_remembered_of_it():
    def environment_of_a_sum() -> weakref.ref[ShapeEnv]:
        environment = ShapeEnv()
        symbol = environment.create_symbol(5, ConstantSource("size"), DimDynamic.DYNAMIC)
        size = environment.create_symintnode(symbol, hint=5)
        assert (size + 1).node.expr == symbol + 1
        return weakref.ref(environment)

    with remembered_sizes():
        reference = environment_of_a_sum()
        gc.collect()
        assert reference() is not None  # or another would get its id, and its results
    gc.collect()
    assert reference() is None


def test_a_collector_that_is_off_stays_off():
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("imports", "fails", "frozen"),
    [(True, False, True), (False, False, False), (True, True, False)],
    ids=["imported", "nothing new", "failed"],
)
def test_only_what_was_imported_is_never_collected(
    imports: bool, fails: bool, frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = f"quickly_imported_{imports}_{fails}"
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = gc.get_freeze_count()
    with pytest.raises(ImportError) if fails else nullcontext(), quick_imports():
        if imports:
            monkeypatch.setitem(sys.modules, name, import_module(name))
        if fails:
            raise ImportError
    assert (gc.get_freeze_count() > before) == frozen
    assert gc.isenabled()
    gc.unfreeze()


Pair = namedtuple("Pair", "one two")
TREES = [
    1,
    (1, [2.0, None, (), {"a": 3, "b": [True]}], "text"),
    immutable_list([1, immutable_dict({"b": 2, "a": (3.0,)})]),
    Pair(1, [Pair(2.0, "text")]),
    OrderedDict(b=1, a=[2]),
    deque([1, (2, 3.0)]),
    [slice(1, 2), {1, 2}],
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
@pytest.mark.parametrize(
    "chosen", [int, (int, float), int | str, lambda leaf: leaf == 2], ids=["type", "types", "union", "function"]
)
def test_trees_are_mapped_as_pytree_maps_them(tree: object, chosen: object):
    seen: list[list[object]] = [[], []]
    ways = zip((pytree.tree_map_only, tree_map_only), seen, strict=True)
    expected, found = (way(chosen, lambda leaf, log=log: (log.append(leaf), [leaf])[1], tree) for way, log in ways)
    assert repr(found) == repr(expected) and seen[0] == seen[1]
    assert type(found) is type(expected)
    assert repr(tree_map_only(int, str, tree, is_leaf=lambda x: isinstance(x, list))) == repr(
        pytree.tree_map_only(int, str, tree, is_leaf=lambda x: isinstance(x, list))
    )


def test_executorch_s_table_is_read_as_ruamel_reads_it():
    table = resources.files(executorch.exir.dialects.edge).joinpath("edge.yaml").read_text(encoding="utf-8")
    expected = ruamel.YAML(typ="safe").load(table)
    with quick_imports():
        assert ruamel.YAML(typ="safe").load(table) == expected
    assert len(expected) > 100


def test_other_yaml_is_ruamel_s_own_within_the_scope():
    text = "a: 1  # kept\n"
    with quick_imports():
        reader = ruamel.YAML()
        document, written = reader.load(text), StringIO()
        reader.dump(document, written)
    assert written.getvalue() == text
