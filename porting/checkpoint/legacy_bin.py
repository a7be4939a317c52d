"""The header of a file that ``torch.save`` wrote before torch 1.6: pickles in a row, then raw storages.

The order is: a magic number, a protocol number, facts about the machine, the structure, the storages' keys;
then for each key the number of its elements in eight bytes, and the elements.  Nothing in it is checksummed.
"""

from __future__ import annotations

import tarfile

from porting.checkpoint.errors import CheckpointError, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.layout import Contents, Record
from porting.checkpoint.state_dict import read_tensors
from porting.checkpoint.state_pickle import StateMachine
from porting.checkpoint.state_values import StorageRef, TensorSpec
from porting.errors import Code, Fault

MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_BYTES = MAGIC.to_bytes(10, "little")
PROTOCOL = 1001
FETCH_AGAIN = "the file is damaged: fetch it again"


def is_legacy(source: ByteSource) -> bool:
    """Whether the file begins with the magic number of the older format."""
    head = source.pread(0, min(source.size, 32))  # a few opcodes, which differ from protocol to protocol
    return head[:1] == b"\x80" and MAGIC_BYTES in head


def read_legacy(source: ByteSource, *, name: str) -> Contents:
    """What the file says of its tensors, each checked against the bytes that are there.

    Raises:
        CheckpointError: with every fault found.
    """
    machine = StateMachine(source, 0, source.size, legacy=True)
    if _is_tar_too(source):
        raise _damaged(source, "it begins as a tar archive does as well, which torch would read instead")
    magic, protocol, machine_facts = machine.load(), machine.load(), machine.load()
    if magic != MAGIC or protocol != PROTOCOL:
        raise _damaged(source, f"protocol {quote(protocol)} where {PROTOCOL} is expected")
    if not isinstance(machine_facts, dict) or machine_facts.get("little_endian") is not True:
        raise _damaged(source, "its numbers are not little-endian", "save it again on a little-endian machine")
    value, keys = machine.load(), machine.load()
    if not isinstance(keys, list):
        raise _damaged(source, "no list of storages follows the structure")
    records = _records(source, machine.position, keys, _item_sizes(value))
    contents = read_tensors(value, records, source, name=name)
    machine.require_used(value, records)
    return contents


def _is_tar_too(source: ByteSource) -> bool:
    """Whether a tar archive could begin so: what torch looks for first."""
    try:
        tarfile.TarInfo.frombuf(source.pread(0, min(source.size, tarfile.BLOCKSIZE)), "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _item_sizes(value: object) -> dict[str, int]:
    """The bytes of an element of each storage that the structure mentions."""
    storages: list[StorageRef] = []
    if isinstance(value, dict):
        storages = [spec.storage for spec in value.values() if isinstance(spec, TensorSpec)]
    return {storage.key: storage.dtype.itemsize if storage.dtype else 1 for storage in storages}


def _records(source: ByteSource, position: int, keys: list[object], item_sizes: dict[str, int]) -> dict[str, Record]:
    records: dict[str, Record] = {}
    for key in keys:
        if not isinstance(key, str) or key not in item_sizes or key in records:
            raise _damaged(source, f"the storage {quote(key)} belongs to no tensor, or stands twice")
        if position + 8 > source.size:
            raise _damaged(source, f"the storage {quote(key)} is missing", "the file was cut short: fetch it again")
        count = int.from_bytes(source.pread(position, 8), "little", signed=True)
        start = position + 8
        position = start + count * item_sizes[key]
        if count < 0 or position > source.size:
            raise _damaged(
                source,
                f"the storage {quote(key)} of {count} elements ends behind the file's {source.size} bytes",
                "the file was cut short: fetch it again",
            )
        records[key] = Record(start=start, stop=position, crc=None, name=key)
    if position != source.size:
        raise _damaged(source, f"{source.size - position} bytes after the last storage belong to no tensor")
    return records


def _damaged(source: ByteSource, message: str, hint: str = FETCH_AGAIN) -> CheckpointError:
    return CheckpointError(Fault(code=Code.BIN_ARCHIVE, where=source.where, message=message, hint=hint))
