from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from porting.models.seq2seq import Seq2Seq
from porting.models.seq2seq_search import beam_search, greedy_search
from tests.models.seq2seq_twins import END, PAD, START, WORDS, Twins, source, twins

pytestmark = pytest.mark.few(4)

PENALTIES = (1.0, 0.0, 2.0, -0.5)


def lively(seed: int = 0, *, end: float = 2.0) -> Twins:
    """A pair that does not repeat itself, and whose sequences end after few and after many tokens."""
    return twins(seed=seed, places=6.0, end=end, scale_embedding=False)


@pytest.fixture(params=[0, 1, 6])
def pair(request: pytest.FixtureRequest) -> Twins:
    return lively(request.param)


def generate(theirs: Any, *, length: int, beams: int, **options: Any) -> Any:  # Any: transformers' own output
    return theirs.generate(
        **source(),
        max_new_tokens=length,
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        early_stopping=False,
        forced_eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


def padded(ids: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[-1]), value=PAD)


def test_a_greedy_search_finds_what_transformers_finds(pair: Twins) -> None:
    theirs, ours = pair
    found = greedy_search(ours, **source(), max_length=14)
    expected = generate(theirs, length=14, beams=1).sequences
    assert torch.equal(padded(found, 15), padded(expected, 15))
    assert 0 < int((found == END).any(dim=-1).sum()) < 4  # some rows end before the last step, and some do not


@pytest.mark.parametrize("beams", [1, 2, 5])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_beam_search_finds_what_transformers_finds(pair: Twins, beams: int, penalty: float) -> None:
    theirs, ours = pair
    found = beam_search(ours, **source(), num_beams=beams, max_length=9, length_penalty=penalty)
    assert found.scores.shape == (4, beams)
    if beams == 1:
        assert torch.equal(padded(found.token_ids[:, 0], 10), padded(greedy_search(ours, **source(), max_length=9), 10))
        return
    expected = generate(theirs, length=9, beams=beams, length_penalty=penalty)
    assert torch.equal(padded(found.token_ids.flatten(0, 1), 10), padded(expected.sequences, 10))
    torch.testing.assert_close(found.scores.flatten().float(), expected.sequences_scores, rtol=1e-5, atol=1e-5)


def test_what_is_suppressed_is_never_written(pair: Twins) -> None:
    theirs, ours = pair
    words = [PAD, *range(4, 12)]
    expected = generate(theirs, length=9, beams=3, bad_words_ids=[[word] for word in words]).sequences
    found = beam_search(ours, **source(), num_beams=3, max_length=9, suppress=words).token_ids.flatten(0, 1)
    assert torch.equal(padded(found, 10), padded(expected, 10))
    alone = greedy_search(ours, **source(), max_length=9, suppress=words)
    assert not torch.isin(alone, torch.tensor(words[1:])).any()


def test_scores_are_what_the_model_says_of_the_hypotheses() -> None:
    _, ours = lively(3)
    found = beam_search(ours, **source(), num_beams=4, max_length=8, length_penalty=0.7)
    assert bool((found.scores.diff(dim=1) <= 0).all())  # the best first
    for row in range(4):
        for ids, score in zip(found.token_ids[row], found.scores[row], strict=True):
            written = ids[1:].tolist()
            length = written.index(END) + 1 if END in written else len(written)
            one = {name: value[row : row + 1] for name, value in source().items()}
            with torch.no_grad():
                logits = ours(**one, decoder_input_ids=ids[None, :length]).log_softmax(dim=-1)
            likely = sum(logits[0, place, written[place]].item() for place in range(length))
            assert score.item() == pytest.approx(likely / length**0.7, abs=1e-9)
            assert ids[0] == START
            assert written[length:] == [PAD] * (len(written) - length)


def test_every_step_computes_the_newest_token_alone_and_the_source_is_read_once() -> None:
    _, ours = lively(end=-9.0)  # it never ends by itself
    lengths: list[int] = []
    reads: list[int] = []
    ours.decoder.register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))
    ours.encoder.register_forward_hook(lambda _, args, __: reads.append(len(args[0])))
    assert beam_search(ours, **source(), num_beams=3, max_length=6).token_ids.shape == (4, 3, 7)
    assert greedy_search(ours, **source(), max_length=6).shape == (4, 7)
    assert lengths == [1] * 12
    assert reads == [4, 4]


def test_a_row_is_searched_as_if_it_were_alone() -> None:
    _, ours = lively(1)
    together = beam_search(ours, **source(), num_beams=3, max_length=9)
    for row in range(4):
        alone = beam_search(
            ours, **{name: value[row : row + 1] for name, value in source().items()}, num_beams=3, max_length=9
        )
        assert torch.equal(padded(alone.token_ids[0], 10), padded(together.token_ids[row], 10))
        torch.testing.assert_close(alone.scores[0], together.scores[row], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length=0: expected from 1 to max_position_embeddings=19"),
        ({"max_length": 20}, "max_length=20: expected from 1 to max_position_embeddings=19"),
        ({"num_beams": 0}, "num_beams=0: expected from 1 to half of the vocabulary, 14"),
        ({"num_beams": 15}, "num_beams=15: expected from 1 to half of the vocabulary, 14"),
        ({"suppress": [5, WORDS]}, "suppress has 29: expected tokens, from 0 to vocab_size - 1"),
        ({"suppress": [END]}, "suppress has the end, eos_token_id=2: no row could ever end"),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict[str, Any], message: str) -> None:
    ours: Seq2Seq = twins().ours
    given = {"num_beams": 2, "max_length": 4, **options}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        beam_search(ours, **source(), **given)
    del given["num_beams"]
    if "num_beams" not in options:
        with pytest.raises(ValueError, match=message):
            greedy_search(ours, **source(), **given)
