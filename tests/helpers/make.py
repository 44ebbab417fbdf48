"""Small files that the data tests read."""

from __future__ import annotations

import csv
import io
import json
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dualenc.data import PairDataset


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    """One JSON value per line; strings are written as they are, to write broken lines."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_csv(
    path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]], delimiter: str = ","
) -> Path:
    """A table as the csv module writes it."""
    with open(path, "w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter=delimiter).writerows([header, *rows])
    return path


def write_rows(folder: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    """A table of rows: NaN for missing values as `json.dumps`, pandas and `datasets` write them."""
    path = folder / f"rows.{form}"
    if form in ("jsonl", "ndjson"):
        return write_jsonl(path, rows)
    if form == "json":
        path.write_text(json.dumps(rows))
    elif form in ("csv", "tsv"):
        pd.DataFrame(rows).to_csv(path, index=False, sep="," if form == "csv" else "\t")
    elif form == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        # Unlike pandas, `datasets` keeps NaN in columns of numbers.
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        for name, values in columns.items():
            if any(isinstance(value, str) for value in values):
                columns[name] = [None if value != value else value for value in values]
        datasets.Dataset.from_dict(columns).save_to_disk(path)
    return path


def picture(shade: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    """An RGB image of one colour that tells pictures apart."""
    return Image.new("RGB", size, (shade, 255 - shade, 7))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """The image as the contents of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def shade_of(image: Image.Image) -> int:
    """What `picture` was given."""
    return int(np.asarray(image)[0, 0, 0])


def contents(pairs: PairDataset) -> list[tuple[int, str]]:
    """Left pictures and right texts."""
    return [(shade_of(pair.left), pair.right) for pair in pairs]


def shades_in(pickled: bytes) -> list[int]:
    """The left pictures of pickled pairs; here, so that a spawned process imports nothing but this
    file."""
    return [shade_of(pair.left) for pair in pickle.loads(pickled)]


def write_beir(
    folder: Path,
    documents: Iterable[Any],
    queries: Iterable[Any],
    qrels: dict[str, Sequence[Sequence[Any]]],
) -> Path:
    """A BEIR folder; documents and queries are records or broken lines, qrels are rows by split."""
    (folder / "qrels").mkdir(parents=True)
    write_jsonl(folder / "corpus.jsonl", documents)
    write_jsonl(folder / "queries.jsonl", queries)
    for split, rows in qrels.items():
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in rows)]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_vectors(path: Path, letter: str, vectors: np.ndarray) -> None:
    """A parquet table of ids, which begin with a letter, and vectors."""
    ids = [f"{letter}{row}" for row in range(len(vectors))]
    pq.write_table(pa.table({"_id": ids, "vector": list(vectors)}), path)
