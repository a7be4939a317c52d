"""GGUF, the container of llama.cpp: settings, then the descriptions of the tensors, then their elements.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  Settings are the model's config; lists of texts (the
vocabulary among them) are walked over and not kept.  Sizes stand with the fastest axis first, the other way round than
here.  Elements of the floating-point and integer types lie in the file as torch has them.  Quantised types are blocks
of several numbers each, which the package gguf (``pip install porting[gguf]``) unpacks to float32 as they are read, a
few rows at a time.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from porting.checkpoint.container import (
    Container,
    FileKind,
    Outline,
    Promises,
    Shard,
    TokenizerFiles,
    UnrecognisedError,
    WriteOptions,
    nbytes,
)
from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource, Decoded, InMemory, LocalFile
from porting.checkpoint.gguf_settings import (
    ALIGNED,
    ALIGNMENT,
    ALIGNMENT_FAULT,
    ARRAY,
    FLOAT32,
    LAYOUTS,
    SIZES,
    STRING,
    UINT32,
    SettingError,
    flat,
    require_alignment,
    settings_bytes,
    text_bytes,
)
from porting.checkpoint.gguf_vocabulary import FILES, vocabulary
from porting.checkpoint.header import FETCH_AGAIN, HeaderReader, TensorList
from porting.checkpoint.layout import Contents, Described, ElementType
from porting.checkpoint.names import LONGEST_TENSOR_NAME, check_names
from porting.errors import Code, Fault, Message, Wording
from porting.limits import charge, reading, separately

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
VERSIONS = (2, 3)

NEWEST_POSSIBLE = 99
"""Up to here a number is another version; a larger one is damaged, or has its bytes in the other order."""

TO_LITTLE_ENDIAN = (
    "take the model's little-endian file; or convert a copy, which is changed in place: "
    "`gguf-convert-endian COPY little`, of the package gguf (pip install gguf)"
)

DTYPES: Mapping[int, ElementType] = {
    0: ElementType.FLOAT32, 1: ElementType.FLOAT16, 24: ElementType.INT8, 25: ElementType.INT16,
    26: ElementType.INT32, 27: ElementType.INT64, 28: ElementType.FLOAT64, 30: ElementType.BFLOAT16,
}  # fmt: skip
"""The types that torch has, by number."""

NUMBERS = {element: number for number, element in DTYPES.items()}

BLOCKS: Mapping[int, tuple[str, int, int]] = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Quantised types by number: the name, the numbers of a block, and its bytes (``GGML_QUANT_SIZES`` of gguf)."""

NEVER_STORED: Mapping[int, str] = {9: "Q8_1", 15: "Q8_K"}
"""Types of results on the way, which gguf does not unpack."""

INSTALL = "pip install 'porting[gguf]'"

LONGEST_TEXT, LONGEST_LIST = 4096, 4096
"""Bytes of a text, and numbers of a list, that are kept: beyond are vocabularies and templates of chats."""

LEAST_SETTING, LEAST_TENSOR = 13, 25
"""The smallest number of bytes of a setting, and of a tensor's description."""

UNPACKED = 4
"""Bytes of a number that was unpacked."""

MOST_AXES = 8
"""Dimensions that are read; ggml has four."""

EMBEDDING = "token_embd.weight"
"""The name of the token embedding in llama.cpp."""

GGML_AXES, GGML_NAME = 4, 63
"""Dimensions of a tensor, and bytes of its name, that ggml has room for."""

STEP = 1 << 12
"""Strings of a list that are charged at once."""

PIECE = 1 << 16
"""Bytes of a list of strings that are looked at together."""

LENGTH = struct.Struct("<Q")
"""The length in front of a string."""

TAKE_FLOATS = "take the weights in float32, float16 or bfloat16"


class Gguf(Container):
    """A GGUF file."""

    name = "gguf"
    title = "a GGUF file"
    endings = (".gguf",)
    main = "model.gguf"
    settings: ClassVar[bool] = True
    tokenizer_files: ClassVar[tuple[str, ...]] = FILES
    promises = Promises(writes=True, dtypes=frozenset(NUMBERS))

    def sniff(self, source: ByteSource) -> FileKind | None:
        """Whether the file begins with the format's magic."""
        begins = source.pread(0, min(len(MAGIC), source.size)) == MAGIC
        return FileKind(self.title, "rename it to end in .gguf") if begins else None

    def read(self, source: ByteSource, *, name: str, locate: bool = True) -> Contents:
        """Read the tensors' descriptions from the header."""
        with reading(source.where):
            return _read(source, name)

    def beside(
        self, settings: Mapping[str, object], tokenizer: TokenizerFiles, tensors: Mapping[str, Described]
    ) -> tuple[dict[str, object], tuple[str, ...]]:
        """The vocabulary, and why llama.cpp does not load a file without one."""
        given = dict(flat(settings))
        architecture = given.get("general.architecture")
        if not architecture:
            message = f"{self.main} does not say its general.architecture, without which llama.cpp does not load it"
            return {}, (message,)
        said, embedding = [], tensors.get(EMBEDDING)
        size = given.get(f"{architecture}.vocab_size")
        rows = size if isinstance(size, int) else None
        if embedding is not None and embedding.shape:
            if rows not in (None, embedding.shape[0]):
                said.append(f"{self.main} has {rows} for its vocab_size, and {EMBEDDING} has {embedding.shape[0]} rows")
            rows = embedding.shape[0]
        found, reason, notes = vocabulary(tokenizer, rows)
        more = {name: value for name, value in found.items() if name not in given}  # the table has the last word
        said += [f"{self.main}: the package gguf says of the tokenizer: {quote(note)}" for note in notes]
        if reason:
            said.append(f"{self.main} has no vocabulary, without which llama.cpp does not load it: {reason}")
        return more, tuple(said)

    def stored(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
        """Vectors, such as norms and biases, are float32: ggml adds and multiplies no others."""
        small = len(shape) < 2 and ElementType.of(dtype) in (ElementType.FLOAT16, ElementType.BFLOAT16)
        return ElementType.FLOAT32.dtype if small else dtype

    def require_writable(self, tensors: Mapping[str, Described], *, where: str) -> None:
        """Require dtypes, numbers of dimensions and lengths of names that ggml has."""
        faults = FaultList(where)
        for name, tensor in tensors.items():
            length, axes = len(name.encode("utf-8", "surrogatepass")), len(tensor.shape)
            if length > GGML_NAME:
                reason = f"its name has {length} bytes, and ggml has room for {GGML_NAME}"
                faults.add(Code.TENSOR_UNWRITABLE, reason, tensor=name, hint="give it a shorter one in the table")
            if axes > GGML_AXES:
                reason = f"it has {axes} dimensions, and ggml has {GGML_AXES}"
                faults.add(Code.TENSOR_UNWRITABLE, reason, tensor=name, hint="join some in the table: [o (c t) h w]")
            if ElementType.of(tensor.dtype) not in NUMBERS:
                cast = Wording(python="dtype=torch.float32", command="--dtype float32")
                hint = Message("pass ", cast) if tensor.dtype.is_floating_point else ""
                reason = f"GGUF has no type for its dtype {tensor.dtype}"
                faults.add(Code.TENSOR_UNWRITABLE, reason, tensor=name, hint=hint)
        check_names(tensors, faults)
        faults.raise_if_any()

    def outline(self, tensors: Mapping[str, Described], options: WriteOptions) -> Outline:
        """Lay out one file of version 3: settings, descriptions, elements."""
        where = f"{options.where}/{self.main}"
        self.require_writable(tensors, where=where)
        count, settings = settings_bytes(options.settings, where)
        aligned = partial(_aligned, alignment=_alignment(options.settings))
        described, offsets, at = list[bytes](), dict[str, int](), 0
        for name, tensor in tensors.items():
            sizes = tuple(tensor.shape)[::-1]
            described.append(text_bytes(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            described.append(struct.pack("<IQ", NUMBERS[ElementType.of(tensor.dtype)], at))
            offsets[name] = at
            at += aligned(nbytes(tensor))
        head = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), count)
        front = b"".join([head, settings, *described])
        begin = aligned(len(front))
        frame = [(0, front + bytes(begin - len(front)))]
        for name, tensor in tensors.items():  # what fills the space up to the next, and behind the last
            end = begin + offsets[name] + nbytes(tensor)
            frame += [(end, bytes(aligned(end) - end))] if aligned(end) > end else []
        with separately():  # what is written can be read, and reading it costs no other file anything
            _read(_Front(frame[0][1], where, size=begin + at), self.main)
        shard = Shard(
            name=self.main,
            size=begin + at,
            frame=tuple(frame),
            offsets={name: begin + offset for name, offset in offsets.items()},
            tensors=tuple(tensors),
        )
        return Outline(shards=(shard,))


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _alignment(settings: Mapping[str, object]) -> int:
    """The multiple at which tensors begin."""
    return next((require_alignment(value) for name, value in flat(settings) if name == ALIGNMENT), ALIGNED)


class _Front(InMemory):
    """The beginning of a file that is to be written, in the place of all of it."""

    def __init__(self, raw: bytes, where: str, *, size: int) -> None:
        super().__init__(raw, where)
        self.size = size


def _read(source: ByteSource, name: str) -> Contents:
    header = _Header(source, Code.GGUF_FILE)
    if source.size < len(MAGIC) or header.take(len(MAGIC)) != MAGIC:
        fault = header.error("this does not begin as a GGUF file does").faults[0]
        raise UnrecognisedError(fault, source, Gguf.title)
    version, count, settings = header.number("<I"), header.number("<Q"), header.number("<Q")
    if version not in VERSIONS:
        raise _unread_version(header, version)
    if count * LEAST_TENSOR + settings * LEAST_SETTING > source.size:
        raise header.error(f"{count} tensors and {settings} settings do not fit into {source.size} bytes")
    charge("objects", 16 * count + 4 * settings, where=source.where)
    kept: dict[str, object] = {}
    for _ in range(settings):
        key, value = header.setting()
        if key in kept:  # of two, readers take one or the other, or refuse the file
            raise header.error(f"{quote(key)} is there twice")
        kept[key] = value
    try:
        alignment = require_alignment(kept.get(ALIGNMENT, ALIGNED))
    except SettingError as error:
        raise header.error(str(error)) from error
    described = [header.tensor() for _ in range(count)]
    begin = _aligned(header.position, alignment)
    tensors = TensorList(source, Code.GGUF_FILE, name=name, format=Gguf.name)
    quantised: dict[str, None] = {}
    for tensor, kind, shape, offset in sorted(described, key=lambda entry: entry[3]):
        element = DTYPES.get(kind)
        if offset % alignment:
            tensors.refuse(tensor, f"its place, {offset}, is not a multiple of {alignment}", FETCH_AGAIN)
        elif element is not None:
            tensors.add(tensor, shape, element, start=begin + offset)
        elif kind in BLOCKS:
            _add_blocks(tensors, tensor, shape, kind, begin + offset)
            quantised.setdefault(BLOCKS[kind][0])
        else:
            which = f"the type {NEVER_STORED[kind]}" if kind in NEVER_STORED else f"the unknown type {kind}"
            tensors.refuse(tensor, f"it has {which}, which is not read", TAKE_FLOATS)
    message = f"quantised tensors ({', '.join(sorted(quantised))}) are read as float32"
    hint = "they are not packed again on the way back"
    notes = (Fault(code=Code.GGUF_FILE, where=source.where, message=message, hint=hint),) if quantised else ()
    return replace(tensors.contents(notes=notes), config=_nested(kept))


def _unread_version(header: _Header, version: int) -> CheckpointError:
    """The error for a file of another version, or of another byte order, which the version shows."""
    known = " and ".join(map(str, VERSIONS))
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if 0 < swapped <= NEWEST_POSSIBLE:
        message = f"a big-endian file of version {swapped}, where little-endian files are read"
        return header.error(message, TO_LITTLE_ENDIAN)
    message = f"version {version}, where the versions {known} are read"
    if 0 < version <= NEWEST_POSSIBLE:
        return header.error(
            message, "convert the original model again with llama.cpp, or take a file of these versions"
        )
    return header.error(message)


def _nested(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings as a config: what stands behind a dot is a field inside another.

    >>> _nested({"general.architecture": "llama", "llama.rope.freq_base": 1e4})
    {'general': {'architecture': 'llama'}, 'llama': {'rope': {'freq_base': 10000.0}}}
    """
    found: dict[str, object] = {}
    for name, value in settings.items():
        if value is None:
            continue
        *outer, last = name.split(".")
        inner = found
        for one in outer:
            below = inner.setdefault(one, {})
            if not isinstance(below, dict):  # a value and a group of one name: the value came first
                break
            inner = below
        else:
            inner.setdefault(last, value)
    return found


def _shortest(value: float) -> float:
    """The fraction with the fewest digits that is this number in float32: 1e-6 and not 9.999999974752427e-07."""
    if not math.isfinite(value):
        return value
    layout = LAYOUTS[FLOAT32]
    found = (float(f"{value:.{digits}g}") for digits in range(6, 9))
    return next((one for one in found if struct.pack(layout, one) == struct.pack(layout, value)), value)


def _add_blocks(tensors: TensorList, name: str, shape: tuple[int, ...], kind: int, start: int) -> None:
    """Add a tensor that is stored in blocks, or note why it cannot be read."""
    title, numbers, size = BLOCKS[kind]
    if not shape or shape[-1] % numbers:
        row = shape[-1] if shape else 1
        reason = f"its rows of {row} are not a whole number of blocks of {numbers}, as the type {title} has them"
        tensors.refuse(name, reason, FETCH_AGAIN)
        return
    stored = math.prod(shape) // numbers * size
    if start + stored > tensors.size:
        reason = f"its {stored} bytes from byte {start} on do not lie in the file's {tensors.size}"
        tensors.refuse(name, reason, FETCH_AGAIN)
        return
    decode = partial(_Unpacked, start=start, kind=kind, count=math.prod(shape))
    tensors.claim(name, start, start + stored)
    tensors.add(name, shape, ElementType.FLOAT32, start=0, decode=decode)


class _Unpacked(Decoded):
    """The elements of a quantised tensor, in float32.

    Args:
        start: the first byte of its blocks.
        kind: the number of its type.
        count: how many numbers it has.
    """

    def __init__(self, file: LocalFile, *, start: int, kind: int, count: int) -> None:
        super().__init__(file, UNPACKED * count)
        self._start, self._kind = start, kind

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes of elements."""
        try:
            import gguf  # noqa: PLC0415  # an extra
            import numpy as np  # noqa: PLC0415  # gguf has it
        except ImportError as error:
            message = "unpacking quantised tensors needs the package gguf, which is not installed"
            raise checkpoint_error(Code.GGUF_FILE, self.where, message, INSTALL) from error
        _, numbers, size = BLOCKS[self._kind]
        width = UNPACKED * numbers
        first, last = offset // width, -(-(offset + count) // width)
        raw = self._file.pread(self._start + first * size, (last - first) * size)
        with np.errstate(all="ignore"):  # whatever a damaged file holds
            blocks = np.frombuffer(raw, dtype=np.uint8).reshape(last - first, size)
            values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(self._kind))
        unpacked = values.astype("<f4", copy=False).tobytes()
        return bytes(unpacked[offset - first * width :][:count])


class _Header(HeaderReader):
    """The header in front of the elements, read from the first byte on."""

    def string(self, limit: int) -> str:
        """The next string of at most so many bytes."""
        return self.text(self.number("<Q"), limit=limit)

    def setting(self) -> tuple[str, object]:
        """The next setting: its name, and its value; None for one that is not kept."""
        key, kind = self.string(1 << 16), self.number("<I")
        if key == ALIGNMENT and kind != UINT32:
            raise self.error(ALIGNMENT_FAULT)
        if kind == ARRAY:
            kind, count = self.number("<I"), self.number("<Q")
            if kind in LAYOUTS and count <= LONGEST_LIST:
                charge("objects", count // 8 + 1, where=self.source.where)
                raw = self.take(count * SIZES[kind])
                return key, list(struct.unpack(f"<{count}{LAYOUTS[kind][1]}", raw))
            self._go_over(kind, count)
            return key, None
        if kind in LAYOUTS:
            value = struct.unpack(LAYOUTS[kind], self.take(SIZES[kind]))[0]
            return key, _shortest(value) if kind == FLOAT32 else value
        if kind == STRING:
            return key, self._short_text()
        raise self.error(f"a setting of the type {kind}, before byte {self.position}")

    def _short_text(self) -> str | None:
        """The next text; None if it is long, or no UTF-8."""
        count = self.number("<Q")
        if count > LONGEST_TEXT:
            self.skip(count)
            return None
        raw = self.take(count)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return None

    def _go_over(self, kind: int, count: int) -> None:
        if kind in SIZES:
            self.skip(count * SIZES[kind])
            return
        if kind != STRING:
            raise self.error(f"a setting of the type {kind}, before byte {self.position}")
        self.require(8 * count)
        at = start = self.position
        raw = b""
        for number in range(count):
            if number % STEP == 0:
                charge("objects", STEP, where=self.source.where)
            if at + 8 > start + len(raw):
                self.position = at
                self.require(8)
                start, raw = at, self.source.pread(at, min(PIECE, self.stop - at))
            at += 8 + LENGTH.unpack_from(raw, at - start)[0]
        self.position = start
        self.skip(at - start)

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Read the description of the next tensor: its name, type, sizes and place."""
        name, axes = self.string(LONGEST_TENSOR_NAME), self.number("<I")
        if axes > MOST_AXES:
            raise self.error(f"a tensor of {axes} dimensions")
        sizes = tuple(self.number("<Q") for _ in range(axes))
        return name, self.number("<I"), sizes[::-1], self.number("<Q")
