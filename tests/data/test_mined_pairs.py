from __future__ import annotations

from pathlib import Path

import pytest

from dualenc.data import MinedPairs
from dualenc.errors import BadSample, DualencError

from .make import write_jsonl


def flag(query: str, pos: list[str], neg: list[str]) -> dict:
    """A row as FlagEmbedding's mining script writes it."""
    return {"query": query, "pos": pos, "neg": neg, "pos_scores": [0.9] * len(pos), "prompt": "", "type": "normal"}


def tevatron(query: str, pos: list[str], neg: list[str]) -> dict:
    """A row as Tevatron writes it; texts "title|text"."""
    passage = [
        [{"docid": t, "title": t.partition("|")[0], "text": t.partition("|")[2]} for t in ts] for ts in (pos, neg)
    ]
    return {"query_id": "7", "query": query, "positive_passages": passage[0], "negative_passages": passage[1]}


def test_flag_embedding(tmp_path: Path) -> None:
    rows = [flag("q0", ["p0", "p1"], ["n0", "n1"]), flag("q1", ["n0"], ["p0", "n2"])]
    pairs = MinedPairs(write_jsonl(tmp_path / "x.jsonl", rows))
    assert [(p.left, p.right, p.negatives) for p in pairs] == [
        ("q0", "p0", ("n0", "n1")),
        ("q0", "p1", ("n0", "n1")),
        ("q1", "n0", ("p0", "n2")),
    ]
    # One query's positive is another's negative: the same item, whatever its role.
    assert pairs[2].right_id == pairs[0].negative_ids[0]
    assert pairs[2].negative_ids[0] == pairs[0].right_id
    assert (pairs.num_left, pairs.num_right) == (2, 5)


@pytest.mark.parametrize(("titles", "texts"), [(True, ("T one", "U two")), (False, ("one", "two"))])
def test_tevatron(tmp_path: Path, titles: bool, texts: tuple[str, str]) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [tevatron("q", ["T|one"], ["U|two"])])
    pair = MinedPairs(path, titles=titles)[0]
    assert (pair.left, pair.right, *pair.negatives) == ("q", *texts)


def test_both_layouts_read_alike(tmp_path: Path) -> None:
    arguments = [("q0", ["|a", "|b"], ["|c"]), ("q1", ["|c"], ["|a"])]
    plain = [flag(q, [t[1:] for t in pos], [t[1:] for t in neg]) for q, pos, neg in arguments]
    one = MinedPairs(write_jsonl(tmp_path / "flag.jsonl", plain))
    other = MinedPairs(write_jsonl(tmp_path / "tevatron.jsonl", [tevatron(*a) for a in arguments]))
    assert list(one) == list(other)


def test_rows_without_negatives(tmp_path: Path) -> None:
    pairs = MinedPairs(write_jsonl(tmp_path / "x.jsonl", [{"query": "q", "pos": ["p"]}, flag("r", ["s"], ["t"])]))
    assert [p.negatives for p in pairs] == [(), ("t",)]


def test_a_positive_among_the_negatives_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [flag("q", ["p0"], ["p1", "n"]), flag("q", ["p1"], ["p0"])]
    pairs = MinedPairs(write_jsonl(tmp_path / "x.jsonl", rows))
    assert [p.negatives for p in pairs] == [("n",), ()]
    assert pairs.skipped == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (flag("", ["p"], []), "x.jsonl:2: no text in column 'query'"),
        (flag("q", [], []), "x.jsonl:2: no text in column 'pos'"),
        (flag("q", ["p"], [" "]), "x.jsonl:2: no text in column 'neg'"),
        ({"query": "q", "pos": [["p"]]}, "x.jsonl:2: value of a wrong type"),
        ('{"query": "q", "pos": [', "x.jsonl:2: malformed JSON line"),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path: Path, row: object, message: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [flag("q0", ["p0"], ["n0"]), row])
    with pytest.raises(BadSample) as error:
        MinedPairs(path, on_error="raise")
    assert message in str(error.value)
    pairs = MinedPairs(path)
    assert (pairs[0].left, pairs.skipped) == ("q0", 1)


def test_another_layout_is_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"query": "q", "positives": ["p"]}])
    with pytest.raises(DualencError, match="no column 'pos'; did you mean 'positives'"):
        MinedPairs(path)


@pytest.mark.parametrize("passages", [5, "text", {"text": "x"}, [{"text": 5}], [{"text": "x", "title": []}], [[["x"]]]])
def test_passages_of_another_shape_are_named_or_taken_as_one_text(tmp_path: Path, passages: object) -> None:
    good = {"query": "q", "positive_passages": [{"text": "p"}], "negative_passages": []}
    path = write_jsonl(tmp_path / "x.jsonl", [good, {**good, "query": "r", "positive_passages": passages}])
    single = isinstance(passages, (int, str))
    assert len(MinedPairs(path)) == 1 + single
    if not single:
        with pytest.raises(BadSample, match=r"x\.jsonl:2: value of a wrong type"):
            MinedPairs(path, on_error="raise")
