"""What do mapped vectors find, compared with embedding again? `dualenc migrate` over all documents.

    python eval/migrating.py measure OLD_MODEL NEW_MODEL FOLDER WORK
    python eval/migrating.py report

FOLDER is a BEIR folder with a test split; WORK keeps the embeddings for the next run. The maps are
learned as the command learns them, from 2 % of the documents, at least 2,000, which are themselves
mapped by a map that was learned without them. Documents that the old model finds most often for
queries of other splits, or else for the sample, are new first. "share" is of the new model's
nDCG@10.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from frame import RESULTS, Outcome, Settings, Store, command_line
from make_data import project
from toys import beir, text_model

from dualenc.data import open_corpus
from dualenc.data.readers.beir import read_beir
from dualenc.encoders import load_model
from dualenc.evaluation import migration_measures as measures
from dualenc.evaluation.report_page import Table, print_table
from dualenc.search import Index
from dualenc.search.embed.encode import embed
from dualenc.search.migration.maps import fit, folds, out_of_fold
from dualenc.search.migration.stages import order_by_hits, sample_rows

STORE = RESULTS / "migrating.jsonl"
SHARE, OF_NEW = "share", "recall of the new model's 10"


def measure(
    old_model: str, new_model: str, folder: Path, work: Path, results: Path = STORE
) -> None:
    """Measure old, mapped and new vectors."""
    old, new = (Path(model).resolve().parent.name for model in (old_model, new_model))

    def run(settings: Settings) -> Outcome:
        return compare(old_model, new_model, folder, work, settings["seed"])

    Store(results).get([{"data": folder.name, "old": old, "new": new, "seed": 0}], run)


def compare(old_model: str, new_model: str, folder: Path, work: Path, seed: int) -> Outcome:
    """Return the quality of each system; `seed` is that of sample and folds."""
    collection, queries = read_beir(folder), open_corpus(folder, part="queries")
    vectors = []
    for path in (old_model, new_model):
        model = load_model(path)
        for side, corpus in (("right", collection.corpus), ("left", queries)):
            out = work / f"{folder.name}-{Path(path).resolve().parent.name}-{side}"
            embedded = embed(model.tower(side), corpus, out, identity={"side": side})
            vectors.append(np.asarray(embedded.vectors[:], np.float32))
    old, old_queries, new, new_queries = vectors
    rows = sample_rows(len(old), np.zeros(0, np.int64), seed)
    mapped = fit(old[rows], new[rows])(old)
    mapped[rows] = out_of_fold(old[rows], new[rows], folds(len(rows), seed))
    tests = [queries.ids.index(name) for name in collection.queries.ids]
    others = np.delete(old_queries, tests, axis=0)
    order = order_by_hits(Index.build(old, factory="Flat"), others if len(others) else old[rows])
    sample = measures.Sample(old, new, mapped, np.argsort(order), len(old))
    own = new_queries[tests]
    mapped_back = fit(new[rows], old[rows])(own)
    systems = measures.compared(sample, old_queries[tests], mapped_back, own)
    ids = collection.queries.ids, collection.corpus.ids
    scores = measures.judged_scores(systems, *ids, collection.qrels)
    # Among neighbors, the truth is what the new model finds; no query is a document.
    neighbors = measures.neighbour_scores(systems, np.full(len(own), -1))
    means = [scores[system]["ndcg@10"].mean() for system in systems]
    whole = scores[measures.NEW]["ndcg@10"].mean()
    return {
        "pairs": len(rows),
        "systems": measures.summarize(scores),
        SHARE: [float(mean / whole) for mean in means],
        OF_NEW: [float(neighbors[system]["recall@10"].mean()) for system in systems],
    }


def report(results: Path = STORE) -> None:
    """Print a table of each run."""
    for settings, outcome, _ in Store(results).runs:
        cells = measures.table_rows(outcome["systems"])
        for cell, share, recall in zip(cells, outcome[SHARE], outcome[OF_NEW], strict=True):
            cell |= {SHARE: share, OF_NEW: recall}
        title = "{data}, {old} → {new}".format(**settings)
        print_table(Table(f"{title}, map of {outcome['pairs']:,} pairs", cells))


def check(folder: Path) -> None:
    """Migrate to a linear image of a model: mapped documents find nearly all of its ten."""
    old, new = text_model(folder / "old" / "model"), folder / "new" / "model"
    project(str(old), new, dim=48)
    store = folder / "runs.jsonl"
    measure(str(old), str(new), beir(folder / "toy", 300), folder / "work", results=store)
    [run] = Store(store).runs
    found = run.outcome[OF_NEW]
    assert len(found) == 7
    assert min(found[2:]) > 0.9
    assert run.outcome[SHARE][-1] == found[-1] == 1
    report(store)


if __name__ == "__main__":
    command_line(measure, report, check=check)
