"""What comparisons of objectives train on: data, a model, and a measure of quality on held-out and
on test data.

- "vectors": two perceptrons on frozen features (latent semantic analysis, 256 numbers) of a BEIR
  folder.
- "copies": the same on 4,000 of its pairs, a fifth of which come twice; "copies_known", where
  training knows of them.
- "text": a one-layer transformer from scratch on it; "text_dropout", with a dropout of 0.1;
  "two_languages", where its tokenizer knows the words of queries as well.
- "minilm": a published one; "minilm_lora", adapters of rank 16 on it; "minilm_beginnings" and
  "minilm_lora_beginnings", the same on so few tokens and documents that a CPU can; "minilm_512", on
  texts of up to 512 tokens.
- "decoder": a two-layer decoder from scratch whose last token is the text's vector.
- "image_text": a small open_clip model on tables {train,dev,test}.parquet of images and captions.
- "image_text_vectors": perceptrons on vectors that published encoders have of them, see
  `pretrained_features.py`; "image_text_sets", where the captions of an image are one item.
- "images": a narrow ResNet on two views of labelled images, by its 20 nearest neighbours and, in
  the end, by a linear probe.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from quality import new_encoder, open_parts
from torch import Tensor

from dualenc.data import BeirPairs, ImageViews, PairDataset, TablePairs
from dualenc.data.corpus import Corpus, RetrievalSet
from dualenc.data.readers.beir import read_beir
from dualenc.encoders import (
    DualEncoder,
    ImageTextEncoder,
    TextEncoder,
    VectorEncoder,
    train_tokenizer,
)
from dualenc.encoders.text import TokenCache
from dualenc.encoders.vector import VectorPrepare, VectorTower
from dualenc.evaluation.image_text_retrieval import both_ways_ranks
from dualenc.evaluation.probe import accuracy, knn_predict, linear_probe
from dualenc.evaluation.retrieval import Result, retrieve
from dualenc.search.embed.encode import embed
from dualenc.training import Evaluator, ImageTextEvaluator, KNNEvaluator
from dualenc.types import Inputs

HELD_OUT = 1000
"""Training queries that are held out where a folder has no dev.tsv, or a fifth of them."""
DOCUMENTS = 10_000
"""That queries of fine-tuned encoders are answered from, the judged ones among them."""
BEGINNINGS: dict[str, Any] = {
    "max_tokens": 32,
    "max_documents": 4000,
    "max_queries": 500,
    "autocast": "bfloat16",
}
"""Of fine-tuning on a CPU."""
COPIED_PAIRS = 4000
"""Pairs of the task with copies."""
COPIED_SHARE = 0.2
CAPTIONS = 5
"""Of an image of Flickr8k."""
DROPPED_SHARE = 0.1
"""Share of the words that a copy lacks."""


@dataclass
class Task:
    """What is trained on and measured.

    Attributes:
        new_model: a model of this task, from torch's random state.
        pairs: M training pairs.
        validation, test: two measures of the same kind, by which to tune and to report.
        learning_rate: about right at a batch of 32.
        temperatures: to choose from.
        evaluations: of a training, besides the one before it; 0 is one when it has ended.
        mixed_precision: of training.
    """

    new_model: Callable[[], DualEncoder]
    pairs: PairDataset
    validation: Quality
    test: Quality
    learning_rate: float
    temperatures: tuple[float, ...] = (0.03, 0.05, 0.1)
    evaluations: int = 4
    mixed_precision: str = "no"


class Quality(Evaluator):
    """One number, the mean of what each query is worth, which the last call leaves in
    `per_query`."""

    per_query: list[float]

    def mean(self, per_query: Iterable[float]) -> dict[str, float]:
        """Of the queries of a call."""
        self.per_query = list(per_query)
        return {self.primary: statistics.mean(self.per_query)}


class Retrieval(Quality):
    """nDCG@10."""

    primary = "ndcg@10"

    def __init__(
        self, collection: RetrievalSet, autocast: Literal["bfloat16"] | None = None
    ) -> None:
        self.collection = collection
        self.autocast = autocast

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        queries, documents = (
            embed(tower, corpus, batch_size=64, autocast=self.autocast, progress=False)
            for tower, corpus in (
                (model.left, self.collection.queries),
                (model.right, self.collection.corpus),
            )
        )
        qrels = self.collection.qrels
        run = retrieve(
            queries.ids, queries.vectors, documents.ids, documents.vectors, depth=10, qrels=qrels
        )
        scores = Result("model", "held-out", run, qrels, len(documents.ids)).per_query
        return self.mean(of_query[self.primary] for of_query in scores.values())


class ImageOfCaption(Quality):
    """Recall@10 of images by captions, and the mean logarithm of their ranks."""

    primary = "recall@10"

    def __init__(self, pairs: PairDataset) -> None:
        self.evaluator = ImageTextEvaluator(pairs)

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        images = embed(model.left, self.evaluator.images, batch_size=64, progress=False)
        texts = embed(model.right, self.evaluator.texts, batch_size=64, progress=False)
        ranks = both_ways_ranks(images.vectors, texts.vectors, self.evaluator.captions)[
            "text_to_image"
        ]
        return self.mean((ranks <= 10).astype(float).tolist()) | {
            "mean_log_rank": float(np.log(ranks).mean())
        }


class Neighbours(Quality):
    """Accuracy of a vote of 20 neighbours, and of a linear classifier where `probe` asks for it."""

    primary = "20-NN"

    def __init__(self, train: ImageViews, test: ImageViews, probe: bool = False) -> None:
        self.evaluator = KNNEvaluator(train, test)
        self.probe = probe

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        train, test = (
            embed(model.left, corpus, batch_size=256, output="features", progress=False).vectors
            for corpus in self.evaluator.corpora
        )
        votes, labels = self.evaluator.labels
        found = self.mean((knn_predict(train, votes, test, k=20) == labels).astype(float).tolist())
        if self.probe:
            found["linear_probe"] = accuracy(
                linear_probe(train, votes).classifier.predict(test), labels
            )
        return found


def beir_parts(path: Path) -> tuple[PairDataset, RetrievalSet, RetrievalSet]:
    """Training pairs with their own documents as corpus, and held-out and test queries over all
    documents.

    Where the folder has no dev.tsv, the last thousand training queries, or a fifth of them, are
    held out.
    """
    whole, test = BeirPairs(path, "train"), read_beir(path, "test")
    queries, documents = whole.left_id, whole.right_id
    if (path / "qrels" / "dev.tsv").exists():
        validation = read_beir(path, "dev")
    else:
        held_out = queries >= whole.num_left - min(HELD_OUT, whole.num_left // 5)
        qrels: dict[str, dict[str, int]] = {}
        for query, document in zip(
            queries[held_out].tolist(), documents[held_out].tolist(), strict=True
        ):
            qrels.setdefault(whole.queries.ids[query], {})[whole.corpus.ids[document]] = 1
        rows = np.unique(queries[held_out])
        texts = [whole.queries.items[row] for row in rows.tolist()]
        validation = RetrievalSet(
            Corpus([whole.queries.ids[row] for row in rows.tolist()], texts), test.corpus, qrels
        )
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
    pairs: PairDataset,
    validation: RetrievalSet,
    test: RetrievalSet,
    learning_rate: float,
    dim: int = 256,
) -> Task:
    """The same pairs and queries as vectors of `dim` numbers."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    weigh = TfidfVectorizer(
        sublinear_tf=True, min_df=3, max_df=0.3, stop_words="english", dtype=np.float32
    )
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
    parts = (
        Retrieval(RetrievalSet(corpus(part.queries), documents, part.qrels))
        for part in (validation, test)
    )
    return Task(
        lambda: VectorEncoder(dim, tower="mlp", dim=64, hidden=512, shared=False),
        train,
        *parts,
        learning_rate,
    )


def copies(path: Path, model: str, known: bool = False) -> Task:
    """Perceptrons on features where a fifth of the documents have a near copy under another id, as
    false negatives.

    A copied training pair comes again, as a copy of its query with a copy of its document: the
    document of either is a false negative of the other's query. `known`: they are known positives.
    A test or held-out query whose document has a copy has two relevant documents.
    """
    pairs, validation, test = beir_parts(path)
    draw = np.random.default_rng(0)
    pairs = some_of(pairs, COPIED_PAIRS)
    copied = draw.permutation(len(pairs))[: round(COPIED_SHARE * len(pairs))]
    left, left_id = with_copies(pairs.left_items, pairs.left_id, copied, draw)
    right, right_id = with_copies(pairs.right_items, pairs.right_id, copied, draw)
    train = PairDataset(left, right, left_id, right_id)

    documents = test.corpus
    rows = draw.permutation(len(documents.ids))[: round(COPIED_SHARE * len(documents.ids))].tolist()
    copy_ids = {documents.ids[row]: f"{documents.ids[row]}-copy" for row in rows}
    texts = [*documents.items, *(without_words(documents.items[row], draw) for row in rows)]
    corpus = Corpus([*documents.ids, *copy_ids.values()], texts)
    parts = []
    for part in (validation, test):
        qrels = {
            query: grades
            | {copy_ids[own]: grade for own, grade in grades.items() if own in copy_ids}
            for query, grades in part.qrels.items()
        }
        parts.append(part._replace(corpus=corpus, qrels=qrels))
    task = replace(on_features(train, *parts, learning_rate=1e-3), evaluations=0)
    if not known:
        return task
    # Each query with the document of its copy, the other way round as well.
    every = np.arange(len(pairs), len(train))
    crossed_left = np.concatenate([left_id, left_id[copied], left_id[every]])
    crossed_right = np.concatenate([right_id, right_id[every], right_id[copied]])
    items = task.pairs.left_items, task.pairs.right_items
    knowing = PairDataset(
        *items, crossed_left, crossed_right, left_modality="vector", right_modality="vector"
    )
    return replace(task, pairs=knowing.take(np.arange(len(train)), positives_of=knowing))


def with_copies(
    texts: Sequence[str], ids: np.ndarray, pairs: np.ndarray, draw: np.random.Generator
) -> tuple[list[str], np.ndarray]:
    """One side with a copy of the item of each of some pairs (n,), and (M + n,) ids, those of the
    copies last."""
    made = [without_words(texts[item], draw) for item in ids[pairs].tolist()]
    return [*texts, *made], np.concatenate([ids, len(texts) + np.arange(len(made))])


def without_words(text: str, draw: np.random.Generator) -> str:
    """A near copy: a tenth of the words are missing."""
    words = text.split()
    return " ".join(
        word for word, dropped in zip(words, draw.random(len(words)) < DROPPED_SHARE) if not dropped
    )


def beginnings(path: Path, words: int) -> tuple[PairDataset, RetrievalSet, RetrievalSet]:
    """The same parts with texts cut behind so many words: what encoders do not read need not be
    tokenized."""
    pairs, *tests = beir_parts(path)

    def begin(texts: Sequence[str]) -> list[str]:
        return [" ".join(text.split(maxsplit=words)[:words]) for text in texts]

    cut = PairDataset(
        begin(pairs.left_items), begin(pairs.right_items), pairs.left_id, pairs.right_id
    )
    documents = Corpus(tests[0].corpus.ids, begin(tests[0].corpus.items))
    return cut, *(one._replace(corpus=documents) for one in tests)


def decoder(path: Path, model: str) -> Task:
    """A two-layer decoder of Qwen3's kind with a tokenizer of its own, both from scratch; its last
    token is pooled."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config |= {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 192,
        "max_position_embeddings": 64,
    }
    return from_scratch(path, config)


def text(path: Path, model: str, dropout: float = 0.0, both_sides: bool = False) -> Task:
    """A one-layer transformer with a tokenizer of its own, both from scratch."""
    config = {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config |= {"intermediate_size": 256, "max_position_embeddings": 64}
    config |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return from_scratch(path, config, both_sides)


def from_scratch(path: Path, config: dict[str, Any], both_sides: bool = False) -> Task:
    """A transformer with random weights, and a tokenizer of the training documents, or of the
    queries as well."""
    pairs, validation, test = beginnings(path, words=64)
    whole = beir_parts(path)[0]
    texts = [*whole.left_items, *whole.right_items] if both_sides else whole.right_items
    tokenizer = train_tokenizer(texts, 8000, max_length=64)

    def new_model() -> DualEncoder:
        return TextEncoder(config=config, tokenizer=tokenizer, max_length=64)

    return Task(new_model, pairs, Retrieval(validation), Retrieval(test), learning_rate=3e-3)


def minilm(
    path: Path,
    model: str,
    lora_rank: int = 0,
    max_tokens: int = 128,
    max_documents: int = DOCUMENTS,
    max_queries: int | None = None,
    autocast: Literal["bfloat16"] | None = None,
) -> Task:
    """A published encoder, fine-tuned; queries are answered from documents of the folder, judged
    ones among them."""
    pairs, validation, test = beginnings(path, words=max_tokens)
    validation, test = (some_queries(part, max_queries) for part in (validation, test))
    judged = {
        document
        for part in (validation, test)
        for of_query in part.qrels.values()
        for document in of_query
    }
    is_judged = np.array([own in judged for own in test.corpus.ids])
    others = np.random.default_rng(0).permutation(np.flatnonzero(~is_judged))
    kept = np.sort(
        np.concatenate(
            [np.flatnonzero(is_judged), others[: max(0, max_documents - is_judged.sum())]]
        )
    )
    documents = test.corpus.take(kept)
    validation, test = (part._replace(corpus=documents) for part in (validation, test))

    tokens = TokenCache()  # all runs read the same texts

    def new_model() -> TextEncoder:
        encoder = TextEncoder(model, max_length=max_tokens, lora_rank=lora_rank)
        encoder.left.prepare.token_cache = encoder.right.prepare.token_cache = tokens
        return encoder

    prepare = new_model().right.prepare
    for texts in (
        documents.items,
        pairs.left_items,
        pairs.right_items,
        validation.queries.items,
        test.queries.items,
    ):
        for start in range(0, len(texts), 1000):
            prepare([texts[row] for row in range(start, min(start + 1000, len(texts)))])
    return Task(
        new_model,
        pairs,
        Retrieval(validation, autocast),
        Retrieval(test, autocast),
        learning_rate=2e-4 if lora_rank else 2e-5,
        evaluations=0,
        mixed_precision="bf16" if autocast == "bfloat16" else "no",
    )


def some_queries(collection: RetrievalSet, count: int | None) -> RetrievalSet:
    """A random part of the judged queries."""
    if count is None or count >= len(collection.queries.ids):
        return collection
    rows = np.sort(np.random.default_rng(0).permutation(len(collection.queries.ids))[:count])
    queries = collection.queries.take(rows)
    return collection._replace(
        queries=queries, qrels={own: collection.qrels[own] for own in queries.ids}
    )


def image_text(path: Path, model: str) -> Task:
    """A small open_clip model from scratch, on 64 pixels."""
    config = {
        "embed_dim": 128,
        "vision_cfg": {
            "image_size": 64,
            "patch_size": 16,
            "width": 128,
            "layers": 4,
            "head_width": 32,
        },
        "text_cfg": {
            "context_length": 32,
            "vocab_size": 49408,
            "width": 128,
            "heads": 4,
            "layers": 2,
        },
    }
    train, validation, test = (
        TablePairs(
            path / f"{part}.parquet",
            left_column="image",
            right_column="captions",
            deduplicate=part == "train",
        )
        for part in ("train", "dev", "test")
    )

    def new_model() -> DualEncoder:
        return ImageTextEncoder(config=config, crop_scale=(0.5, 1.0))

    return Task(
        new_model, train, ImageOfCaption(validation), ImageOfCaption(test), learning_rate=5e-4
    )


def image_text_vectors(path: Path, model: str, one_item: bool = False) -> Task:
    """Perceptrons on vectors that published encoders have of images and captions, see
    `pretrained_features.py`.

    `one_item`: the captions of an image are one item, of which each step sees one at random.
    """
    train, validation, test = (
        vector_pairs(path / f"{part}.npz") for part in ("train", "dev", "test")
    )
    sizes = train.left_items.shape[1], train.right_items.shape[1]
    if one_item:
        captions = [
            train.right_items[train.right_id[train.left_id == image]]
            for image in range(train.num_left)
        ]
        # Where two captions of an image are the same, some come again.
        several = np.stack([np.resize(own, (CAPTIONS, sizes[1])).ravel() for own in captions])
        train = PairDataset(
            train.left_items, several, left_modality="vector", right_modality="vector"
        )

    def new_model() -> DualEncoder:
        return CaptionEncoder(*sizes)

    return Task(
        new_model, train, ImageOfCaption(validation), ImageOfCaption(test), learning_rate=1e-3
    )


def vector_pairs(file: Path) -> PairDataset:
    """Pairs of the vectors that a file has."""
    with np.load(file) as held:
        parts = [held[name] for name in ("images", "captions", "left_id", "right_id")]
    return PairDataset(*parts, left_modality="vector", right_modality="vector")


class CaptionEncoder(VectorEncoder):
    """Perceptrons on vectors of images and on vectors of captions."""

    def __init__(self, image_dim: int, caption_dim: int) -> None:
        super().__init__(image_dim, tower="mlp", dim=64, hidden=512, right_input_dim=caption_dim)
        DualEncoder.__init__(self, self.left, AnyCaption(caption_dim), kind="vector")


class AnyCaption(VectorTower):
    """A perceptron on one of the vectors (B, n·D) of n captions of the same image, chosen at
    random."""

    def __init__(self, caption_dim: int) -> None:
        super().__init__("mlp", caption_dim, dim=64, hidden=512)
        self.caption_dim = caption_dim
        self.prepare = AnyLength(caption_dim)

    def forward(self, inputs: Inputs) -> Tensor:
        captions = inputs["vector"].unflatten(1, (-1, self.caption_dim))
        chosen = torch.randint(captions.shape[1], (len(captions),), device=captions.device)
        return super().forward(
            {"vector": captions[torch.arange(len(captions), device=captions.device), chosen]}
        )


class AnyLength(VectorPrepare):
    """Vectors of several captions as well."""

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> Inputs:
        return {"vector": torch.from_numpy(np.stack(items)).float()}


def images(path: Path, model: str) -> Task:
    """Two views of 4,000 images, a narrow four-block ResNet on 24 pixels."""
    train, validation, test = open_parts(str(path), 4000, 2000)
    parts = Neighbours(train, validation), Neighbours(train, test, probe=True)
    return Task(new_encoder, train, *parts, learning_rate=2e-3, temperatures=(0.1, 0.2, 0.4))


def some_of(pairs: PairDataset, count: int) -> PairDataset:
    """A random part of the pairs, with the items that occur in it and no others."""
    rows = np.random.default_rng(0).permutation(len(pairs))[:count]
    items, ids = [], []
    for all_items, of_pairs in (
        (pairs.left_items, pairs.left_id),
        (pairs.right_items, pairs.right_id),
    ):
        used, numbers = np.unique(of_pairs[rows], return_inverse=True)
        items.append(
            all_items[used]
            if isinstance(all_items, np.ndarray)
            else [all_items[row] for row in used.tolist()]
        )
        ids.append(numbers)
    return PairDataset(
        *items, *ids, left_modality=pairs.left_modality, right_modality=pairs.right_modality
    )


TASKS: dict[str, Callable[[Path, str], Task]] = {
    "vectors": vectors,
    "copies": copies,
    "copies_known": partial(copies, known=True),
    "text": text,
    "text_dropout": partial(text, dropout=0.1),
    "two_languages": partial(text, both_sides=True),
    "decoder": decoder,
    "minilm": minilm,
    "minilm_lora": partial(minilm, lora_rank=16),
    "minilm_beginnings": partial(minilm, **BEGINNINGS),
    "minilm_lora_beginnings": partial(minilm, lora_rank=16, **BEGINNINGS),
    "minilm_512": partial(
        minilm, **BEGINNINGS | {"max_tokens": 512, "max_documents": 1500, "max_queries": 300}
    ),
    "image_text": image_text,
    "image_text_vectors": image_text_vectors,
    "image_text_sets": partial(image_text_vectors, one_item=True),
    "images": images,
}
