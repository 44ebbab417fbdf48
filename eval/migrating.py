"""Which way from the vectors of one model to those of another finds most, before all are embedded?

    python eval/migrating.py run DATA VECTORS "[scifact,cranfield]" "[minilm,e5,l3]"
    python eval/migrating.py report

DATA/NAME is a BEIR folder, and VECTORS/MODEL/NAME/{corpus,queries} is what `dualenc embed` made of
its sides. Between each two models, maps are learned from so many documents and applied to the old
vectors of all; those that a map is learned from are mapped by one that was learned without them, as
`dualenc migrate` does. Queries are the new model's. "Centered" subtracts the mean document of
either model from documents and queries. "Candidates" are the documents nearest by the old model,
in the order of the new one; without the old model, those nearest to queries that are mapped into
its space. nDCG@10 is of the test queries over all documents, or over samples as the report of
`dualenc migrate` draws them, which should forecast the differences over all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import frame
import numpy as np
from adapting_task import Judged, open_judged, unit, write_judged
from frame import Outcome, Settings, Store
from sklearn.cluster import KMeans
from sklearn.neural_network import MLPRegressor

from dualenc.data.store.items import rows_of
from dualenc.evaluation.metrics import Qrels, Run, paired_bootstrap, score_queries
from dualenc.evaluation.report_page import Table, print_table
from dualenc.evaluation.retrieval import retrieve
from dualenc.search.exact_search import exact_search
from dualenc.search.migration.maps import FOLDS, fit, folds
from dualenc.search.migration.stages import sample_rows

STORE = frame.RESULTS / "migrating.jsonl"
PAIRS, CANDIDATES, CLUSTERS = (500, 1000, 2000, 4000), (50, 200), 8
OLD, NEW, OF_OLD, CENTERED = "old model", "new model", "candidates", ", centered"
MAPPED, OF_MAPPED, DEPTHS = "mapped queries", "candidates of mapped queries", (50, 200, 1000)
SEEDS, DRAWS = 3, 20
Map = Callable[[np.ndarray], np.ndarray]


def rotation(x: np.ndarray, y: np.ndarray) -> Map:
    """Return the rotation with the least squared error (Schönemann 1966, Psychometrika 31)."""
    left, _, right = np.linalg.svd(x.T @ y, full_matrices=False)
    return lambda vectors: vectors @ (left @ right)


def rotations(x: np.ndarray, y: np.ndarray) -> Map:
    """Return a rotation around the means for each cluster of old vectors."""
    clusters = KMeans(CLUSTERS, n_init=1, random_state=0).fit(x)
    # A cluster with few documents would fit them alone.
    turns = [
        fit(x[own], y[own], "rotation") if own.sum() >= x.shape[1] else fit(x, y, "rotation")
        for own in (clusters.labels_ == number for number in range(CLUSTERS))
    ]

    def apply(vectors: np.ndarray) -> np.ndarray:
        label = clusters.predict(vectors)
        return np.choose(label[:, None], [turn(vectors) for turn in turns])

    return apply


def perceptron(x: np.ndarray, y: np.ndarray) -> Map:
    """Return a perceptron of what ridge regression leaves, until held-out pairs do not improve."""
    ridge = fit(x, y)
    net = MLPRegressor(hidden_layer_sizes=(512,), early_stopping=True, max_iter=100, random_state=0)
    net.fit(x, y - ridge(x))
    return lambda vectors: ridge(vectors) + net.predict(vectors)


MAPS: dict[str, Callable[[np.ndarray, np.ndarray], Map]] = {
    "ridge": fit,
    "rotation": rotation,
    "rotation around the means": partial(fit, kind="rotation"),
    "rotations of 8 clusters": rotations,
    "perceptron": perceptron,
}


def mapped(
    learn: Callable[[np.ndarray, np.ndarray], Map], x: np.ndarray, y: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Return all x (N, D) mapped by pairs in rows (K,), and these by maps learned without them."""
    vectors = unit(learn(x[rows], y[rows])(x)).astype(np.float32)
    fold = folds(len(rows))
    for number in range(FOLDS):
        used, left_out = rows[fold != number], rows[fold == number]
        vectors[left_out] = unit(learn(x[used], y[used])(x[left_out]))
    return vectors


@dataclass
class Change:
    """Test queries and N documents in the spaces of two models, and judgments of the queries."""

    ids: list[str]
    old: np.ndarray
    new: np.ndarray
    old_queries: np.ndarray
    new_queries: np.ndarray
    qrels: Qrels

    @classmethod
    def between(cls, old: Judged, new: Judged) -> Change:
        """Return the test queries and documents of both models."""
        qrels = new.qrels["test"]
        rows = rows_of(new.queries.ids, list(qrels))
        queries = [side.queries.items.matrix[rows] for side in (old, new)]
        return cls(new.documents.ids, old.documents.vectors, new.documents.vectors, *queries, qrels)

    def sample(self, seed: int) -> Change:
        """Return the documents that the report of `dualenc migrate` measures."""
        judged = [own for grades in self.qrels.values() for own in grades]
        rows = sample_rows(len(self.ids), np.flatnonzero(np.isin(self.ids, judged)), seed)
        ids = [self.ids[row] for row in rows.tolist()]
        return replace(self, ids=ids, old=self.old[rows], new=self.new[rows])

    def scores(self, way: str, settings: Settings) -> np.ndarray:
        """Return nDCG@10 (Q,) of a way."""
        queries, documents, finding = self.new_queries, self.new, self.old_queries
        rows = np.random.default_rng(settings.get("seed", 0)).permutation(len(self.ids))
        rows = rows[: settings.get("pairs")]
        if way in (MAPPED, OF_MAPPED):
            finding = fit(self.new[rows], self.old[rows], settings["map"])(queries)
        if way in (OLD, MAPPED):
            queries, documents = finding, self.old
        elif way in (OF_OLD, OF_MAPPED):
            # What the old vectors find, in the order of the new model.
            near = exact_search(finding, self.old, settings["candidates"])[1]  # (Q, K)
            scores = np.einsum("qd,qkd->qk", queries, documents[near])
            named = [[self.ids[row] for row in rows] for rows in near.tolist()]
            own = (
                dict(zip(*pair, strict=True)) for pair in zip(named, scores.tolist(), strict=True)
            )
            return ndcg(self.qrels, dict(zip(self.qrels, own, strict=True)))
        elif way != NEW:
            documents = mapped(MAPS[way.removesuffix(CENTERED)], self.old, self.new, rows)
            if way.endswith(CENTERED):
                queries = unit(queries - self.new[rows].mean(axis=0))
                documents = unit(documents - documents.mean(axis=0))
        return ndcg(self.qrels, retrieve(list(self.qrels), queries, self.ids, documents, depth=10))


def ndcg(qrels: Qrels, run: Run) -> np.ndarray:
    """Return nDCG@10 (Q,) of results."""
    return np.array([own["ndcg@10"] for own in score_queries(qrels, run, [10]).values()])


def measure(open_model: Callable[[str, str], Judged], settings: Settings) -> Outcome:
    """Return nDCG@10 of a way, its share of the new model's and its difference from both models."""
    sides = (open_model(settings[own], settings["data"]) for own in ("old", "new"))
    change = Change.between(*sides)
    if "sample" in settings:
        change = change.sample(settings["seed"])
    old, new, found = (change.scores(way, settings) for way in (OLD, NEW, settings["way"]))
    differences = (paired_bootstrap(end, found) for end in (old, new))
    over_old, over_new = ([round(float(value), 4) for value in own] for own in differences)
    return {
        "ndcg@10": round(float(found.mean()), 4),
        "of the new": round(float(found.mean() / new.mean()), 4),
        "over the old": over_old,
        "over the new": over_new,
    }


def run(
    data: Path, vectors: Path, tasks: list[str], models: list[str], pairs: Sequence[int] = PAIRS
) -> None:
    """Measure every way between every two models on every task."""
    open_model = cache(lambda model, name: open_judged(data, vectors / model, name, True))
    wanted: list[Settings] = []
    ways: list[Settings] = [{"way": way + own} for way in MAPS for own in ("", CENTERED)]
    ways += [{"way": MAPPED, "map": own} for own in ("ridge", "rotation", "rescaled")]
    ways += [{"way": OF_MAPPED, "map": "rescaled", "candidates": own} for own in DEPTHS]
    for name in tasks:
        size = len(open_model(models[0], name).documents)
        for old, new in ((old, new) for old in models for new in models if old != new):
            common = {"data": name, "old": old, "new": new}
            wanted += [{**common, "way": way} for way in (OLD, NEW)]
            wanted += [{**common, "way": OF_OLD, "candidates": own} for own in CANDIDATES]
            wanted += [
                {**common, **way, "sample": True, "seed": seed}
                for way in ({"way": NEW}, {"way": OF_OLD, "candidates": CANDIDATES[-1]})
                for seed in range(DRAWS)
            ]
            wanted += [
                {**common, **way, "pairs": own, "seed": seed}
                for own in pairs
                if own < size
                for way in ways
                for seed in range(SEEDS if "perceptron" not in way["way"] else 1)
            ]
    Store(STORE).get(wanted, partial(measure, open_model))


def report() -> None:
    """Print a table of each two models and task."""
    tables: dict[str, list[dict[str, object]]] = {}
    runs = Store(STORE).runs
    for own in frame.by_seed(runs):
        settings, outcomes = own[0].settings, [each.outcome for each in own]
        title = "{data}, {old} → {new}".format(**settings)
        whole = {name: value for name, value in settings.items() if name not in ("sample", "seed")}
        row = {name: settings.get(name) for name in ("way", "map", "candidates", "pairs")}
        row["nDCG@10"] = frame.spread([each["ndcg@10"] for each in outcomes])
        row["of the new"] = round(float(np.mean([each["of the new"] for each in outcomes])), 3)
        for end in ("old", "new"):
            row[f"over the {end}"] = "{:+.3f} [{:+.3f}, {:+.3f}]".format(
                *np.mean([each[f"over the {end}"] for each in outcomes], axis=0)
            )
        if "sample" in settings:
            # How often the interval of a sample holds the difference over all documents.
            truth = next(each.outcome for each in runs if each.settings == whole)["over the old"][0]
            ends = [each["over the old"][1:] for each in outcomes]
            row["held"] = f"{sum(low <= truth <= high for low, high in ends)} of {len(ends)}"
            title += ", on samples"
        tables.setdefault(title, []).append(row)
    for title, rows in tables.items():
        print_table(Table(title, rows))


def check(folder: Path) -> None:
    """Turn all vectors: every map turns them back, and candidates find what the new model does."""
    globals().update(STORE=folder / "runs.jsonl", SEEDS=1, DRAWS=2, CANDIDATES=(20,), DEPTHS=(20,))
    draw = np.random.default_rng(0)
    documents = unit(draw.standard_normal((300, 8)))
    turn = np.linalg.qr(draw.standard_normal((8, 8)))[0]
    queries = unit(documents[:40] + 0.1 * draw.standard_normal((40, 8)))
    splits = {"test": np.stack([np.arange(40), np.arange(40)], axis=1)}
    for name, by in (("old", np.eye(8)), ("new", turn)):
        made = write_judged(folder / name, documents @ by, queries @ by, splits)
        (folder / "vectors").mkdir(exist_ok=True)
        made[1].rename(folder / "vectors" / name)
    run(made[0], folder / "vectors", ["toy"], ["old", "new"], [200])
    for each in Store(STORE).runs:
        assert each.outcome["of the new"] > 0.95, each
    report()


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
