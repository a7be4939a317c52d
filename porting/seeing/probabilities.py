"""The attention of a model in a text: the probabilities of every head of every layer, recorded while it runs.

They are taken where the model computes them, whatever it calls (:mod:`porting.tracing.attention`), so a model need not
return them.  Any module can be looked at, with a table or without.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
from tokenizers import Encoding
from torch import Tensor, nn

from porting.atomic import write_file
from porting.seeing.attention_data import Layer, Shares, gather, refused, square
from porting.target import in_eval_mode
from porting.text import ModelArguments, Source, TextModel, open_text_model
from porting.tracing.running import Side
from porting.tracing.trace import ARROW, PROBABILITIES, ROOT

HTML, PNG = ".html", ".png"


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention(Shares):
    """The attention of a model in one text: the numbers of :class:`Shares`, with a page.  A notebook shows the page.

    Layers, heads and tokens are numbered from 0; negative numbers count from the end.

    >>> import porting
    >>> seen = porting.attention("Return it.")
    >>> seen.tokens, len(seen.layers)
    (('[CLS]', 'return', 'it', '.', '[SEP]'), 3)
    """

    def to_html(self, *, layer: int | None = None, head: int | None = None, token: int | str | None = None) -> str:
        """A page for a browser, one file that needs nothing beside itself.

        It shows the tokens, shaded by how much one of them attends to each, and small maps of all heads to choose from.

        Args:
            layer, head: what is shown first; None for the head that :meth:`telling` chooses.
            token: the token that attends; None as in :meth:`place`.

        Raises:
            AttentionError: there is no such layer, head or token.
        """
        from porting.seeing.webpage import attention_page  # noqa: PLC0415  # jinja2 is for those who look

        return attention_page(self, layer=layer, head=head, token=token)

    def to_png(self, *, layer: int | None = None, head: int | None = None, token: int | str | None = None) -> bytes:
        """A picture: one head as a map of queries by keys, or the grid of all of them.

        Args:
            layer, head: the head; both None for all heads of all layers, head None for those of one layer.
            token: for one head, mark the row of this token.

        Raises:
            AttentionError: there is no such layer, head or token.
        """
        from porting.seeing.picture import grid_picture, head_picture  # noqa: PLC0415  # as above, matplotlib

        if head is None:
            return grid_picture(self, layer=layer)
        return head_picture(self, layer=0 if layer is None else layer, head=head, token=token)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        layer: int | None = None,
        head: int | None = None,
        token: int | str | None = None,
    ) -> Path:
        """Write the page (``.html``) or the picture (``.png``) to a file, replacing what is there.

        Args:
            path: the file; its ending says which.
            layer, head, token: as in :meth:`to_html` and :meth:`to_png`.

        Returns:
            The file.

        Raises:
            AttentionError: there is no such layer, head or token, or the ending is another.
            CheckpointError: it cannot be written, or is a link or no file.
        """
        file = Path(path)
        match file.suffix.lower():
            case ".html":
                content = self.to_html(layer=layer, head=head, token=token).encode()
            case ".png":
                content = self.to_png(layer=layer, head=head, token=token)
            case ending:
                raise refused(f"{file.name!r} ends in {ending!r}", f"end it in {HTML} or {PNG}")
        write_file(file, content)
        return file

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows: the page, in a frame of its own."""
        from porting.seeing.webpage import attention_frame  # noqa: PLC0415  # as above

        return attention_frame(self)


def attention(
    text: str | Sequence[str],
    source: Source = None,
    *,
    pair: str | None = None,
    **options: Unpack[ModelArguments],
) -> Attention:
    """See what a checkpoint's model attends to in a text.

    Of an encoder-decoder it is the encoder that is seen.

    Args:
        text: a text, which the checkpoint's tokenizer takes apart; or its tokens, special tokens included.
        source: as in :func:`porting.load`; None for the bundled checkpoint.
        pair: a second segment that goes after the text.
        **options: table, into, architecture, revision and trust: as in :func:`porting.load`.

    Raises:
        AttentionError: the model shows no attention.
        TextError, TokenizerError: the text or the tokenizer cannot be used.
        CheckpointError, TableError, PlanError, TargetError: as :func:`porting.load`.
        VerifyError: the model fails.

    >>> seen = attention("Return the name of the file.")
    >>> seen.tokens
    ('[CLS]', 'return', 'the', 'name', 'of', 'the', 'file', '.', '[SEP]')
    >>> len(seen.layers), seen.layers[0], seen.layers[0].heads.shape
    (3, Layer(name='bert.layers.0.attention.core'), torch.Size([4, 9, 9]))
    """
    model = open_text_model(source, **options)
    if isinstance(text, str):
        encoding = model.encode(text, pair)
        return attention_of_inputs(model, model.inputs(encoding), encoding)
    if pair is not None:
        raise refused("a text that is given in tokens has no second segment", "put it into the list")
    ids = torch.tensor([model.numbers(text)])
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return _seen(model, {name: rows[name] for name in model.taken}, text, ())


def attention_of_inputs(model: TextModel, inputs: Mapping[str, Tensor], encoding: Encoding) -> Attention:
    """See what a model attends to in a text that was taken apart."""
    special = tuple(place for place, one in enumerate(encoding.special_tokens_mask) if one)
    return _seen(model, inputs, encoding.tokens, special)


def _seen(model: TextModel, inputs: Mapping[str, Tensor], tokens: Sequence[str], special: tuple[int, ...]) -> Attention:
    if model.encodes_first:  # its decoder has to be given something
        first = model.config.get("decoder_start_token_id")
        start = first if isinstance(first, int) else 0  # any token will do: the encoder does not hear of it
        more = {"decoder_input_ids": torch.tensor([[start]]), "decoder_attention_mask": torch.tensor([[1]])}
        inputs = {**inputs, **more}
    return replace(attention_of(model.module, model.arguments(inputs), tokens, name=model.title), special=special)


def attention_of(
    module: nn.Module, arguments: Mapping[str, Tensor], tokens: Sequence[str], *, name: str | None = None
) -> Attention:
    """See what a module attends to, in one forward pass in eval mode.

    Args:
        module: any module; its mode and its hooks are as before afterwards.
        arguments: its forward arguments by name, for a batch of one text; a name that is a number is a position.
        tokens: the text's tokens, as they are to be shown.
        name: what attends, in words; its class by default.

    Raises:
        AttentionError: it shows no attention from each of the tokens to each.
        VerifyError: it fails.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> seen = attention_of(layer, {"src": torch.randn(1, 2, 16)}, ["one", "two"])
    >>> seen.of(0, 3).shape
    torch.Size([2, 2])
    """
    seen: list[tuple[str, Tensor]] = []

    def visit(point: str, value: Tensor) -> None:
        found = square(value, len(tokens))
        if found is not None:
            seen.append((point, found))

    wanted = [f"{path or ROOT}{ARROW}{PROBABILITIES}" for path, _ in module.named_modules(remove_duplicate=False)]
    training = {part for part in module.modules() if part.training}
    title = name or type(module).__name__
    try:
        Side(title=title, module=in_eval_mode(module), arguments=[arguments], wanted=wanted).run(0, visit)
    finally:
        for part in module.modules():
            part.training = part in training
    if not seen:
        message = f"no part of this {type(module).__name__} attends from each of the {len(tokens)} tokens to each"
        raise refused(message, "attention is seen in torch's functions; see docs/attention.md for what is not seen")
    layers = tuple(Layer(name=path, heads=heads) for path, heads in gather(seen))
    return Attention(tokens=tuple(tokens), layers=layers, model=title)
