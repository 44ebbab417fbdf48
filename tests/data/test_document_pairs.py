"""Pairs from documents without queries, against pairs written by hand."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from dualenc.cli import main
from dualenc.data import DocumentPairs, TablePairs, open_corpus
from dualenc.data.readers.document_pairs import DocumentPart
from dualenc.errors import BadSample, DualencError
from dualenc.training.log import read_metrics
from tests.helpers import toy
from tests.helpers.make import encoded, picture, write_csv, write_jsonl, write_rows

GUIDE = (
    "# Gout\nA disease of joints.\n## Causes\nUric acid. Crystals form.\n## Cures\n\n# Flu\nRest."
)
ROWS = [
    {"id": "a", "title": "Gout", "text": "Gout hurts a lot. It lasts for days. It comes back."},
    {"id": "b", "title": "Flu", "text": "Flu\n\nA virus makes it. Rest helps."},
    {"id": "c", "title": " ", "text": "No title here. A second sentence."},
    {"id": "d", "title": "Only a title", "text": ""},
    {"id": "e", "title": "Gout", "text": "Gout: the second part of the article."},
    {"id": "f", "title": "Guide", "text": GUIDE},
]
EXPECTED: dict[DocumentPart, list[tuple[str, str]]] = {
    "title": [
        ("Gout", "Gout hurts a lot. It lasts for days. It comes back."),
        ("Flu", "A virus makes it. Rest helps."),
        ("Gout", "the second part of the article."),
        ("Guide", GUIDE),
    ],
    "first-sentence": [
        ("Gout hurts a lot.", "Gout It lasts for days. It comes back."),
        ("A virus makes it.", "Flu Rest helps."),
        ("No title here.", "A second sentence."),
        ("# Gout", f"Guide {GUIDE[7:]}"),
    ],
    "heading": [
        ("Gout", "Guide A disease of joints."),
        ("Causes", "Guide Uric acid. Crystals form."),
        ("Flu", "Guide Rest."),
    ],
}


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "docs.jsonl", ROWS)


def cut(path: Any, query: DocumentPart = "title", **options: Any) -> list[tuple[str, str]]:
    return [(pair.left, pair.right) for pair in DocumentPairs(path, query, **options)]


@pytest.mark.parametrize("query", EXPECTED)
def test_pairs_are_those_written_by_hand(docs: Path, query: DocumentPart) -> None:
    assert cut(docs, query) == EXPECTED[query]


def test_documents_without_the_part_are_counted(
    docs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        pairs = DocumentPairs(docs, "title")
    assert "4 pairs of a title and its text; left out 2 of 6 documents" in caplog.text
    assert (len(pairs), pairs.skipped) == (4, 0)
    DocumentPairs(docs, "heading")
    assert "3 pairs of a heading and its text; left out 5 of 6 documents" in caplog.text
    caplog.clear()
    write_jsonl(docs.with_name("one.jsonl"), ROWS[:1])
    with caplog.at_level(logging.INFO):
        DocumentPairs(docs.with_name("one.jsonl"))
    assert "1 pairs of a title" in caplog.text
    assert "left out" not in caplog.text


def test_parts_of_one_document_are_positives_of_its_title(docs: Path) -> None:
    pairs = DocumentPairs(docs, "title")
    assert (pairs.left_id.tolist(), pairs.right_id.tolist()) == ([0, 1, 0, 2], [0, 1, 2, 3])
    assert pairs.not_negatives("left", np.array([0])).tolist() == [[0, 2]]
    sections = DocumentPairs(docs, "heading")
    assert sections.not_negatives("left", np.arange(3)).tolist() == [[0], [1], [2]]


def test_a_random_sentence_leaves_its_document_nine_times_in_ten(tmp_path: Path) -> None:
    texts = [f"First sentence {n}. Then second {n}! And third {n}? End {n}" for n in range(2000)]
    path = write_jsonl(tmp_path / "docs.jsonl", [{"text": text} for text in texts])
    pairs = cut(path, "sentence")
    kept = 0
    places: dict[str, int] = {}
    for text, (query, rest) in zip(texts, pairs, strict=True):
        first, second, third = text.split(". ")[0] + ".", *text.split(". ")[1].split("! ")
        sentences = [first, f"{second}!", third.split("? ")[0] + "?"]
        number = sentences.index(query)  # "End 0" is too short to be a query
        places[str(number)] = places.get(str(number), 0) + 1
        kept += rest == text
        without = " ".join(part for part in (*sentences, third.split("? ")[1]) if part != query)
        assert rest in (text, without)
    # Binomial: three standard deviations are 40 and 63.
    assert 160 <= kept <= 240
    assert all(600 <= count <= 734 for count in places.values()), places
    assert cut(path, "sentence") == pairs
    other = cut(path, "sentence", seed=1)
    assert sum(a != b for a, b in zip(pairs, other, strict=True)) > 1000


def test_a_sentence_depends_on_its_own_text_alone(tmp_path: Path) -> None:
    """So that copies are cut alike, and new documents leave the others as they were."""
    texts = [f"Sentence one of {n}. Sentence two of {n}. Sentence three." for n in range(50)]
    rows = [{"text": text} for text in texts]
    some = write_jsonl(tmp_path / "some.jsonl", rows[10:])
    everything = write_jsonl(tmp_path / "all.jsonl", rows + rows[:10])
    pairs = DocumentPairs(everything, "sentence")
    assert cut(everything, "sentence")[10:50] == cut(some, "sentence")
    assert pairs.left_id[50:].tolist() == pairs.left_id[:10].tolist()
    assert pairs.right_id[50:].tolist() == pairs.right_id[:10].tolist()


def test_copies_of_a_rest_are_not_negatives(tmp_path: Path) -> None:
    rows = [{"text": f"Query number {n}. The same rest."} for n in range(3)]
    pairs = DocumentPairs(write_jsonl(tmp_path / "docs.jsonl", rows), "first-sentence")
    assert (pairs.num_left, pairs.num_right, pairs.right_id.tolist()) == (3, 1, [0, 0, 0])


def test_every_format_of_texts_is_read(tmp_path: Path) -> None:
    rows = [{"title": f"Title {n}", "text": f"One of {n}. Two of {n}."} for n in range(4)]
    expected = [(row["title"], row["text"]) for row in rows]
    for form in ("csv", "tsv", "parquet", "jsonl", "json"):
        assert cut(write_rows(tmp_path, form, rows)) == expected, form
    folder = toy.write_beir(tmp_path / "beir")
    found = dict(cut(folder))
    assert found["title 7"] == open_corpus(folder).items[7].removeprefix("title 7 ")
    assert len(found) == 40
    (tmp_path / "lines.txt").write_text("One line. More of it.\nAnother line! And more.\n")
    assert cut(tmp_path / "lines.txt", "first-sentence") == [
        ("One line.", "More of it."),
        ("Another line!", "And more."),
    ]


def test_columns_of_other_names(tmp_path: Path) -> None:
    rows = [{"Headline": "H", "body": "Part one. Two.", "note": "n", "text": "x"}]
    path = tmp_path / "docs.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    named = {"text_column": "body", "title_column": "Headline"}
    assert cut(path, **named) == [("H", "Part one. Two.")]
    assert cut(path, "first-sentence", **named) == [("Part one.", "H Two.")]
    assert open_corpus(path, **named).items[0] == "H Part one. Two."
    with pytest.raises(DualencError, match="no column 'headlin'"):
        cut(path, text_column="body", title_column="headlin")


def test_numbers_and_missing_titles(tmp_path: Path) -> None:
    path = tmp_path / "docs.parquet"
    titles = pd.array([7, None, 9], dtype="Int64")
    pd.DataFrame({"title": titles, "text": ["a text", "b text", None]}).to_parquet(path)
    assert cut(path) == [("7", "a text")]


@pytest.mark.parametrize("query", ["title", "first-sentence", "sentence", "heading"])
def test_nothing_to_cut_is_one_error(tmp_path: Path, query: DocumentPart) -> None:
    path = write_jsonl(tmp_path / "docs.jsonl", [{"text": "one sentence alone"}] * 3)
    with pytest.raises(DualencError) as error:
        DocumentPairs(path, query)
    message = str(error.value)
    assert message.startswith(f"{path}: no query {query!r}: all 3 documents have ")
    assert "choose another part as query" in message
    assert ("title_column" in message) == (query == "title")


def test_what_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "docs.jsonl", [{"title": "T", "text": "a"}, {"text": "\u200b"}])
    with pytest.raises(DualencError, match="'titles' is not a part of a document; choose title, "):
        DocumentPairs(path, "titles")  # type: ignore[arg-type]
    with pytest.raises(BadSample, match="no text in column 'text'"):
        DocumentPairs(path, on_error="raise")
    assert DocumentPairs(path).skipped == 1
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DualencError):
        DocumentPairs(tmp_path / "empty.jsonl")
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.png").write_bytes(encoded(picture(0)))
    with pytest.raises(DualencError, match="modality image"):
        DocumentPairs(images)


def test_odd_texts(tmp_path: Path) -> None:
    texts = [
        "\ud800 lone half. And more of it.",
        "😀 smile! Next one here.",
        "a\0b. More of it here.",
    ]
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for query in ("first-sentence", "sentence"):
        pairs = DocumentPairs(path, query)  # type: ignore[arg-type]
        assert pairs.identity() == DocumentPairs(path, query).identity()  # type: ignore[arg-type]
    long = "word " * 300 + ". Next sentence. " * 3
    path.write_text(json.dumps({"text": long}))
    [(query, rest)] = cut(path, "first-sentence")
    assert query == ("word " * 60).strip()
    assert rest.startswith("Next sentence.")


def test_identity_tells_changed_data_and_workers_read_the_same(docs: Path) -> None:
    pairs = DocumentPairs(docs, "sentence")
    again = pickle.loads(pickle.dumps(pairs))
    assert [tuple(pair) for pair in again] == [tuple(pair) for pair in pairs]
    assert again.identity() == pairs.identity() == DocumentPairs(docs, "sentence").identity()
    assert pairs.identity() != DocumentPairs(docs, "first-sentence").identity()
    items = pairs.left_items
    assert items.item_identity(0, False) != items.item_identity(1, False)  # type: ignore[attr-defined]
    rows = [{**ROWS[0], "text": ROWS[0]["text"].replace("days", "years")}, *ROWS[1:]]
    write_jsonl(docs, rows)
    assert pairs.identity() != DocumentPairs(docs, "sentence").identity()


def test_titles_are_those_of_a_table_of_pairs(docs: Path, tmp_path: Path) -> None:
    # Beside queries a title may be theirs.
    path = write_csv(tmp_path / "qa.csv", ["query", "text", "title"], [["Q", "A. B.", "of Q"]])
    with pytest.raises(DualencError, match="no query 'title'"):
        DocumentPairs(path)
    table = TablePairs(docs, "title", "text")
    assert table[0].left == cut(docs)[0][0]


def test_a_corpus_keeps_its_titles_when_rows_are_taken(docs: Path) -> None:
    corpus = open_corpus(docs)
    assert corpus.titles is not None
    assert [corpus.titles[row] for row in range(6)] == [row["title"] for row in ROWS]
    part = corpus.take([4, 1]).titles
    assert part is not None
    assert [part[0], part[1]] == ["Gout", "Flu"]
    assert open_corpus(docs, text_column="text").titles is None


@pytest.mark.slow
def test_the_recipe_trains_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = toy.text_model(tmp_path / "model")
    data = toy.write_beir(tmp_path / "beir")
    recipe = Path(__file__).parents[2] / "recipes" / "documents.yaml"
    words = [str(recipe), f"model.name={model}", f"data.path={data}", "data.query=title"]
    words += ["trainer.batch_size=4", "trainer.progress=false", "trainer.save_every=2"]
    out = tmp_path / "run"
    run = ["train", *words, f"trainer.output={out}", "trainer.keep_checkpoints=9"]
    assert main(run) == 0
    # A tenth of the 40 titles is held out.
    assert read_metrics(out / "metrics.jsonl")[-1]["step"] == 9
    weights = load_file(out / "model" / "model.safetensors")
    for folder in sorted((out / "checkpoints").glob("step-*"))[2:]:
        shutil.rmtree(folder)
    assert main([*run, "--resume"]) == 0
    resumed = load_file(out / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    # Other documents are refused.
    lines = (data / "corpus.jsonl").read_text().replace("title 3", "another title 3")
    (data / "corpus.jsonl").write_text(lines)
    capsys.readouterr()
    assert main([*run, "--resume"]) != 0
    assert "recipe and data it was made with" in capsys.readouterr().err
