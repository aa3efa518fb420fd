"""XNNPACK: the CPU backend of ExecuTorch."""

from __future__ import annotations

from collections.abc import Mapping

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge_transform_and_lower
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import get_lowered_submodules
from torch.export import ExportedProgram
from torch.fx.passes.infra.partitioner import Partition

from pipeline.backends.first_sizes import smallest_first_sizes
from pipeline.backends.levels import partitions_by_level
from pipeline.backends.part import Part
from pipeline.passes.complex_as_real import complex_as_real
from pipeline.passes.computed_once import computed_once
from pipeline.passes.copies_of_the_same import CopiesOfTheSame
from pipeline.passes.doubled_as_linear import doubled_as_linear
from pipeline.passes.gelu_tanh_as_products import gelu_tanh_as_products
from pipeline.passes.half_swap_as_linear import half_swap_as_linear
from pipeline.passes.inferred_size import InferredViewSize, inferred_size
from pipeline.passes.mean_as_linear import mean_as_linear
from pipeline.passes.quantized_embedding import quantized_embedding
from pipeline.quick.lowering import quick_lowering

# What XNNPACK, or a portable kernel, does not take as it is written, rewritten so that it does.
PASSES = (
    computed_once,
    quantized_embedding,
    complex_as_real,
    mean_as_linear,
    half_swap_as_linear,
    doubled_as_linear,
    gelu_tanh_as_products,
    inferred_size,
)
# The same, of what only an edge program has.
EDGE_PASSES = (CopiesOfTheSame, InferredViewSize)


class LevelPartitioner(XnnpackPartitioner):  # type: ignore[misc]  # executorch is Any to the checker
    """Chooses nodes as XNNPACK's own partitioner does, and groups them by ``levels.py``."""

    def generate_partitions(self, program: ExportedProgram) -> list[Partition]:
        """Return the groups of nodes that become delegates."""
        return partitions_by_level(program.graph_module.graph, self.get_matched_nodes_from_configs(program))


def lower(
    programs: Mapping[str, ExportedProgram], constant_methods: dict[str, int | bool | list[int]]
) -> EdgeProgramManager:
    """Return the programs in the edge dialect, with what XNNPACK takes as delegates.

    One partitioner serves float and quantized operators alike: with the dynamically-quantized one before it, each
    quantized linear layer would become a delegate of its own.
    """
    rewritten = {}
    for name, program in programs.items():
        for rewrite in PASSES:
            program = rewrite(program)
        rewritten[name] = program
    with quick_lowering(), smallest_first_sizes():
        return to_edge_transform_and_lower(
            rewritten,
            transform_passes=[rewrite() for rewrite in EDGE_PASSES],
            partitioner=[LevelPartitioner()],
            constant_methods=constant_methods,
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )


def lower_part(program: ExportedProgram) -> Part | None:
    """Return a program without constants as one delegate; None where it is not one.

    Constants would lie in the program's own store of named data, which does not go with the delegate.
    """
    graph_module = lower({"forward": program}, {}).exported_program("forward").graph_module
    nodes = [x for x in graph_module.graph.nodes if x.op == "call_function"]
    calls = [x for x in nodes if x.target is executorch_call_delegate]
    if len(calls) != 1 or len(nodes) != 2:  # the other one takes its output
        return None
    [(_, module, _)] = get_lowered_submodules(graph_module)
    return Part(module, tuple(x.name for x in calls[0].args[1:]))
