"""The binary layout of a CTranslate2 ``model.bin``, version 6, little-endian: named arrays and names for them.

A string is a uint16 length and so many bytes, the last of them zero. The file is: uint32 version, string name of the
specification, uint32 its revision, uint32 number of variables, the variables, uint32 number of aliases, and for each
alias two strings (new name, variable). A variable is: string name, uint8 rank, uint32 a dimension, uint8 type, uint32
bytes, the bytes. Layout contract: CTranslate2 4, ``Model::load`` and its converters' ``model_spec.py``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from runners.errors import UserError

MODEL = "model.bin"
VERSION = 6
# by the number that the file has for it; 5 is bfloat16, which numpy lacks
DTYPES = {0: "float32", 1: "int8", 2: "int16", 3: "int32", 4: "float16", 5: "bfloat16"}
_LONGEST_SPEC = 100  # characters in a specification's name; WhisperSpec has 11

Array = NDArray[Any]


@dataclass(frozen=True)
class Ctranslate2Model:
    """What a ``model.bin`` holds."""

    path: Path
    spec: str  # as "WhisperSpec"
    revision: int
    variables: dict[str, Array]  # float32, float16, int8, int16 or int32, each of its own shape
    aliases: dict[str, str]  # another name: the variable's


def is_model(path: Path) -> bool:
    """Whether the file begins as a ``model.bin`` of CTranslate2 does; any other file, or none, is not one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(6 + _LONGEST_SPEC)
    if len(head) < 6:
        return False
    version, length = struct.unpack_from("<IH", head)
    name = head[6 : 6 + length]
    # a zip archive or pickle, as torch writes, would have a version of millions
    return version < 2**8 and len(name) == length and name.endswith(b"Spec\0")


def read(path: Path) -> Ctranslate2Model:
    """Read the whole file; bfloat16 becomes float32.

    Raises:
        UserError: not such a file, of another version, truncated, or a variable's size is not that of its shape.
    """
    if not is_model(path):
        raise UserError(f"{path}: not a CTranslate2 model: it does not begin with a version and a specification")
    with path.open("rb") as stream:
        reader = _Reader(path, stream, path.stat().st_size)
        version = reader.number("I")
        if version != VERSION:
            raise UserError(f"{path}: CTranslate2 binary version {version}, expected {VERSION}; convert the model anew")
        spec, revision = reader.string(), reader.number("I")
        variables = dict(reader.variable() for _ in range(reader.number("I")))
        aliases = {reader.string(): reader.string() for _ in range(reader.number("I"))}
        rest = reader.size - stream.tell()
    if rest:
        raise UserError(f"{path}: damaged: {rest:,} bytes follow its last alias; fetch it again")
    return Ctranslate2Model(path, spec, revision, variables, aliases)


@dataclass(frozen=True)
class _Reader:
    path: Path
    stream: IO[bytes]
    size: int  # bytes in the file

    def take(self, count: int, what: str) -> bytes:
        # before reading: a damaged count must not ask for more memory than the file is long
        at = self.stream.tell()
        if at + count > self.size:
            raise UserError(
                f"{self.path}: truncated or damaged: {what} ends at byte {at + count:,}, and the file has "
                f"{self.size:,}; fetch it again"
            )
        return self.stream.read(count)

    def number(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self.take(struct.calcsize(form), "a number"))[0])

    def string(self) -> str:
        content = self.take(self.number("H"), "a name")
        try:
            return content.removesuffix(b"\0").decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: damaged: a name is {content[:20]!r}…; fetch it again") from error

    def variable(self) -> tuple[str, Array]:
        name = self.string()
        shape = tuple(self.number("I") for _ in range(self.number("B")))
        number, count = self.number("B"), self.number("I")
        content = self.take(count, f"variable {name!r}")
        dtype = DTYPES.get(number)
        stored = np.dtype("<u2" if dtype == "bfloat16" else dtype or "u1")
        if dtype is None or math.prod(shape) * stored.itemsize != count:
            raise UserError(
                f"{self.path}: variable {name!r} has type {dtype or number}, shape {list(shape)} and {count:,} bytes, "
                f"which do not go together (known types: {', '.join(DTYPES.values())}); fetch it again"
            )
        array = np.frombuffer(content, stored).reshape(shape)
        if dtype == "bfloat16":  # the upper half of a float32
            array = (array.astype("<u4") << 16).view("<f4")
        return name, array
