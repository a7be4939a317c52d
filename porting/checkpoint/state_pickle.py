"""A machine for the part of pickle that a saved state dict needs; it builds descriptions and nothing else.

``torch.save`` writes the structure of a state dict as a pickle
(https://docs.python.org/3/library/pickletools.html lists the opcodes).  A pickle is a program that may call
anything, so it is not given to :mod:`pickle`: this machine knows dictionaries, sequences, numbers, strings
and the few constructors of tensors.  Whatever else a file asks for is refused by name.  The machine is a
plain loop over a stack: deep nesting costs no recursion, and the memo is a dictionary, so that a large memo
index costs nothing either.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import ClassVar

from porting.checkpoint.errors import CheckpointError, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.state_values import (
    DTYPES,
    LAZY,
    OTHER_TENSORS,
    REBUILD,
    STORAGES,
    Global,
    StorageRef,
    TensorSpec,
    describe,
    is_whole,
)
from porting.errors import Code, Fault

MAX_OPCODES = 20_000_000
"""More steps than a state dict of 300,000 tensors takes; bounds time and memory."""

MAX_STRING = 1 << 20
"""The longest string, bytes or number that is read, in bytes."""

MARK = object()
"""Where on the stack a group begins."""


class StateMachine:
    """Runs pickles that stand one after the other in a file.

    Args:
        source: the file.
        start: where the first pickle begins.
        stop: where the last must have ended.

    Attributes:
        needed_by: what the pickle describes, for messages.
        otherwise: what to do about a pickle that describes something else.
        damaged, unsafe: the codes of a pickle that cannot be read, and of one that asks for what could run.
        most: the most steps that are taken.
    """

    needed_by: ClassVar[str] = "state dict"
    otherwise: ClassVar[str] = "nothing was run; take the model's safetensors files, or save its state dict again"
    unsafe: ClassVar[Code] = Code.BIN_UNSAFE
    damaged: ClassVar[Code] = Code.BIN_PICKLE
    most: ClassVar[int] = MAX_OPCODES

    def __init__(self, source: ByteSource, start: int, stop: int) -> None:
        self.source = source
        self.position = start
        self._stop = stop
        self._buffer = b""
        self._buffer_start = start
        self._steps = 0
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def load(self) -> object:
        """The value of the next pickle; :attr:`position` then stands behind it.

        Raises:
            CheckpointError: the pickle is damaged, or asks for what no state dict needs.
        """
        self._stack, self._memo = [], {}
        while True:
            self._steps += 1
            if self._steps > self.most:
                raise self.error(f"more than {self.most} steps, which no {self.needed_by} needs")
            opcode = self._read(1)
            if opcode == b".":
                return self._pop()
            action = ACTIONS.get(opcode)
            if action is None:
                raise self._unknown(opcode)
            action(self)

    def _unknown(self, opcode: bytes) -> CheckpointError:
        at = self.position - 1
        return self.error(f"the opcode 0x{opcode[0]:02x} at byte {at}, which no {self.needed_by} needs", self.unsafe)

    def error(self, message: str, code: Code | None = None, hint: str = "") -> CheckpointError:
        """The error for a pickle that is not a state dict's."""
        return CheckpointError(
            Fault(
                code=code or self.damaged,
                where=self.source.where,
                message=f"in its pickle, {message}",
                hint=hint or self.otherwise,
            )
        )

    # ------------------------------------------------------------------------------------------------ reading
    # bytes

    def _read(self, count: int) -> bytes:
        begin = self.position - self._buffer_start
        if begin + count > len(self._buffer):
            if self.position + count > self._stop:
                raise self.error("it ends in the middle", hint="the file was cut short: fetch it again")
            self._buffer = self.source.pread(self.position, min(max(count, 1 << 16), self._stop - self.position))
            self._buffer_start, begin = self.position, 0
        self.position += count
        return self._buffer[begin : begin + count]

    def _skip(self, count: int) -> None:
        self._read(count)

    def _number(self, layout: str) -> int:
        value: int
        (value,) = struct.unpack(layout, self._read(struct.calcsize(layout)))
        return value

    def _bytes(self, layout: str) -> bytes:
        count = self._number(layout)
        if not 0 <= count <= MAX_STRING:
            raise self.error(f"a string of {count} bytes, which no {self.needed_by} needs")
        return self._read(count)

    def _line(self) -> str:
        line = bytearray()
        while (byte := self._read(1)) != b"\n":
            line += byte
            if len(line) > MAX_STRING:
                raise self.error("a name without end")
        return self._text(bytes(line))

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"a string that is not UTF-8 before byte {self.position}") from error

    # -----------------------------------------------------------------------------------------------------
    # the stack

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> object:
        if not self._stack or self._stack[-1] is MARK:
            raise self.error(f"too few values on the stack at byte {self.position}")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[object]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise self.error(f"a group without beginning at byte {self.position}")

    def _tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def _put(self, index: int) -> None:
        value = self._pop()
        self._memo[index] = value
        self._push(value)

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self.error(f"the memo has no entry {index}")
        self._push(self._memo[index])

    def _top(self) -> object:
        value = self._pop()
        self._push(value)
        return value

    def _set_items(self, values: list[object]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(values) % 2:
            raise self.error(f"items for {describe(target)} at byte {self.position}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # A key of nested tuples would be hashed by recursion in C, deeper than any stack.
            if not isinstance(key, str | int | float | bytes | None):
                raise self.error(f"{describe(key)} as the key of a dictionary")
            target[key] = value

    def _extend(self, values: list[object]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise self.error(f"elements for {describe(target)} at byte {self.position}")
        target.extend(values)

    def _set_one(self) -> None:
        value = self._pop()
        key = self._pop()
        self._set_items([key, value])

    def _protocol(self) -> None:
        version = self._number("<B")
        if version > 5:
            raise self.error(f"protocol {version}, where 2 is usual and 5 the newest")

    def _new(self) -> None:
        raise self._unknown(b"\x81")

    def _build(self) -> None:
        self._pop()  # attributes, such as a state dict's _metadata: they carry no weights
        target = self._pop()
        if not isinstance(target, dict | TensorSpec):
            raise self.error(f"attributes for {describe(target)}", Code.BIN_UNSAFE)
        self._push(target)

    # --------------------------------------------------------------------------------------- names, storages,
    # tensors

    def _global(self, module: str, name: str) -> None:
        known = (
            (module == "collections" and name == "OrderedDict")
            or (module == "torch" and (name in STORAGES or name in DTYPES or name == "Size"))
            or (module == "torch.storage" and name == "UntypedStorage")
            or (module == "torch._utils" and name in REBUILD)
        )
        if known:
            self._push(Global(module, name))
        elif module == "torch._utils" and name in OTHER_TENSORS:
            raise self.error(
                f"{OTHER_TENSORS[name]} ({name})", Code.BIN_TENSOR, "save dense tensors: tensor.to_dense()"
            )
        elif module.startswith(("torch.nn.modules", "__torch__", "__main__")):
            raise self.error(
                f"the class {quote(f'{module}.{name}')}: a whole module, which runs code when loaded",
                Code.BIN_UNSAFE,
                "nothing was run; save model.state_dict() instead of the model",
            )
        else:
            raise self._uncalled(module, name)

    def _uncalled(self, module: str, name: str) -> CheckpointError:
        what = f"a call of {quote(f'{module}.{name}')}"
        return self.error(f"{what}, which no {self.needed_by} needs and which could run code", self.unsafe)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.error("a global whose name is no string", self.unsafe)
        self._global(module, name)

    def _persistent(self) -> None:
        match self._pop():
            case ("storage", Global() as kind, str() as key, str(), int() as count, *rest):
                base = 0
                match rest:
                    case [(str(), int() as begin, int())]:
                        base = begin
                    case [] | [None]:
                        pass
                    case _:
                        raise self.error("a storage with an unknown view")
                if kind.name not in STORAGES and kind.name != "UntypedStorage":
                    raise self.error(f"a storage of {kind.module}.{kind.name}")
                self._push(StorageRef(key, STORAGES.get(kind.name), count, base))
            case other:
                raise self.error(f"{describe(other)} where a storage is expected")

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise self.error(f"a call of {describe(function)}", self.unsafe)
        if function.name == "OrderedDict" and not args:
            self._push({})
        elif function.name == "Size" and len(args) == 1 and isinstance(args[0], tuple | list):
            self._push(tuple(args[0]))
        elif function.name == "_rebuild_parameter" and args and isinstance(args[0], TensorSpec):
            self._push(args[0])
        elif function.name in REBUILD:
            self._push(self._tensor(args))
        else:
            raise self.error(f"a call of {function.module}.{function.name} with unknown arguments")

    def _tensor(self, args: tuple[object, ...]) -> TensorSpec:
        """The arguments of ``_rebuild_tensor`` (4), ``_v2`` (6 or 7) and ``_v3`` (7 or 8, with a dtype)."""
        match args:
            case (StorageRef() as storage, int() as offset, tuple() as size, tuple() as stride, *rest):
                dtype = next(
                    (DTYPES[x.name] for x in rest if isinstance(x, Global) and x.name in DTYPES),
                    storage.dtype,
                )
                last = rest[-1] if len(rest) > 2 else None
                lazy = ""
                if isinstance(last, dict):
                    lazy = " and ".join(word for key, word in LAZY.items() if last.get(key))
                if dtype is None or not is_whole(size) or not is_whole(stride) or len(size) != len(stride):
                    raise self.error("a tensor without a proper dtype, size or stride")
                return TensorSpec(storage, dtype, offset, size, stride, lazy)
            case _:
                raise self.error("a tensor whose description is incomplete")


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


Action = Callable[[StateMachine], None]

ACTIONS: dict[bytes, Action] = {
    b"\x80": StateMachine._protocol,
    b"\x95": lambda m: m._skip(8),  # FRAME
    b"(": lambda m: m._push(MARK),
    b"}": lambda m: m._push({}),
    b"]": lambda m: m._push([]),
    b")": lambda m: m._push(()),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"K": lambda m: m._push(m._number("<B")),
    b"M": lambda m: m._push(m._number("<H")),
    b"J": lambda m: m._push(m._number("<i")),
    b"\x8a": lambda m: m._push(_signed(m._bytes("<B"))),  # LONG1
    b"\x8b": lambda m: m._push(_signed(m._bytes("<i"))),  # LONG4
    b"G": lambda m: m._push(struct.unpack(">d", m._read(8))[0]),
    b"X": lambda m: m._push(m._text(m._bytes("<I"))),
    b"\x8c": lambda m: m._push(m._text(m._bytes("<B"))),
    b"\x8d": lambda m: m._push(m._text(m._bytes("<Q"))),
    b"U": lambda m: m._push(m._text(m._bytes("<B"))),  # a string of Python 2
    b"T": lambda m: m._push(m._text(m._bytes("<i"))),
    b"C": lambda m: m._push(m._bytes("<B")),
    b"B": lambda m: m._push(m._bytes("<I")),
    b"t": lambda m: m._push(tuple(m._pop_to_mark())),
    b"l": lambda m: m._push(m._pop_to_mark()),
    b"\x85": lambda m: m._tuple_of(1),
    b"\x86": lambda m: m._tuple_of(2),
    b"\x87": lambda m: m._tuple_of(3),
    b"q": lambda m: m._put(m._number("<B")),
    b"r": lambda m: m._put(m._number("<I")),
    b"\x94": lambda m: m._put(len(m._memo)),
    b"h": lambda m: m._get(m._number("<B")),
    b"j": lambda m: m._get(m._number("<I")),
    b"s": StateMachine._set_one,
    b"u": lambda m: m._set_items(m._pop_to_mark()),
    b"a": lambda m: m._extend([m._pop()]),
    b"e": lambda m: m._extend(m._pop_to_mark()),
    b"b": lambda m: m._build(),
    b"c": lambda m: m._global(m._line(), m._line()),
    b"\x93": StateMachine._stack_global,
    b"Q": lambda m: m._persistent(),
    b"R": lambda m: m._reduce(),
    b"\x81": lambda m: m._new(),
}
