"""Several checkpoints, read as one: a model and its adapter, a tower and a language model, a model and a difference.

``./llama+lora=./adapter`` is the checkpoint ``./llama`` with the tensors of ``./adapter`` beside its own, whose names
begin with ``lora.``.  The config of the second is the field ``lora`` of the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from porting.checkpoint.checkpoint import Checkpoint
from porting.checkpoint.errors import FaultList, quote
from porting.checkpoint.merging import merged
from porting.checkpoint.ranks import Folders
from porting.errors import Code


def join(location: str, first: Checkpoint, further: Mapping[str, Checkpoint]) -> Checkpoint:
    """Join checkpoints to one.

    Args:
        first: its tensors keep their names; its directory, config and tokenizer are those of the whole.
    """
    faults = FaultList(location)
    for name in further:
        taken = next(_taken(name, first), None)
        if taken is not None:
            message = f"{first.location} has {taken}, so that {quote(name)} cannot stand for {further[name].location}"
            faults.add(
                Code.CHECKPOINT_AMBIGUOUS, message, hint=f"give it another name: +{name}2={further[name].location}"
            )
    faults.raise_if_any()
    others = ((f"{name}.", f"{name}/", one) for name, one in further.items())
    contents, sources = merged(location, [("", "", first), *others])
    every = (first, *further.values())
    whole = Checkpoint(
        location=location,
        path=first.path,
        config={**first.config, **{name: dict(one.config) for name, one in further.items()}},
        config_name=first.config_name,
        contents=contents,
        sources=sources,
        index=None,
        commit=first.commit,
        notes=tuple(dict.fromkeys(note for one in every for note in one.warnings)),
        folder=Folders(one.folder for one in every if one.folder is not None),
        home=first.home,
        part=first.part,
        ranks=first.ranks,
        joined={name: one.path for name, one in further.items()},
    )
    whole.index_file, whole.index = first.index_file, first.index
    return whole


def _taken(name: str, first: Checkpoint) -> Iterator[str]:
    """The tensors of the first checkpoint whose name one of another would get, as text for a message."""
    yield from (f"the tensor {quote(tensor)}" for tensor in first.tensors if tensor.startswith(f"{name}."))
    yield from (f"the file {quote(file)}" for file in first.sources if file.startswith(f"{name}/"))
    yield from (f"the field {quote(name)} in its config" for _ in range(name in first.config))
