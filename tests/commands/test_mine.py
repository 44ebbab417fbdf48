"""`dualenc mine` as a user types it, and what sentence-transformers mines with the same model and
limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from dualenc.data import BeirPairs, MinedPairs
from tests.helpers import toy
from tests.helpers.in_process import failure, run


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 documents and 40 queries, a relevant document each; their ids overlap."""
    return toy.write_beir(
        tmp_path_factory.mktemp("data") / "beir", documents=200, queries=40, split="train"
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_table_tells_what_the_file_holds(
    tmp_path: Path, toy_text: Path, beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("mine", toy_text, beir, "--out", tmp_path / "mined.jsonl")
    run(*words, "--relative", 0.98, "--num-negatives", 5)
    shown = capsys.readouterr().out
    rows = rows_of(tmp_path / "mined.jsonl")
    counts = {
        " ".join(line.split()[:-1]): line.split()[-1] for line in shown.splitlines() if line.strip()
    }
    assert counts["written"] == str(len(rows))
    assert counts["negatives"] == str(sum(len(row["neg"]) for row in rows))
    assert int(counts["without negatives"]) == 40 - len(rows)
    assert int(counts["false negatives"].replace(",", "")) > 0
    assert all(s <= 0.98 * row["pos_scores"][0] + 2e-6 for row in rows for s in row["neg_scores"])
    assert len(MinedPairs(tmp_path / "mined.jsonl")) == len(rows)
    # A document with the id of a query is that query, and no candidate of it.
    assert all(row["query_id"] not in row["neg_id"] for row in rows)


def test_a_name_that_promises_another_format_is_refused(
    tmp_path: Path, toy_text: Path, beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = failure(capsys, "mine", toy_text, beir, "--out", tmp_path / "mined.jsonl.gz")
    assert message.endswith(
        "mined negatives are lines of JSON; name a file .jsonl or .json or .ndjson"
    )


@pytest.mark.slow
def test_other_limits_embed_nothing_anew(
    tmp_path: Path, toy_text: Path, beir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("mine", toy_text, beir, "--out", tmp_path / "mined.jsonl")
    run(*words)
    first = (tmp_path / "mined.jsonl").read_bytes()
    monkeypatch.setattr("dualenc.search.embed.encode._Encoder.shard", lambda *_: 1 / 0)
    run(*words, "--relative", "null", "--first-rank", 11, "--last-rank", 20)
    assert (tmp_path / "mined.jsonl").read_bytes() != first
    run(*words)
    assert (tmp_path / "mined.jsonl").read_bytes() == first


def test_equals_what_sentence_transformers_mines(
    tmp_path: Path, toy_text: Path, beir: Path
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    # As a table, so that the corpus is what the pairs hold and no id names a query and a document.
    table = [{"query": pair.left, "document": pair.right} for pair in BeirPairs(beir, "train")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    limits = ("--relative", 0.99, "--num-negatives", 4)
    run("mine", toy_text, tmp_path / "pairs.jsonl", "--out", tmp_path / "m.jsonl", *limits)
    ours = {row["query"]: row["neg"] for row in rows_of(tmp_path / "m.jsonl")}
    theirs = mine_hard_negatives(
        datasets.Dataset.from_list(table),
        SentenceTransformer(str(toy_text), device="cpu"),
        anchor_column_name="query",
        positive_column_name="document",
        corpus=[row["document"] for row in table],
        query_prompt_name="query",
        corpus_prompt_name="document",
        relative_margin=0.01,
        num_negatives=4,
        range_max=len(table) - 1,
        output_format="triplet",
        verbose=False,
    )
    wanted: dict[str, list[str]] = {}
    for row in theirs:
        wanted.setdefault(row["query"], []).append(row["negative"])
    assert len(wanted) > 5
    assert ours == wanted


def test_mistakes_are_told(
    tmp_path: Path, toy_text: Path, toy_clip: Path, beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("mine", toy_text, beir, "--out", tmp_path / "mined.jsonl")
    assert "num_negatives is 0" in failure(capsys, *words, "--num-negatives", 0)
    assert "no split 'dev'; there are: train" in failure(capsys, *words, "--split", "dev")
    assert "this task needs kind query-document or vector" in failure(
        capsys, "mine", toy_clip, *words[2:]
    )
    assert not list(tmp_path.iterdir())
    (tmp_path / "mined.jsonl").write_text('{"query": "q", "pos": ["years of work"], "neg": []}\n')
    assert "already exists and was not written by `dualenc mine`" in failure(capsys, *words)


@pytest.mark.slow
def test_sentence_transformers_trains_on_its_form(
    tmp_path: Path, toy_text: Path, beir: Path
) -> None:
    """The same negatives as in the other form, a row for each positive; rows with fewer negatives
    are left out."""
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    folder = tmp_path / "beir"
    shutil.copytree(beir, folder)
    query, first = (folder / "qrels" / "train.tsv").read_text().splitlines()[1].split("\t")[:2]
    other = next(
        row["_id"] for row in rows_of(folder / "corpus.jsonl") if row["_id"] not in (query, first)
    )
    with open(folder / "qrels" / "train.tsv", "a") as judged:
        judged.write(f"{query}\t{other}\t1\n")
    limits = ("--relative", 0.98, "--last-rank", 60, "--num-negatives", 8)
    run("mine", toy_text, folder, "--out", tmp_path / "m.jsonl", *limits)
    out = tmp_path / "tuples.jsonl"
    run("mine", toy_text, folder, "--out", out, *limits, "--form", "sentence-transformers")
    expected = []
    for row in rows_of(tmp_path / "m.jsonl"):
        if len(row["neg"]) == 8:
            negatives = {f"negative_{i}": text for i, text in enumerate(row["neg"], 1)}
            expected += [
                {"anchor": row["query"], "positive": positive, **negatives}
                for positive in row["pos"]
            ]
    assert rows_of(out) == expected
    assert 4 < len({row["anchor"] for row in expected}) < len(rows_of(tmp_path / "m.jsonl"))
    table = datasets.load_dataset(
        "json", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert table.column_names == ["anchor", "positive", *(f"negative_{i}" for i in range(1, 9))]
    model = SentenceTransformer(str(toy_text), device="cpu")
    arguments = Arguments(
        str(tmp_path / "st"), max_steps=2, report_to="none", save_strategy="no", use_cpu=True
    )
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=table, loss=loss)
    assert 0 < trainer.train().training_loss < 20
    # The file is known again as one of mined negatives, and may be replaced.
    run("mine", toy_text, folder, "--out", out, *limits)
    assert rows_of(out) == rows_of(tmp_path / "m.jsonl")
