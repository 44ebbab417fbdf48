"""What is a global objective at a small batch worth? Every objective at equal pairs, encoder passes, seconds.

    python eval/small_batch.py run vectors PATH_TO_PAPERS --batch_sizes [16,32,64]
    python eval/small_batch.py run text PATH_TO_PAPERS --objectives [InfoNCE,ISIR]
    python eval/small_batch.py report --figure docs/figures/small_batch.svg

Every run of one task trains the same model from the same start on the same number of pairs, whatever the batch: a
smaller batch takes more steps. With --equal passes, objectives that encode items besides the batch see fewer pairs, so
that all encode, forward and backward, as much as InfoNCE does; forward alone counts a third. With --equal seconds, fast
objectives train longer, where that is better, until each has had the seconds of one core that the slowest needs.

Tuning is the same for all: with the first seed, τ at the middle learning rate, then the learning rate at the best τ, by
the quality on held-out data, both on past any edge; then all seeds. Learning rates grow with the square root of the
batch size. One line per run is added to --results, and a run that is there already is not made again: tables grow.
--processes makes several at once, also on one GPU.

Objectives with a + have the positive in the softmax.

Tasks: "vectors", two perceptrons on frozen features (latent semantic analysis, 256 numbers) of a BEIR folder; "text", a
one-layer transformer from scratch on it, and "text_dropout", with a dropout of 0.1; "minilm", a pretrained one;
"image_text", a small open_clip model on tables {train,dev,test}.parquet of images and captions; "images", a narrow
ResNet on two views of labelled images, by its 20 nearest neighbours and, in the end, by a linear probe.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import multiprocessing
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from probes import DualBank, PredictedPartition, SharedRobustTemperature, TeacherBatches
from quality import COMPARED, new_encoder, open_parts

from dualenc.data import BeirPairs, ImageViews, PairDataset, TablePairs
from dualenc.data.beir import read_beir
from dualenc.data.corpus import Corpus, RetrievalSet
from dualenc.encoders import DualEncoder, ImageTextEncoder, TextEncoder, VectorEncoder, train_tokenizer
from dualenc.evaluation.image_text import both_ways_ranks
from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.evaluation.plots import COLOURS, as_svg, lines
from dualenc.evaluation.probe import knn_predict, linear_probe
from dualenc.evaluation.report import Table, print_table
from dualenc.evaluation.retrieval import Result, retrieve
from dualenc.objectives import (
    SACLR,
    XBM,
    ExactGlobal,
    GlobalCache,
    MomentumQueue,
    NegativeCache,
    Objective,
    SigLIP,
    SogCLR,
)
from dualenc.training import Evaluator, ImageTextEvaluator, KNNEvaluator, Trainer
from dualenc.training.evaluators import embed_side

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    **COMPARED,
    "NegativeCache": lambda **common: NegativeCache(refresh=0.001, **common),
    "SACLR": SACLR,
    "SigLIP": SigLIP,
    "GlobalCache": GlobalCache,
    "GlobalCache, no control": lambda **common: GlobalCache(control=0.0, **common),
    "GlobalCache, pool 2048": lambda **common: GlobalCache(pool=2048, **common),
    "ExactGlobal": lambda **common: ExactGlobal(corpus_chunk_size=4096, **common),
    "GlobalCache 0.5": lambda **common: GlobalCache(extra_encodes=0.5, **common),
    "GlobalCache 2": lambda **common: GlobalCache(extra_encodes=2.0, **common),
    "GlobalCache+": lambda **common: GlobalCache(positive_in_softmax=True, **common),
    "MomentumQueue": MomentumQueue,
    "XBM": XBM,
    "SogCLR+": lambda **common: SogCLR(gamma=0.5, positive_in_softmax=True, **common),
}

TRAINER: dict[str, dict[str, Any]] = {
    "InfoNCE, mined each epoch": {"mine_every": 1},
    "InfoNCE, 4 mined each epoch": {"mine_every": 1, "mine_negatives": 4},
    "GlobalCache, mined each epoch": {"mine_every": 1},
    "InfoNCE, 4 accumulated": {"gradient_accumulation": 4},
    "GlobalCache, 4 accumulated": {"gradient_accumulation": 4},
}
"""Settings of the trainer: mined negatives; steps of several batches, of B pairs each."""
OBJECTIVES |= {name: OBJECTIVES[name.partition(",")[0]] for name in TRAINER}

PROBES: dict[str, Callable[..., Objective]] = {
    "SogCLR+, cosine": lambda **common: SogCLR(gamma=0.2, gamma_schedule="cosine", positive_in_softmax=True, **common),
    "predicted log-normaliser+": lambda **common: PredictedPartition(positive_in_softmax=True, **common),
    **{
        f"robust τ+, ρ = {radius}": lambda radius=radius, **common: SharedRobustTemperature(
            radius=radius, temperature_rate=1e-4, gamma=0.5, positive_in_softmax=True, **common
        )
        for radius in (2, 4, 6)
    },
    "two banks of 24, 4 accumulated": lambda **common: DualBank(queue_size=24, **common),
    "two banks of 128, 4 accumulated": lambda **common: DualBank(queue_size=128, **common),
    "XBM, 256": lambda **common: XBM(queue_size=256, **common),
    "InfoNCE, teacher's batches": OBJECTIVES["InfoNCE"],
}
"""Methods that are tried: FastCLIP's schedule of γ (Wei et al. 2024, arXiv:2407.01445), those of `probes.py`, and short
queues of both sides."""
OBJECTIVES |= PROBES
TRAINER |= {name: {"gradient_accumulation": 4} for name in PROBES if name.endswith("4 accumulated")}

RATES = (1.0, 0.5, 2.0)
"""Factors of a task's learning rate; the first one while τ is chosen."""
BEYOND_EDGE = 3
"""How often τ or the rate is moved beyond the edge of what was to be tried."""
ORDINARY_BATCH = 32
POINTS = 4
"""Evaluations of a training, besides the one before it."""
RESULTS = Path("eval/results/small_batch.jsonl")
GAPS_IN, GAPS_OF = "vectors papers", ("GlobalCache", "ISIR", "SogCLR", "DCL")
"""The task and the objectives of the figure that shows where the gap to InfoNCE opens and closes."""
DRAWN = (*GAPS_OF, "InfoNCE", "SogCLR+", "GlobalCache+", "NegativeCache", "MomentumQueue")
"""The objectives of the other figures: as many as can be told apart."""
HEADLINE = {"GlobalCache": "GlobalCache", "SogCLR+": "SogCLR(positive_in_softmax=True)", "InfoNCE": "InfoNCE"}
"""The objectives of the README's figure, and their labels."""


Cell = tuple[int, str]
"""Batch size and objective."""
Settings = dict[str, Any]
"""What a run is found by."""
Compute = Callable[[list[Settings]], Iterable[tuple[Settings, dict[str, Any]]]]
"""Makes runs, and gives each when it is finished."""


@dataclass
class Task:
    """What is trained on and measured.

    Attributes:
        new_model: a model of this task, from torch's random state.
        pairs: M training pairs.
        validation, test: two measures of the same kind, by which to tune and to report.
        learning_rate: about right at a batch of 32.
        temperatures: to choose from.
    """

    new_model: Callable[[], DualEncoder]
    pairs: PairDataset
    validation: Quality
    test: Quality
    learning_rate: float
    temperatures: tuple[float, ...] = (0.03, 0.05, 0.1)


class Quality(Evaluator):
    """One number, the mean of what each query is worth, which the last call leaves in `per_query`."""

    per_query: list[float]

    def mean(self, per_query: Iterable[float]) -> dict[str, float]:
        """Of the queries of a call."""
        self.per_query = list(per_query)
        return {self.primary: statistics.mean(self.per_query)}


class Retrieval(Quality):
    """nDCG@10."""

    primary = "ndcg@10"

    def __init__(self, collection: RetrievalSet) -> None:
        self.collection = collection

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        queries = embed_side(model, "left", self.collection.queries, 256)
        documents = embed_side(model, "right", self.collection.corpus, 256)
        run = retrieve(queries.ids, queries.vectors, documents.ids, documents.vectors, depth=10)
        scores = Result("model", "held-out", run, self.collection.qrels, len(documents.ids)).per_query
        return self.mean(of_query[self.primary] for of_query in scores.values())


class ImageOfCaption(Quality):
    """Recall@10 of images by captions."""

    primary = "recall@10"

    def __init__(self, pairs: PairDataset) -> None:
        self.evaluator = ImageTextEvaluator(pairs)

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        images = embed_side(model, "left", self.evaluator.images, 64)
        texts = embed_side(model, "right", self.evaluator.texts, 64)
        ranks = both_ways_ranks(images.vectors, texts.vectors, self.evaluator.captions)["text_to_image"]
        return self.mean((ranks <= 10).astype(float).tolist())


class Neighbours(Quality):
    """Accuracy of a vote of 20 neighbours, and of a linear classifier where `probe` asks for it."""

    primary = "20-NN"

    def __init__(self, train: ImageViews, test: ImageViews, probe: bool = False) -> None:
        self.evaluator = KNNEvaluator(train, test)
        self.probe = probe

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        train, test = (
            embed_side(model, "left", corpus, 256, output="features").vectors for corpus in self.evaluator.corpora
        )
        votes, labels = self.evaluator.labels
        found = self.mean((knn_predict(train, votes, test, k=20) == labels).astype(float).tolist())
        return found | ({"linear_probe": linear_probe(train, votes, test, labels).accuracy} if self.probe else {})


@dataclass
class Curve(Evaluator):
    """Quality on held-out data during training, against pairs seen and seconds of work, which evaluations do not count.

    Attributes:
        points: (pairs, seconds, quality) of each evaluation.
    """

    quality: Quality
    pairs_per_evaluation: int
    primary: str = "validation"
    points: list[tuple[int, float, float]] = field(default_factory=list)
    spent: float = 0.0

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        begun = time.process_time()
        value = self.quality(model)[self.quality.primary]
        if len(self.points) == 0:
            self.spent = begun  # what came before the first step is no training
        self.points.append((len(self.points) * self.pairs_per_evaluation, begun - self.spent, value))
        self.spent += time.process_time() - begun
        return {self.primary: value}


class Passes:
    """Counts what the towers of a model encode in training, forward alone as a third."""

    def __init__(self, model: DualEncoder) -> None:
        self.count = 0.0
        self.model = model
        for tower in {model.left, model.right}:
            tower.register_forward_hook(self.add)

    def add(self, tower: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self.model.training:
            self.count += len(output) * (1 if torch.is_grad_enabled() else 1 / 3)


OPENED: dict[str, Task] = {}
"""The tasks of this call by their names in settings; processes inherit it."""


def train(settings: Settings) -> tuple[Settings, dict[str, Any]]:
    """Train once; what came out, as it is kept."""
    torch.set_num_threads(1)
    task, objective, batch_size, pairs_seen, rate, tau, seed = (
        settings[key] for key in ("task", "objective", "batch_size", "pairs_seen", "rate", "temperature", "seed")
    )
    task = OPENED[task]
    torch.manual_seed(seed)
    model, pairs = task.new_model(), task.pairs
    common = {"num_left": pairs.num_left, "num_right": pairs.num_right, "views": pairs.views}
    criterion = OBJECTIVES[objective](temperature=tau, seed=seed, **common)
    trainer_settings = TRAINER.get(objective, {})
    pairs_per_step = batch_size * trainer_settings.get("gradient_accumulation", 1)
    steps = max(1, pairs_seen // pairs_per_step)
    steps_between = -(-steps // POINTS)
    passes, curve = Passes(model), Curve(task.validation, steps_between * pairs_per_step)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            output=folder,
            batch_size=batch_size,
            max_steps=steps,
            learning_rate=rate * task.learning_rate * math.sqrt(pairs_per_step / ORDINARY_BATCH),
            evaluate_every=steps_between,
            keep_best=False,
            save_every=None,
            seed=seed,
            overwrite=True,
            progress=False,
            deterministic=False,
            **trainer_settings,
        )
        batching = None
        if objective == "InfoNCE, teacher's batches":
            # The features themselves are the teacher.
            sides = np.asarray(pairs.left_items)[pairs.left_id], np.asarray(pairs.right_items)[pairs.right_id]
            batching = TeacherBatches(*sides, batch_size, seed=seed)
        trainer.fit(model, pairs, criterion, batching, evaluator=curve)
    measured = task.test(model.eval())
    scores = np.round(255 * np.array(task.test.per_query)).astype(np.uint8)
    outcome = {
        "validation": curve.points[-1][2],  # of the last step, after which training evaluates
        "test": measured.pop(task.test.primary),
        "extra_encodes": passes.count / (steps * pairs_per_step) - 2,
        "seconds": curve.points[-1][1],
        "curve": [(seen, round(seconds, 1), round(value, 4)) for seen, seconds, value in curve.points],
        "scores": base64.b64encode(zlib.compress(scores.tobytes(), 9)).decode(),
        **measured,
    }
    return settings, outcome | ({"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


class Runs:
    """Finished runs, one JSON object per line, found by their settings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                one = json.loads(line)
                self.found[self.key(one["settings"])] = one

    @staticmethod
    def key(settings: dict[str, Any]) -> str:
        return json.dumps(settings, sort_keys=True)

    def get(self, settings_of_runs: Iterable[dict[str, Any]], compute: Compute) -> list[dict[str, Any]]:
        """The runs with these settings, in their order; `compute` makes those that are not there, one line for each."""
        settings_of_runs = list(settings_of_runs)
        missing = {key: one for one in settings_of_runs if (key := self.key(one)) not in self.found}
        for settings, outcome in compute(list(missing.values())):
            self.found[self.key(settings)] = {"settings": settings, **outcome}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(self.found[self.key(settings)]) + "\n")
        return [self.found[self.key(settings)] for settings in settings_of_runs]


def beir_parts(path: Path) -> tuple[PairDataset, RetrievalSet, RetrievalSet]:
    """Training pairs with their own documents as corpus, and held-out and test queries over all documents.

    Where the folder has no dev.tsv, the last thousand training queries, or a fifth of them, are held out.
    """
    whole, test = BeirPairs(path, "train"), read_beir(path, "test")
    queries, documents = whole.left_id, whole.right_id
    if (path / "qrels" / "dev.tsv").exists():
        validation = read_beir(path, "dev")
    else:
        held_out = queries >= whole.num_left - min(HELD_OUT, whole.num_left // 5)
        qrels: dict[str, dict[str, int]] = {}
        for query, document in zip(queries[held_out].tolist(), documents[held_out].tolist(), strict=True):
            qrels.setdefault(whole.queries.ids[query], {})[whole.corpus.ids[document]] = 1
        rows = np.unique(queries[held_out])
        texts = [whole.queries.items[row] for row in rows.tolist()]
        validation = RetrievalSet(Corpus([whole.queries.ids[row] for row in rows.tolist()], texts), test.corpus, qrels)
        queries, documents = queries[~held_out], documents[~held_out]
    used_queries, left_id = np.unique(queries, return_inverse=True)
    used_documents, right_id = np.unique(documents, return_inverse=True)
    left = [whole.left_items[row] for row in used_queries.tolist()]
    right = [whole.right_items[row] for row in used_documents.tolist()]
    return PairDataset(left, right, left_id, right_id), validation, test


def vectors(path: Path, model: str) -> Task:
    """Two perceptrons on frozen features: latent semantic analysis of the training texts."""
    return on_features(*beir_parts(path), learning_rate=1e-3)


def on_features(
    pairs: PairDataset, validation: RetrievalSet, test: RetrievalSet, learning_rate: float, dim: int = 256
) -> Task:
    """The same pairs and queries as vectors of `dim` numbers."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    weigh = TfidfVectorizer(sublinear_tf=True, min_df=3, max_df=0.3, stop_words="english", dtype=np.float32)
    weighed = weigh.fit_transform([*pairs.left_items, *pairs.right_items])
    reduce = TruncatedSVD(dim, random_state=0).fit(weighed)

    def features(texts: Sequence[str]) -> np.ndarray:
        vectors = normalize(reduce.transform(weigh.transform(list(texts)))).astype(np.float32)
        vectors[~vectors.any(axis=1)] = dim**-0.5  # texts without a word that is known
        return vectors

    def corpus(texts: Corpus) -> Corpus:
        return Corpus(texts.ids, features(texts.items), "vector")

    train = PairDataset(
        features(pairs.left_items),
        features(pairs.right_items),
        pairs.left_id,
        pairs.right_id,
        left_modality="vector",
        right_modality="vector",
    )
    documents = corpus(test.corpus)
    parts = (Retrieval(RetrievalSet(corpus(part.queries), documents, part.qrels)) for part in (validation, test))
    return Task(lambda: VectorEncoder(dim, tower="mlp", dim=64, hidden=512, shared=False), train, *parts, learning_rate)


def beginnings(path: Path, words: int) -> tuple[PairDataset, RetrievalSet, RetrievalSet]:
    """The same parts with texts cut behind so many words: what encoders do not read need not be tokenized."""
    pairs, *tests = beir_parts(path)

    def begin(texts: Sequence[str]) -> list[str]:
        return [" ".join(text.split(maxsplit=words)[:words]) for text in texts]

    cut = PairDataset(begin(pairs.left_items), begin(pairs.right_items), pairs.left_id, pairs.right_id)
    documents = Corpus(tests[0].corpus.ids, begin(tests[0].corpus.items))
    return cut, *(one._replace(corpus=documents) for one in tests)


def text(path: Path, model: str, dropout: float = 0.0) -> Task:
    """A one-layer transformer with a tokenizer of its own, both from scratch."""
    pairs, validation, test = beginnings(path, words=64)
    tokenizer = train_tokenizer(beir_parts(path)[0].right_items, 8000, max_length=64)
    config = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 256, "max_position_embeddings": 64, "vocab_size": len(tokenizer)}
    config |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}

    def new_model() -> DualEncoder:
        return TextEncoder(config=config, tokenizer=tokenizer, max_length=64)

    return Task(new_model, pairs, Retrieval(validation), Retrieval(test), learning_rate=3e-3)


def minilm(path: Path, model: str) -> Task:
    """A published encoder, fine-tuned on 128 tokens; documents are those that a held-out or a test query is about."""
    pairs, validation, test = beginnings(path, words=128)
    judged = {document for part in (validation, test) for of_query in part.qrels.values() for document in of_query}
    kept = {own: row for row, own in enumerate(test.corpus.ids) if own in judged}
    documents = Corpus(list(kept), [test.corpus.items[row] for row in kept.values()])
    validation, test = (part._replace(corpus=documents) for part in (validation, test))

    def new_model() -> DualEncoder:
        return TextEncoder(model, max_length=128)

    return Task(new_model, pairs, Retrieval(validation), Retrieval(test), learning_rate=2e-5)


def image_text(path: Path, model: str) -> Task:
    """A small open_clip model from scratch, on 64 pixels."""
    config = {
        "embed_dim": 128,
        "vision_cfg": {"image_size": 64, "patch_size": 16, "width": 128, "layers": 4, "head_width": 32},
        "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 2},
    }
    train, validation, test = (
        TablePairs(path / f"{part}.parquet", left_column="image", right_column="captions", deduplicate=part == "train")
        for part in ("train", "dev", "test")
    )

    def new_model() -> DualEncoder:
        return ImageTextEncoder(config=config, crop_scale=(0.5, 1.0))

    return Task(new_model, train, ImageOfCaption(validation), ImageOfCaption(test), learning_rate=5e-4)


def images(path: Path, model: str) -> Task:
    """Two views of 4,000 images, a narrow four-block ResNet on 24 pixels."""
    train, validation, test = open_parts(str(path), 4000, 2000)
    parts = Neighbours(train, validation), Neighbours(train, test, probe=True)
    return Task(new_encoder, train, *parts, learning_rate=2e-3, temperatures=(0.1, 0.2, 0.4))


def some_of(pairs: PairDataset, count: int) -> PairDataset:
    """A random part of the pairs, with the items that occur in it and no others."""
    rows = np.random.default_rng(0).permutation(len(pairs))[:count]
    items, ids = [], []
    for all_items, of_pairs in ((pairs.left_items, pairs.left_id), (pairs.right_items, pairs.right_id)):
        used, numbers = np.unique(of_pairs[rows], return_inverse=True)
        items.append(
            all_items[used] if isinstance(all_items, np.ndarray) else [all_items[row] for row in used.tolist()]
        )
        ids.append(numbers)
    return PairDataset(*items, *ids, left_modality=pairs.left_modality, right_modality=pairs.right_modality)


TASKS: dict[str, Callable[[Path, str], Task]] = {
    "vectors": vectors,
    "text": text,
    "text_dropout": partial(text, dropout=0.1),
    "minilm": minilm,
    "image_text": image_text,
    "images": images,
}
HELD_OUT = 1000


def run(
    task: str,
    path: Path,
    objectives: Sequence[str] = ("InfoNCE", "DCL", "SogCLR", "ISIR", "GlobalCache"),
    batch_sizes: Sequence[int] = (32,),
    epochs: float = 6,
    pairs: int | None = None,
    seeds: int = 3,
    equal: Literal["pairs", "passes", "seconds"] = "pairs",
    seconds: float | None = None,
    rates: Sequence[float] = RATES,
    temperatures: Sequence[float] | None = None,
    tune_at: int | None = None,
    tune_epochs: float | None = None,
    tune_pairs: int | None = None,
    model: str = "sentence-transformers/all-MiniLM-L6-v2",
    processes: int = 1,
    results: Path = RESULTS,
) -> None:
    """Tune objectives, train them with all seeds, and add every run to the results.

    Args:
        task: one of vectors, text, text_dropout, minilm, image_text, images.
        path: the data.
        objectives: which.
        batch_sizes: B.
        epochs: pairs seen, over M; those of InfoNCE where passes are equal.
        pairs: train on a random part of so many pairs.
        seeds: how many.
        equal: what is the same for all. "seconds": each objective trains longer, up to the seconds that the slowest of
            the call takes for the same pairs, as long as is best on held-out data.
        seconds: the budget of equal seconds, in place of what the slowest takes.
        rates: factors of the task's learning rate to choose from, the first of them while τ is chosen.
        temperatures: τ to choose from, where not the task's own. Beyond the edge of rates and of these, more are tried
            while they are better.
        tune_at, tune_epochs, tune_pairs: batch size, epochs and pairs at which to tune, where not those of the runs.
        model: name or folder of the model that minilm starts from.
        processes: trainings at once.
        results: where finished runs are kept.
    """
    opened, runs = TASKS[task](path, model), Runs(results)
    for count in {pairs, tune_pairs}:
        part = opened if count is None else replace(opened, pairs=some_of(opened.pairs, count))
        OPENED[name_of(task, path, count)] = part

    def settings(
        cell: Cell, rate: float, tau: float, seed: int = 0, share: float = 1.0, tuning: bool = False
    ) -> Settings:
        batch_size, objective = cell
        name = name_of(task, path, (tune_pairs or pairs) if tuning else pairs)
        length = (tune_epochs or epochs) if tuning else epochs
        own = {"task": name, "objective": objective, "batch_size": (tune_at or batch_size) if tuning else batch_size}
        own |= {"pairs_seen": round(share * length * len(OPENED[name].pairs)), "rate": rate, "temperature": tau}
        return own | {"seed": seed, "equal": "pairs" if share == 1 else equal}

    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:

        def compute(missing: list[Settings]) -> Iterator[tuple[Settings, dict[str, Any]]]:
            for one in as_completed([pool.submit(train, settings) for settings in missing]):
                yield one.result()

        def best(values: Sequence[float], settings_with: Callable[[Cell, float], Settings]) -> dict[Cell, float]:
            """Of each cell, the value whose run has the highest quality on held-out data, also beyond the edges."""
            tried = {cell: sorted(values) for cell in cells}
            quality: dict[tuple[Cell, float], float] = {}
            for _ in range(1 + BEYOND_EDGE):
                missing = [(c, value) for c in cells for value in tried[c] if (c, value) not in quality]
                found = runs.get([settings_with(c, value) for c, value in missing], compute)
                quality |= {key: one["validation"] for key, one in zip(missing, found, strict=True)}
                for cell, own in tried.items():
                    if len(own) == 1:
                        continue
                    winner = max(own, key=lambda value: quality[cell, value])
                    if winner == own[0]:
                        own.insert(0, float(f"{winner * own[0] / own[1]:.2g}"))
                    elif winner == own[-1]:
                        own.append(float(f"{winner * own[-1] / own[-2]:.2g}"))
            known = {cell: [value for value in own if (cell, value) in quality] for cell, own in tried.items()}
            return {cell: max(own, key=lambda value: quality[cell, value]) for cell, own in known.items()}

        cells: list[Cell] = list(itertools.product(batch_sizes, objectives))
        tau = best(temperatures or opened.temperatures, lambda c, t: settings(c, rates[0], t, tuning=True))
        rate = best(rates, lambda c, r: settings(c, r, tau[c], tuning=True))
        final = [(cell, seed) for cell in cells for seed in range(seeds)]
        found = runs.get([settings(c, rate[c], tau[c], seed) for c, seed in final], compute)
        if equal == "passes":
            shares = [1 / (1 + one["extra_encodes"] / 2) if one["extra_encodes"] > 0.01 else 1.0 for one in found]
            again = zip(final, shares, strict=True)
            found = runs.get([settings(c, rate[c], tau[c], seed, share) for (c, seed), share in again], compute)
        if equal == "seconds":
            spent = {cell: statistics.mean(o["seconds"] for o in own) for cell, own in by_cell(final, found).items()}
            # Of two lengths, the whole budget and the geometric mean of it and one, the better one is chosen.
            budget = {cell: (seconds or max(spent.values())) / own for cell, own in spent.items()}
            tried = [(cell, share) for cell, most in budget.items() for share in (math.sqrt(most), most) if most > 1.02]
            lengths = {(c, share): settings(c, rate[c], tau[c], share=share) for c, share in tried}
            quality = {(cell, 1.0): own[0]["validation"] for cell, own in by_cell(final, found).items()}
            tuned = runs.get(lengths.values(), compute)
            quality |= {key: one["validation"] for key, one in zip(lengths, tuned, strict=True)}
            length = {c: max((key for key in quality if key[0] == c), key=quality.__getitem__)[1] for c in cells}
            found = runs.get([settings(c, rate[c], tau[c], seed, length[c]) for c, seed in final], compute)
    for (batch_size, objective), row in itertools.groupby(zip(final, found, strict=True), key=lambda item: item[0][0]):
        print(f"{name_of(task, path, pairs)} {objective} B={batch_size}: {spread([one for _, one in row])}", flush=True)


def by_cell(final: Sequence[tuple[Cell, int]], found: Sequence[dict[str, Any]]) -> dict[Cell, list[dict[str, Any]]]:
    """The runs of all seeds of each cell."""
    cells: dict[Cell, list[dict[str, Any]]] = {}
    for (cell, _), one in zip(final, found, strict=True):
        cells.setdefault(cell, []).append(one)
    return cells


def name_of(task: str, path: Path, pairs: int | None) -> str:
    """What a task on these data is called in tables."""
    return f"{task} {path.name}" if pairs is None else f"{task} {path.name}, {pairs:,} pairs"


class Row:
    """All seeds of one objective at one batch size and length, with the settings that were chosen for it.

    Args:
        runs: where they are.
        cell: what their settings have in common: task, objective, batch_size, pairs_seen.
    """

    def __init__(self, runs: Runs, cell: dict[str, Any]) -> None:
        chosen: dict[tuple[float, float], list[dict[str, Any]]] = {}
        for one in runs.found.values():
            own = one["settings"]
            if {**cell, "equal": "pairs"}.items() <= own.items():
                chosen.setdefault((own["rate"], own["temperature"]), []).append(one)
        # Settings with all seeds; where there are several, the best by the mean quality on held-out data.
        most = max(map(len, chosen.values()))
        complete = {setting: seeds for setting, seeds in chosen.items() if len(seeds) == most}
        held_out = {key: statistics.mean(one["validation"] for one in seeds) for key, seeds in complete.items()}
        self.rate, self.temperature = max(held_out, key=held_out.__getitem__)
        self.seeds = complete[self.rate, self.temperature]
        self.objective, self.batch_size, self.pairs_seen = (cell[k] for k in ("objective", "batch_size", "pairs_seen"))
        self.seconds = self._longest(runs, cell)
        # Of equal passes, each seed saw pairs of its own number.
        self.passes = [one for one in (self._fewer_pairs(runs, one) for one in self.seeds) if one is not None]

    def _longest(self, runs: Runs, cell: dict[str, Any]) -> list[dict[str, Any]]:
        """The runs of equal seconds: those of the length that has most seeds, for others were only tried.

        Where longer trainings were tried and none was better, they are the runs of equal pairs.
        """
        wanted = {**cell, "equal": "seconds"}
        del wanted["pairs_seen"]
        lengths: dict[int, list[dict[str, Any]]] = {}
        for one in runs.found.values():
            if wanted.items() <= one["settings"].items():
                lengths.setdefault(one["settings"]["pairs_seen"], []).append(one)
        longest = max(lengths.values(), key=len, default=[])
        return self.seeds if len(longest) == 1 else longest

    @staticmethod
    def _fewer_pairs(runs: Runs, one: dict[str, Any]) -> dict[str, Any] | None:
        """The run with as many passes as InfoNCE makes: itself, where nothing else is encoded."""
        if one["extra_encodes"] <= 0.01:
            return one
        pairs_seen = one["settings"]["pairs_seen"] / (1 + one["extra_encodes"] / 2)
        settings = {**one["settings"], "equal": "passes"}
        del settings["pairs_seen"]
        alike = [found for found in runs.found.values() if settings.items() <= found["settings"].items()]
        return next((found for found in alike if abs(found["settings"]["pairs_seen"] / pairs_seen - 1) < 0.01), None)

    def mean(self, what: str) -> float:
        """Over the seeds."""
        return statistics.mean(one[what] for one in self.seeds)

    @property
    def on_gpu(self) -> bool:
        """Whether seconds are those of a core that mostly waits."""
        return any("device" in one for one in self.seeds)

    @property
    def per_query(self) -> np.ndarray:
        """(Q,) mean over the seeds of each query's quality."""
        packed = (base64.b64decode(one["scores"]) for one in self.seeds)
        decoded = [np.frombuffer(zlib.decompress(scores), np.uint8) for scores in packed]
        return np.mean(decoded, axis=0) / 255


def spread(seeds: Sequence[dict[str, Any]], what: str = "test") -> str:
    """Mean and standard deviation of the test quality, or of another measure."""
    values = [one[what] for one in seeds if what in one]
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else "not run"


def rows_of(runs: Runs, task: str, pairs_seen: int | None = None) -> list[Row]:
    """Every cell of a task with several seeds, by batch size and then the best first."""
    keys = ("task", "objective", "batch_size", "pairs_seen")
    settings = [one["settings"] for one in runs.found.values() if one["settings"]["task"] == task]
    cells = {tuple(own[key] for key in keys) for own in settings if own["equal"] == "pairs"}
    rows = [Row(runs, dict(zip(keys, cell, strict=True))) for cell in cells]
    rows = [row for row in rows if len(row.seeds) > 1 and pairs_seen in (None, row.pairs_seen)]
    return sorted(rows, key=lambda row: (row.batch_size, -row.mean("test")))


def report(results: Path = RESULTS, figures: Path | None = None, samples: int = 10_000) -> None:
    """Print tables of all runs that are there, and draw.

    Args:
        results: where finished runs are kept.
        figures: a folder to draw to.
        samples: of the paired bootstrap over queries.
    """
    runs = Runs(results)
    by_length: dict[tuple[str, int], list[Row]] = {}
    for task in dict.fromkeys(one["settings"]["task"] for one in runs.found.values()):
        for row in rows_of(runs, task):
            by_length.setdefault((task, row.pairs_seen), []).append(row)
    for (task, pairs_seen), rows in by_length.items():
        print_table(Table(f"{task}: {pairs_seen:,} pairs seen", list(cells_of(rows, samples))))
        if figures is not None:
            draw(task, rows, figures)
    if figures is not None:
        draw_gaps(by_length, runs, figures / "small_batch_gaps.svg")
        rows = max((rows for (task, _), rows in by_length.items() if task == GAPS_IN), key=len, default=[])
        if rows:
            draw_headline(rows, figures / "quality_by_batch_size.svg")


def cells_of(rows: Sequence[Row], samples: int) -> Iterator[dict[str, object]]:
    """One line per row, with its difference to the best batch size of InfoNCE."""
    of_batch = [row for row in rows if row.objective == "InfoNCE"]
    best = max(of_batch, key=lambda row: row.mean("test"), default=None)
    for row in rows:
        cells = {"objective": row.objective, "B": row.batch_size, "equal pairs": spread(row.seeds)}
        cells["equal passes"] = spread(row.passes)
        cells["equal seconds"] = spread(row.seconds)
        if any("linear_probe" in one for one in row.seeds):
            cells["linear probe"] = spread(row.seeds, "linear_probe")
        if best is not None:
            found = paired_bootstrap(best.per_query, row.per_query, samples=samples)
            over = f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
            cells[f"over InfoNCE, B = {best.batch_size}"] = "–" if row is best else over
        seconds = "on a GPU" if row.on_gpu else f"{row.mean('seconds'):.0f}"
        cells |= {"extra encodes": f"{row.mean('extra_encodes'):.2f}", "seconds": seconds}
        yield cells | {"rate, τ": f"{row.rate:g}, {row.temperature:g}", "seeds": len(row.seeds)}


def draw(task: str, rows: Sequence[Row], folder: Path) -> None:
    """Quality by batch size; and at the ordinary batch size by pairs seen and by seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{task}_{rows[0].pairs_seen}".replace(" ", "_").replace(",", "")
    rows = [row for row in rows if row.objective in DRAWN]
    by_size: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        by_size.setdefault(row.objective, []).append((row.batch_size, row.mean("test")))
    sizes = {name: tuple(zip(*points)) for name, points in by_size.items() if len(points) > 1}
    if sizes:
        figure = lines(sizes, xlabel="batch size", ylabel="quality on test data")
        figure.axes[0].set_xscale("log", base=2)
        (folder / f"{stem}_batch.svg").write_text(as_svg(figure))
    for axis, label in enumerate(("pairs seen", "seconds of one core")):
        curves = {}
        for row in rows:
            if row.batch_size == ORDINARY_BATCH and not (axis == 1 and row.on_gpu):
                points = np.mean([one["curve"] for one in row.seeds], axis=0)
                curves[row.objective] = points[:, axis].tolist(), points[:, 2].tolist()
        if curves:
            figure = lines(curves, xlabel=label, ylabel="quality on held-out data")
            (folder / f"{stem}_{label.split()[0]}.svg").write_text(as_svg(figure))


def draw_headline(rows: Sequence[Row], path: Path) -> None:
    """Test quality by batch size at equal pairs seen, mean and standard deviation over seeds, of three objectives."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, label) in zip(COLOURS, HEADLINE.items(), strict=False):
        points = [row for row in rows if row.objective == name]
        sizes = [row.batch_size for row in points]
        means = [row.mean("test") for row in points]
        deviations = [float(np.std([seed["test"] for seed in row.seeds], ddof=1)) for row in points]
        axes.errorbar(sizes, means, deviations, marker="o", markersize=4, capsize=2, color=colour, label=label)
    ticks = sorted({row.batch_size for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("batch size, equal pairs seen")
    axes.set_ylabel("nDCG@10 on test queries")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    path.write_text(as_svg(figure))


def draw_gaps(by_length: dict[tuple[str, int], list[Row]], runs: Runs, path: Path) -> None:
    """How far objectives are above InfoNCE with the same settings: by batch size, τ, epochs and number of pairs.

    The first three of one task, the last of parts of another, each as far as there are runs.
    """
    panels: dict[str, dict[str, dict[float, float]]] = {}

    def add(panel: str, at: float, of_objective: dict[str, float]) -> None:
        base = of_objective.get("InfoNCE")
        for name, value in of_objective.items():
            if base is not None and name in GAPS_OF:
                panels.setdefault(panel, {}).setdefault(name, {})[at] = value - base

    of_task = {seen: rows for (task, seen), rows in by_length.items() if task == GAPS_IN}
    longest = max(of_task, key=lambda seen: len(of_task[seen]), default=0)
    for size in {row.batch_size for row in of_task.get(longest, [])}:
        add("batch size", size, {row.objective: row.mean("test") for row in of_task[longest] if row.batch_size == size})
    for seen, rows in of_task.items():
        small = {row.objective: row.mean("test") for row in rows if row.batch_size == ORDINARY_BATCH}
        add("pairs seen", seen, small)
    tuning = [one for one in runs.found.values() if one["settings"]["task"] == GAPS_IN and one["settings"]["seed"] == 0]
    by_tau: dict[float, dict[str, float]] = {}
    same_settings = {"batch_size": ORDINARY_BATCH, "rate": RATES[0], "pairs_seen": longest, "equal": "pairs"}
    for one in tuning:
        own = one["settings"]
        if same_settings.items() <= own.items():
            by_tau.setdefault(own["temperature"], {})[own["objective"]] = one["test"]
    for tau, of_objective in by_tau.items():
        add("τ of all (one seed)", tau, of_objective)
    for (task, _), rows in by_length.items():
        _, _, pairs = task.partition(", ")
        if pairs:
            small = {row.objective: row.mean("test") for row in rows if row.batch_size == ORDINARY_BATCH}
            add("pairs to train on (functions)", int(pairs.split()[0].replace(",", "")), small)
    if not panels:
        return
    figure = Figure(figsize=(3.2 * len(panels), 3.2), layout="constrained")
    for axes, (panel, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for colour, name in zip(COLOURS, GAPS_OF, strict=False):
            points = sorted(curves.get(name, {}).items())
            axes.plot(*zip(*points), marker="o", markersize=4, color=colour, label=name) if points else None
        axes.axhline(0, color="grey", linewidth=0.8)
        ticks = sorted({at for curve in curves.values() for at in curve})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:,g}" if tick < 1000 else f"{tick / 1000:,.0f}k" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(panel)
    figure.axes[0].set_ylabel("quality above InfoNCE")
    figure.axes[0].legend(frameon=False, fontsize=8)
    path.write_text(as_svg(figure))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli([run, report])
