"""Read what a ``.pte`` file says of itself: methods, signatures, operators, delegates, planned memory, constants.

Nothing is executed and no weight is read, so a program whose kernels or backends this machine lacks is described too.
The layout is that of ``schema/program.fbs`` and ``schema/extended_header.h`` in ExecuTorch.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from runners.errors import UserError

if TYPE_CHECKING:
    from executorch.exir.schema import EValue, ExecutionPlan, Program

Scalar = bool | int | float | str

FILE_IDENTIFIER = b"ET12"  # bytes 4 to 8; the runtime refuses any other
_HEADER_OFFSET = 8
_HEAD_BYTES = 64
_HEADER_MAGIC = b"eh00"
_SEGMENT_SIZE_END = 32  # a header at least this long also holds the size of all segments
BUILT_IN_OPERATORS = "executorch_prim::"  # part of every runtime
_DTYPES = {"BYTE": "uint8", "CHAR": "int8", "SHORT": "int16", "INT": "int32", "LONG": "int64", "HALF": "float16"}
_DTYPES |= {"FLOAT": "float32", "DOUBLE": "float64"}  # the other names are torch's in capitals


@dataclass(frozen=True)
class TensorDescription:
    """An input or output of a method."""

    name: str | None  # as the exported signature calls it; None where the file does not say
    dtype: str  # "float32", "int64", …; "int", "bool" and the like for a value that is no tensor
    shape: tuple[int, ...]  # the largest size of each dimension
    dynamic: bool  # a call may use less than ``shape``; the file does not say in which dimension

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor, not a number, a text or a list."""
        return self.dtype not in _VALUE_TYPES.values()


@dataclass(frozen=True)
class OperatorUse:
    """How often a method calls an operator outside every delegate."""

    name: str  # "aten::embedding.out"
    count: int


@dataclass(frozen=True)
class DelegateUse:
    """How many delegates a method has for a backend."""

    backend: str  # "XnnpackBackend"
    count: int


@dataclass(frozen=True)
class MethodDescription:
    """One method that computes something."""

    name: str
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]
    planned_bytes: tuple[int, ...]  # one figure a memory arena: activations and mutable buffers
    delegates: tuple[DelegateUse, ...]
    operators: tuple[OperatorUse, ...]  # outside delegates, most frequent first


@dataclass(frozen=True)
class ConstantMethod:
    """One method that returns what was written into it; a list of n values comes out as n outputs."""

    name: str
    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class ProgramDescription:
    """A whole ``.pte`` file."""

    size: int  # bytes
    version: int  # of the program schema
    methods: tuple[MethodDescription, ...]
    constants: tuple[ConstantMethod, ...]
    external_data: bool  # weights lie in a ``.ptd`` file beside it

    def method(self, name: str) -> MethodDescription | None:
        """The method of that name, if there is one."""
        return next((method for method in self.methods if method.name == name), None)

    def constant(self, name: str) -> tuple[Scalar, ...] | None:
        """The values of the constant method of that name, if there is one."""
        return next((constant.values for constant in self.constants if constant.name == name), None)


def read_program(path: Path) -> ProgramDescription:
    """Describe a ``.pte`` file, made by this project or not.

    Raises:
        UserError: the file is missing, is not a ``.pte``, is truncated or damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            program_size = _program_size(path, file.read(_HEAD_BYTES), size)
            file.seek(0)
            program_bytes = file.read(program_size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected an ExecuTorch program (.pte)") from error
    return _describe(_parse(path, program_bytes), size)


def operators_required(description: ProgramDescription) -> tuple[str, ...]:
    """Kernels that a runtime must have to load every method, sorted; those built into every runtime are left out."""
    names = {use.name for method in description.methods for use in method.operators}
    return tuple(sorted(name for name in names if not name.startswith(BUILT_IN_OPERATORS)))


def backends_required(description: ProgramDescription) -> tuple[str, ...]:
    """Backends that a runtime must have to load every method, sorted."""
    return tuple(sorted({use.backend for method in description.methods for use in method.delegates}))


def _program_size(path: Path, head: bytes, size: int) -> int:
    """Bytes of the flatbuffer at the start of the file, after checking that the whole file is there."""
    identifier = head[4:_HEADER_OFFSET]
    if identifier != FILE_IDENTIFIER:
        if identifier[:2] == FILE_IDENTIFIER[:2] and identifier[2:].isdigit():
            raise UserError(
                f"{path}: program format {identifier.decode()}, expected {FILE_IDENTIFIER.decode()}: "
                "export it again with a current ExecuTorch"
            )
        raise UserError(
            f"{path}: not an ExecuTorch program: bytes 4 to 8 are {identifier!r}, expected {FILE_IDENTIFIER!r}"
        )
    header = head[_HEADER_OFFSET:]
    if header[:4] != _HEADER_MAGIC:
        return size  # no segments: the file is the flatbuffer
    length, program, base = _little(header[4:8]), _little(header[8:16]), _little(header[16:24])
    segments = _little(header[24:32]) if length >= _SEGMENT_SIZE_END else 0
    if size < max(program, base + segments):
        raise UserError(
            f"{path}: truncated: {size} bytes, its header announces {max(program, base + segments)}; "
            "copy or build it again"
        )
    return program


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _parse(path: Path, program_bytes: bytes) -> Program:
    # Imported here: it takes seconds. The runtime comes first because it keeps log lines off the terminal.
    from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program

    import runners.runtime  # noqa: F401

    try:
        program: Program = _flatbuffer_to_program(program_bytes)
    except Exception as error:  # a damaged table surfaces as whatever the reader trips over
        raise UserError(
            f"{path}: damaged: its program table cannot be read ({error}); copy or build it again"
        ) from error
    return program


def _describe(program: Program, size: int) -> ProgramDescription:
    plans = program.execution_plan
    return ProgramDescription(
        size=size,
        version=program.version,
        methods=tuple(_describe_method(plan) for plan in plans if not _is_constant(plan)),
        constants=tuple(_describe_constant(plan) for plan in plans if _is_constant(plan)),
        external_data=any(_is_external(value) for plan in plans for value in plan.values),
    )


def _is_constant(plan: ExecutionPlan) -> bool:
    """No input, no instruction, and only plain values as outputs (a constant tensor counts as a method)."""
    computes = any(block.instructions for block in plan.chains)
    plain = all(type(plan.values[index].val).__name__ in _SCALAR_FIELDS for index in plan.outputs)
    return not plan.inputs and not computes and plain


_SCALAR_FIELDS = {"Int": "int_val", "Bool": "bool_val", "Double": "double_val", "String": "string_val"}
_VALUE_TYPES = {"Int": "int", "Bool": "bool", "Double": "float", "String": "str", "Null": "none"}
_VALUE_TYPES |= {"IntList": "list[int]", "BoolList": "list[bool]", "DoubleList": "list[float]"}
_VALUE_TYPES |= {"TensorList": "list[tensor]", "OptionalTensorList": "list[optional tensor]"}


def _describe_constant(plan: ExecutionPlan) -> ConstantMethod:
    values = (plan.values[index].val for index in plan.outputs)
    return ConstantMethod(plan.name, tuple(getattr(value, _SCALAR_FIELDS[type(value).__name__]) for value in values))


def _describe_method(plan: ExecutionPlan) -> MethodDescription:
    inputs = _leaf_names(plan.container_meta_type.encoded_inp_str, len(plan.inputs))
    outputs = _leaf_names(plan.container_meta_type.encoded_out_str, len(plan.outputs))
    return MethodDescription(
        name=plan.name,
        inputs=tuple(_describe_value(plan.values[i], name) for i, name in zip(plan.inputs, inputs, strict=True)),
        outputs=tuple(_describe_value(plan.values[i], name) for i, name in zip(plan.outputs, outputs, strict=True)),
        planned_bytes=tuple(plan.non_const_buffer_sizes[1:]),  # arena 0 is reserved for constants
        delegates=tuple(DelegateUse(*item) for item in Counter(d.id for d in plan.delegates).most_common()),
        operators=_operator_uses(plan),
    )


def _operator_uses(plan: ExecutionPlan) -> tuple[OperatorUse, ...]:
    arguments = (instruction.instr_args for block in plan.chains for instruction in block.instructions)
    calls = Counter(call.op_index for call in arguments if hasattr(call, "op_index"))
    names = [f"{op.name}.{op.overload}" if op.overload else op.name for op in plan.operators]
    uses = [OperatorUse(name, calls[index]) for index, name in enumerate(names)]
    return tuple(sorted(uses, key=lambda use: (-use.count, use.name)))


def _describe_value(value: EValue, name: str | None) -> TensorDescription:
    kind = type(value.val).__name__
    if kind != "Tensor":
        return TensorDescription(name, _VALUE_TYPES[kind], (), dynamic=False)
    tensor = value.val
    scalar_type = tensor.scalar_type.name
    dtype = _DTYPES.get(scalar_type, scalar_type.lower())
    return TensorDescription(name, dtype, tuple(tensor.sizes), dynamic=tensor.shape_dynamism.name != "STATIC")


def _is_external(value: EValue) -> bool:
    info = getattr(value.val, "extra_tensor_info", None)
    return info is not None and info.location.name == "EXTERNAL"


def _leaf_names(encoded: str, count: int) -> list[str | None]:
    """Names of the leaves of a serialized pytree spec: dictionary keys and positions, joined by dots."""
    try:
        _, tree = json.loads(encoded)
        names = list(_walk(tree, ()))
    except (ValueError, TypeError, KeyError):  # an older or foreign encoding
        names = []
    return names if len(names) == count else [None] * count


def _walk(tree: dict[str, object], path: tuple[str, ...]) -> list[str | None]:
    children = tree["children_spec"]
    if not isinstance(children, list):
        raise TypeError("children_spec must be a list")
    if not children:
        is_leaf = tree["type"] is None
        return [".".join(path) or None] if is_leaf else []
    keys = json.loads(str(tree["context"]))
    named = isinstance(keys, list) and len(keys) == len(children)
    steps = [(str(key),) for key in keys] if named else [()] * len(children)
    return list(chain.from_iterable(_walk(child, path + step) for child, step in zip(children, steps, strict=True)))
