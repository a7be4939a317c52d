from __future__ import annotations

from pathlib import Path

import pytest

from scripts.labelled_text import Example, TaskError, labels_of, read_examples


def written(path: Path, content: bytes) -> Path:
    (path / "data.tsv").write_bytes(content)
    return path / "data.tsv"


def test_examples_are_read_with_or_without_a_header(tmp_path: Path) -> None:
    lines = b'"So", he said\tgood \r\n\r\n  text \tbad\n\xc3\xa9\xe2\x80\xa8t\xc3\xa9\tgood'
    expected = [('"So", he said', "good"), ("text", "bad"), ("\u00e9\u2028t\u00e9", "good")]
    for header in (b"", b"text\tlabel\n", b"\xef\xbb\xbfText\tLabel\r\n"):
        found = read_examples(written(tmp_path, header + lines))
        assert [(one.text, one.label) for one in found] == expected
        assert found[0].line == header.count(b"\n") + 1
        assert found[1].line == header.count(b"\n") + 3


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    content = b"fine\ta\nno tab\ntwo\ttabs\there\n\tb\nempty\t\n\xff\tb\nx\tb\x07ell\nfine\tb\n"
    path = written(tmp_path, content)
    with pytest.raises(TaskError) as caught:
        read_examples(path)
    assert [line.removeprefix(str(path)) for line in caught.value.lines] == [
        ":2: it has no tab; expected one, text<TAB>label",
        ":3: it has 2 tabs; expected one, text<TAB>label",
        ":4: the text is empty",
        ":5: the label is empty",
        ":6: byte 1 of the line is not UTF-8",
        ":7: the label 'b\\x07ell' has a control character",
    ]


def test_of_very_many_bad_lines_ten_are_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as caught:
        read_examples(written(tmp_path, b"bad\n" * 1234))
    assert len(caught.value.lines) == 11
    assert caught.value.lines[-1].endswith("data.tsv: and 1,224 more bad lines")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"text\tlabel\n"])
def test_a_file_without_examples_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="it holds no example; expected lines of text<TAB>label"):
        read_examples(written(tmp_path, content))


def test_a_label_that_nobody_learnt_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, b"x\ta\ny\tc\n")
    with pytest.raises(TaskError, match=r"data.tsv:2: the label 'c' is not in the training file, which has 'a', 'b'$"):
        read_examples(path, labels=("a", "b"))


def test_labels_have_the_order_of_numbers_or_of_words() -> None:
    def order(*labels: str) -> tuple[str, ...]:
        return labels_of([Example("x", label, 1) for label in (*labels, *labels)], Path("data.tsv"))

    assert order("10", "9", "1") == ("1", "9", "10")
    assert order("b", "10", "9") == ("10", "9", "b")


def test_swapped_columns_are_noticed() -> None:
    examples = [Example("a", f"text {number}", number) for number in range(5)]
    with pytest.raises(TaskError, match="no label occurs twice in 5 lines; expected text<TAB>label, are they swapped"):
        labels_of(examples, Path("data.tsv"))
