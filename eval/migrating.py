"""What mapped vectors find of what embedding again does, over all documents: `dualenc migrate`,
measured in full.

    python eval/migrating.py measure OLD_MODEL NEW_MODEL FOLDER WORK
    python eval/migrating.py project MODEL OUT --dim 256

FOLDER is in BEIR's form, queries and judgements those of its test split; WORK keeps the embeddings
for the next run. All documents are embedded with both models; the maps are learned, as the command
learns them, from a sample of 2 %, at least 2,000, drawn without regard to judgements; a document of
it is mapped by a map that was learned without it. Shares of new vectors are the documents that the
old model finds most often for queries of other splits or, where there are none, for the sample.
"share" is that of the new model's nDCG@10.

`project` makes the beginning of another model of a sentence-transformers folder: its vectors times
a random matrix, to be fine-tuned.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Normalize

from dualenc.data import open_corpus
from dualenc.data.readers.beir import read_beir
from dualenc.encoders import load_model
from dualenc.evaluation import migration_measures as measures
from dualenc.evaluation.report_page import Table, print_table
from dualenc.search import Index
from dualenc.search.embed.encode import embed
from dualenc.search.migration.maps import fit, folds, out_of_fold
from dualenc.search.migration.stages import order_by_hits, sample_rows


def mapped_by_sample(
    x: np.ndarray, y: np.ndarray, rows: np.ndarray, fold: np.ndarray
) -> np.ndarray:
    """x (N, D) in the space of y, by a map of the sample's pairs, rows (n,); those by maps of the
    other folds."""
    mapped = fit(x[rows], y[rows])(x)
    mapped[rows] = out_of_fold(x[rows], y[rows], fold)
    return mapped


def measure(old_model: str, new_model: str, folder: Path, work: Path, seed: int = 0) -> None:
    """Embed with both models, learn maps and print tables.

    Args:
        old_model: model folder.
        new_model: model folder.
        folder: BEIR folder.
        work: where embeddings are kept for the next run.
        seed: of the sample and the folds.
    """
    collection = read_beir(folder)
    queries = open_corpus(folder, part="queries")
    vectors = {}
    for name, path in (("old", old_model), ("new", new_model)):
        model = load_model(path)
        for part, tower, corpus, side in (
            ("documents", model.right, collection.corpus, "right"),
            ("queries", model.left, queries, "left"),
        ):
            out = work / f"{folder.name}-{Path(path).resolve().parent.name}-{part}"
            embedded = embed(tower, corpus, out, identity={"side": side}, progress=f"{name} {part}")
            vectors[name, part] = np.asarray(embedded.vectors[:], np.float32)
    old, new = vectors["old", "documents"], vectors["new", "documents"]
    rows = sample_rows(len(old), np.zeros(0, np.int64), seed)
    fold = folds(len(rows), seed)
    is_test = np.isin(queries.ids, collection.queries.ids)
    past = vectors["old", "queries"][~is_test] if (~is_test).any() else old[rows]
    order = order_by_hits(Index.build(old, factory="Flat"), past)
    places = np.argsort(order)
    tests = [np.flatnonzero(np.array(queries.ids) == name)[0] for name in collection.queries.ids]
    own = {name: vectors[name, "queries"][tests] for name in ("old", "new")}
    sample = measures.Sample(old, new, mapped_by_sample(old, new, rows, fold), places, len(old))
    systems = measures.compared(
        sample, own["old"], fit(new[rows], old[rows])(own["new"]), own["new"]
    )
    scores = measures.judged_scores(
        systems, collection.queries.ids, collection.corpus.ids, collection.qrels
    )
    # Among neighbours, the truth is what the new model finds for the same queries; none of them is
    # a document.
    nobody = np.full(len(own["new"]), -1)
    neighbours = measures.neighbour_scores(systems, nobody)
    cells = measures.table_rows(measures.summarize(scores))
    whole = scores[measures.NEW]["ndcg@10"].mean()
    for cell, system in zip(cells, systems):
        cell["share"] = float(scores[system]["ndcg@10"].mean() / whole)
        cell["recall of the new model's 10"] = float(neighbours[system]["recall@10"].mean())
    print_table(Table(f"{folder.name}, map of {len(rows):,} pairs", cells))


def project(model: str, out: Path, dim: int = 256, seed: int = 0) -> None:
    """Put a linear layer of random weights behind the pooling of a model.

    Args:
        model: sentence-transformers folder of a transformer and pooling.
        out: model folder to write.
        dim: size of the new vectors.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    original = SentenceTransformer(model, device="cpu")
    transformer, pooling = list(original)[:2]
    dense = Dense(
        transformer.auto_model.config.hidden_size, dim, activation_function=torch.nn.Identity()
    )
    modules = [transformer, pooling, dense, Normalize()]
    SentenceTransformer(modules=modules, prompts=original.prompts, device="cpu").save(str(out))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli([measure, project])
