"""The settings of a GGUF file: the types in which llama.cpp reads them, and their bytes.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.  llama.cpp refuses a file in which one setting has another
type than it reads there.  So a value is stored in the type that belongs to the name (``gguf.GGUFWriter`` has a method
for each), and refused if it does not fit.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from porting.checkpoint.errors import FaultList, quote
from porting.errors import Code
from porting.printable import is_printable

ALIGNMENT = "general.alignment"

LAYOUTS: Mapping[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""How a setting is stored, by the number of its type, in the words of :mod:`struct`."""

SIZES: Mapping[int, int] = {number: struct.calcsize(layout) for number, layout in LAYOUTS.items()}

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, INT64 = 4, 5, 6, 7, 8, 9, 11

LONGEST_NAME = (1 << 16) - 1
"""Bytes of the name of a setting."""

LEAST_ALIGNED, ALIGNED, MOST_ALIGNED = 8, 32, 1 << 16
"""The multiples at which tensors begin: the least and the largest that are read, and between them the usual one."""

ALIGNMENT_FAULT = f"{ALIGNMENT} is not a power of two from {LEAST_ALIGNED} to {MOST_ALIGNED}"

ANOTHER = "give it another value in the table"


class Expected(NamedTuple):
    """The values that llama.cpp reads for settings whose names match."""

    kind: int
    title: str
    names: re.Pattern[str]


EXPECTED = (
    Expected(FLOAT32, "a finite fraction", re.compile(
        r"_epsilon$|_?scale$|softcapping$|scaling\.\w*factor$|freq_base(_swa)?$|clamp_kqv$|alibi_bias$"
        r"|beta_(fast|slow)$|log_multiplier$|\.alpha$|^tokenizer\.ggml\.scores$"
        r"|\.sampling\.(min_p|top_p|temp|xtc_\w+|penalty_repeat|mirostat_(eta|tau))$"
    )),
    Expected(UINT32, "a whole number of 32 bits", re.compile(
        r"[._](count(_kv|_swa)?|length(_mla|_swa|_out|_per_layer_input)?|size|dim|rank|token_id|layers|groups)$"
        r"|\.(pooling_type|sliding_window|expert_gating_func|conv_kernel|full_attention_interval|file_type)$"
        r"|^general\.(alignment|quantization_version)$|^tokenizer\.ggml\.token_type$"
    )),
    Expected(BOOL, "true or false", re.compile(
        r"\.(use_parallel_residual|use_gelu|use_silu|has_(audio|vision)_encoder|causal|expert_weights_norm|finetuned"
        r"|swin_norm|dt_b_c_rms|shift_logits|add_(bos|eos|sep)_token|add_space_prefix|remove_extra_whitespaces)$"
    )),
    Expected(STRING, "a text", re.compile(
        r"^general\.(architecture|type|name|author|version|organization|basename|finetune|description|quantized_by"
        r"|size_label|license(\.\w+)?|doi|uuid|(repo_)?url|source\.\w+|sampling\.sequence)$"
        r"|\.scaling\.type$|\.tensor_data_layout$|projector_type$"
        r"|^tokenizer\.(chat_template(s|\.\w+)?|ggml\.(model|pre|tokens|merges))$"
    )),
)  # fmt: skip
"""The table of the settings that are known by name; of others, the value says the type."""

PER_TOKEN = re.compile(r"^tokenizer\.(chat_templates|ggml\.(tokens|merges|scores|token_type))$")
"""The settings of those that are lists."""

PER_LAYER = re.compile(r"\.(head_count(_kv)?|feed_forward_length)$|sparsity_scale$")
"""The settings of those that may be lists."""


class SettingError(ValueError):
    """A setting that GGUF cannot hold, or that llama.cpp would refuse; the message says why."""


def flat(fields: Mapping[str, object], front: str = "") -> Iterator[tuple[str, object]]:
    """The fields of a config as settings: names joined by dots; what is null is none."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{front}{name}.")
        elif value is not None:
            yield front + name, value


def settings_bytes(fields: Mapping[str, object], where: str) -> tuple[int, bytes]:
    """The bytes of all settings, those that are general first."""
    faults, seen, written = FaultList(where), set[str](), list[bytes]()
    for name, value in sorted(flat(fields), key=lambda entry: not entry[0].startswith("general.")):
        if name in seen:
            hint = "let one line of [config] or [constants] give it"
            faults.add(Code.GGUF_FILE, f"the setting {quote(name)} would be there twice", hint=hint)
        seen.add(name)
        try:
            written.append(setting_bytes(name, value))
        except SettingError as error:
            faults.add(Code.GGUF_FILE, str(error), hint=ANOTHER)
    faults.raise_if_any()
    return len(written), b"".join(written)


def setting_bytes(name: str, value: object) -> bytes:
    """The name, the type and the bytes of a setting."""
    try:
        return _setting_bytes(name, value)
    except SettingError as error:
        raise SettingError(f"the setting {quote(name)} is {quote(value)}: {error}") from error


def _setting_bytes(name: str, value: object) -> bytes:
    expected = next((one for one in EXPECTED if one.names.search(name)), None)
    if not name or not is_printable(name) or len(name.encode()) > LONGEST_NAME:
        raise SettingError(f"its name is not of 1 to {LONGEST_NAME} bytes that can all be printed")
    items = list(value) if isinstance(value, list | tuple) and len(value) > 0 else []
    if expected is not None and items and not (PER_TOKEN.search(name) or PER_LAYER.search(name)):
        raise SettingError(f"llama.cpp reads {expected.title} there, and no list")
    if PER_TOKEN.search(name) and not items:
        raise SettingError("llama.cpp reads a list there")
    if name == ALIGNMENT:
        require_alignment(value)
    if not items:
        kind = _kind([value], expected, UINT32)
        return text_bytes(name) + struct.pack("<I", kind) + _stored([value], kind)
    kind = _kind(items, expected, INT32)
    return text_bytes(name) + struct.pack("<IIQ", ARRAY, kind, len(items)) + _stored(items, kind)


def require_alignment(value: object) -> int:
    """The alignment that a setting says."""
    whole = int(value) if isinstance(value, int | float) and _is_whole(value) else 0
    if not LEAST_ALIGNED <= whole <= MOST_ALIGNED or whole.bit_count() != 1:
        raise SettingError(ALIGNMENT_FAULT)
    return whole


def text_bytes(*texts: str) -> bytes:
    """Texts, each with its length in front."""
    try:
        raws = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise SettingError(f"it holds {quote(error.object)}, which is not Unicode text") from error
    return b"".join([piece for raw in raws for piece in (len(raw).to_bytes(8, "little"), raw)])


def _kind(items: list[object], expected: Expected | None, whole: int) -> int:
    """The number of the type that holds all of some values."""
    if expected is not None:
        if not _fit(items, expected.kind):
            raise SettingError(f"llama.cpp reads {expected.title} there")
        return whole if expected.kind == UINT32 else expected.kind
    kinds = {_kind_of(item, whole) for item in items}
    kind = kinds.pop() if len(kinds) == 1 else FLOAT32 if kinds == {INT32, FLOAT32} else None
    if kind is None:
        raise SettingError("GGUF has numbers, texts and lists of one kind of them")
    return kind


def _fit(items: list[object], kind: int) -> bool:
    """Whether all values are of what llama.cpp reads as this type."""
    types = {type(item) for item in items}
    if kind in (BOOL, STRING):
        return types == {bool if kind == BOOL else str}
    if not types <= {int, float}:
        return False
    numbers = [item for item in items if isinstance(item, int | float)]
    if kind == FLOAT32:
        return all(-math.inf < number < math.inf for number in numbers)
    return all(0 <= number < 1 << 32 for number in numbers) and (types == {int} or all(map(_is_whole, numbers)))


def _is_whole(value: float) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or value.is_integer())


def _kind_of(value: object, whole: int) -> int | None:
    """The number of the type that holds a value; None where there is none."""
    if isinstance(value, bool | str):
        return BOOL if isinstance(value, bool) else STRING
    if isinstance(value, float):
        return FLOAT32
    if not isinstance(value, int):
        return None
    if 0 <= value < 1 << (32 if whole == UINT32 else 31):
        return whole
    return INT32 if -(1 << 31) <= value < 0 else INT64 if -(1 << 63) <= value < 1 << 63 else None


def _stored(items: list[object], kind: int) -> bytes:
    if kind == STRING:
        return text_bytes(*(item for item in items if isinstance(item, str)))
    numbers = [item for item in items if isinstance(item, int | float)]
    layout = f"<{len(numbers)}{LAYOUTS[kind][1]}"
    if kind != FLOAT32:
        try:
            return struct.pack(layout, *(int(number) if isinstance(number, float) else number for number in numbers))
        except struct.error as error:  # of a list, whose whole numbers have 31 bits
            raise SettingError("it does not fit into 32 bits with a sign") from error
    try:
        raw = struct.pack(layout, *numbers)
    except (OverflowError, struct.error) as error:
        raise SettingError("float32, in which GGUF holds it, has no number that large") from error
    if any(number != 0 and stored == 0 for number, stored in zip(numbers, struct.unpack(layout, raw), strict=True)):
        raise SettingError("float32, in which GGUF holds it, has no number that small")
    return raw
