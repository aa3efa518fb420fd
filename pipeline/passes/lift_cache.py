"""Decide where the cache of an exported program lives: mutable state in the program, or inputs and outputs.

``torch.export`` gives a program whose cache tensors are user inputs. Once it is functional
(``run_decompositions({})``), a cache tensor that is written in place shows as a ``USER_INPUT_MUTATION``.
``lift_cache`` rewrites the signature only, so that these become mutable buffers (``buffer``) or plain outputs (``io``).
No module that holds the cache is needed for either.

A method need not write the whole cache: of an encoder-decoder model one method writes the encoder's keys and values,
another only reads them. What a method's outputs and the leaves that it is to write do not need is dropped from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from runners.errors import UserError

LeafUse: TypeAlias = Literal["written", "read", "unused"]


@dataclass(frozen=True)
class CacheLeaf:
    """One cache tensor of the program: the placeholder that export made of it, and its readable path."""

    placeholder: str  # "cache_layers_3_keys"
    path: str  # "cache.layers.3.keys"
    use: LeafUse = "written"  # by this method; what it writes to an unused leaf is dropped


def lift_cache(
    program: ExportedProgram,
    leaves: Sequence[CacheLeaf],
    placement: Literal["buffer", "io"],
    outputs: Sequence[str],
    input_names: Mapping[str, str],
    dropped: Sequence[str] = (),
) -> ExportedProgram:
    """Return the program with its cache placed.

    Args:
        program: functional, with the cache's tensors among its user inputs.
        leaves: the cache's tensors, in the order in which ``io`` lists them.
        placement: ``buffer``: state of the program, zero at load. ``io``: inputs, and outputs after the others.
        outputs: names in the out spec of the user outputs to keep, such as ``logits``. The rest, the cache itself among
            them, is dropped.
        input_names: placeholder -> name of that input in the program; any other input, such as a leaf that stays one,
            keeps the name of its placeholder (a name is an argument of ``program.module()``, so it has no dots).
        dropped: placeholders that the model's forward asks for and that this method does not need.

    Raises:
        UserError: the program does not write a leaf that it is to write, writes one that it is only to read or an input
            that is no leaf, or needs what is to be dropped.
    """
    used = [x for x in leaves if x.use != "unused"]
    values = _values(program, leaves)
    kept = _kept_outputs(program, outputs)
    out = {x.placeholder for x in leaves if x.use == "unused"} | set(dropped)
    specs = [s for s in program.graph_signature.input_specs if s.arg.name not in out]
    if placement == "buffer":
        specs_in = _buffer_inputs(specs, used)
        specs_out = [OutputSpec(OutputKind.BUFFER_MUTATION, values[x.placeholder], x.path) for x in used]
        specs_out += kept
    else:
        specs_in = [s for s in specs if not isinstance(s.arg, ConstantArgument)]
        specs_out = kept + [OutputSpec(OutputKind.USER_OUTPUT, values[x.placeholder], None) for x in used]
    _rewrite_graph(program, specs_in, specs_out)
    user_inputs = [s.arg.name for s in specs_in if s.kind == InputKind.USER_INPUT]
    named = {placeholder: input_names.get(placeholder, placeholder) for placeholder in user_inputs}
    return _rebuilt(program, specs_in, specs_out, used if placement == "buffer" else (), named)


def _values(program: ExportedProgram, leaves: Sequence[CacheLeaf]) -> dict[str, TensorArgument]:
    """Placeholder of each leaf that is used -> what holds its value after the call.

    Of a leaf that is only read that is the leaf itself: the mark of a mutable buffer, which costs no copy. Without it a
    buffer is a constant to a backend, which would take its zeros into a delegate.
    """
    written = {
        s.target: s.arg.name for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_INPUT_MUTATION
    }
    if lost := [x.path for x in leaves if x.use == "written" and x.placeholder not in written]:
        raise UserError(f"the model never writes {', '.join(lost)}: its forward does not use the cache it was given.")
    if changed := [x.path for x in leaves if x.use == "read" and x.placeholder in written]:
        raise UserError(
            f"the model writes {', '.join(changed)} in a method that is only to read it: its forward computes the "
            "encoder's keys anew, whatever the cache says."
        )
    if foreign := sorted(set(written) - {x.placeholder for x in leaves}):
        raise UserError(f"the model writes the input {', '.join(foreign)} in place, which is not part of its cache.")
    return {x.placeholder: TensorArgument(written.get(x.placeholder, x.placeholder)) for x in leaves}


def _kept_outputs(program: ExportedProgram, names: Sequence[str]) -> list[OutputSpec]:
    """The user outputs whose first key in the out spec is in ``names``, in that order."""
    spec = program.call_spec.out_spec
    stand_ins = [torch.zeros(1) for _ in range(spec.num_leaves)]  # a cache among the outputs looks at its tensors
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(stand_ins, spec))
    index_of = {_first_key(path): index for index, (path, _) in enumerate(paths)}
    user = [s for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    if missing := [n for n in names if n not in index_of]:
        raise UserError(f"the model returns no {', '.join(missing)}; it returns {', '.join(index_of)}.")
    return [user[index_of[name]] for name in names]


def _first_key(path: pytree.KeyPath) -> str:
    key = path[0]
    return str(
        key.key if isinstance(key, pytree.MappingKey) else key.name if isinstance(key, pytree.GetAttrKey) else key.idx
    )


def _buffer_inputs(specs: Sequence[InputSpec], leaves: Sequence[CacheLeaf]) -> list[InputSpec]:
    """Input specs with the leaves as buffers, before all user inputs; constant arguments (flags) are dropped."""
    paths = {x.placeholder: x.path for x in leaves}
    found = [
        InputSpec(InputKind.BUFFER, s.arg, paths[s.arg.name], persistent=True) if s.arg.name in paths else s
        for s in specs
        if not isinstance(s.arg, ConstantArgument)
    ]
    return sorted(found, key=lambda s: s.kind == InputKind.USER_INPUT)  # stable


def _rewrite_graph(program: ExportedProgram, specs_in: Sequence[InputSpec], specs_out: Sequence[OutputSpec]) -> None:
    """Order the placeholders as ``specs_in``, drop those without a spec, and return what ``specs_out`` names."""
    graph = program.graph_module.graph
    nodes = {node.name: node for node in graph.nodes}
    output = graph.output_node()
    output.args = (tuple(nodes[s.arg.name] for s in specs_out),)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    wanted = [nodes[s.arg.name] for s in specs_in]
    for node in wanted:
        first.prepend(node)
    graph.eliminate_dead_code()
    for node in [n for n in graph.nodes if n.op == "placeholder" and n not in set(wanted)]:
        if node.users:
            raise UserError(f"the model needs {node.name} in a method that is to do without it.")
        graph.erase_node(node)
    program.graph_module.recompile()


def _rebuilt(
    program: ExportedProgram,
    specs_in: Sequence[InputSpec],
    specs_out: Sequence[OutputSpec],
    buffers: Sequence[CacheLeaf],
    inputs: dict[str, str],
) -> ExportedProgram:
    """The program anew from its parts, so that torch verifies the rewritten signature."""
    nodes = {n.name: n for n in program.graph_module.graph.nodes if n.op == "placeholder"}
    state = dict(program.state_dict)
    for leaf in buffers:
        value = nodes[leaf.placeholder].meta["val"]
        state[leaf.path] = torch.zeros([int(d) for d in value.shape], dtype=value.dtype)
    examples = _examples(program)
    kwargs = {name: examples[placeholder] for placeholder, name in inputs.items()}
    call = program.module_call_graph[0]
    outputs = [s.arg.name for s in specs_out if s.kind == OutputKind.USER_OUTPUT]
    signature = replace(
        call.signature,
        inputs=[],  # of the root, torch records only the specs
        outputs=[],
        in_spec=pytree.tree_flatten(((), kwargs))[1],
        out_spec=pytree.tree_flatten(outputs[0] if len(outputs) == 1 else tuple(outputs))[1],
        forward_arg_names=list(kwargs),
    )
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph_module.graph,
        graph_signature=ExportGraphSignature(list(specs_in), list(specs_out)),
        state_dict=state,
        range_constraints=program.range_constraints,
        module_call_graph=[replace(call, signature=signature)],
        example_inputs=((), kwargs),
        constants=program.constants,
        verifiers=[program.verifier],
    )


def _examples(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Placeholder name of each user input -> the example it was traced with."""
    specs = [s for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    return {s.arg.name: value for s, value in zip(specs, pytree.tree_leaves(program.example_inputs), strict=True)}
