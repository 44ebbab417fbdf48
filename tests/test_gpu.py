"""On a real GPU: what the CPU computes, and runs that resume bit for bit. DUALENC_TEST_GPU=1 shows
the tests one."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualenc.data import PairDataset
from dualenc.data.corpus import Corpus
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.encoders.load import load_model
from dualenc.encoders.lora import add_adapters
from dualenc.objectives import GlobalCache
from dualenc.search import exact_search as exact
from dualenc.search.embed.encode import embed
from dualenc.search.exact_search import exact_search
from dualenc.training import Trainer
from dualenc.training.evaluators import RetrievalEvaluator
from tests.helpers.every import SETTINGS, Setting
from tests.helpers.fakes import TinyEncoder, same, weights
from tests.helpers.plain_training import train_plainly
from tests.helpers.runs import train, train_and_die

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, and DUALENC_TEST_GPU=1"
)
GPU = "cuda:0"


# A GPU's generator gives other numbers than that of a CPU.
DRAWING = ("EMC2", "GlobalCache", "ISIR", "NegativeCache")
EXACT = [
    s for s in SETTINGS if s.objective.__name__ not in DRAWING and "negatives" not in s.arguments
]


@pytest.mark.parametrize("setting", EXACT, ids=lambda s: s.name)
def test_losses_are_those_of_the_cpu(setting: Setting) -> None:
    expected = train_plainly(setting, "cpu")
    found = train_plainly(setting, GPU)
    assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("settings", [{}, {"chunk_size": 2}, {"num_workers": 1}], ids=str)
def test_killed_and_resumed_equals_unbroken(tmp_path: Path, settings: dict[str, int]) -> None:
    train(tmp_path / "unbroken", **settings)
    # CUDA does not live through a fork.
    process = multiprocessing.get_context("spawn").Process(
        target=train_and_die, args=(tmp_path / "run", 6, settings)
    )
    process.start()
    process.join()
    train(tmp_path / "run", model=TinyEncoder(dropout=0.2), resume=True, **settings)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "unbroken"))


WORDS = [
    "a",
    "few",
    "words",
    "that",
    "stand",
    "for",
    "all",
    "there",
    "are",
    "in",
    "the",
    "world",
    "of",
    "texts",
]
TEXTS = [" ".join(np.random.default_rng(number).choice(WORDS, 6)) for number in range(64)]


@pytest.fixture
def model() -> TextEncoder:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, 300, max_length=16)
    config = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config |= {"intermediate_size": 64, "max_position_embeddings": 16, "vocab_size": len(tokenizer)}
    return TextEncoder(config=config, tokenizer=tokenizer, max_length=16)


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16"}, {"compile": True}], ids=str)
def test_a_text_encoder_is_trained_saved_and_loaded(
    tmp_path: Path, model: TextEncoder, settings: dict[str, Any]
) -> None:
    pairs = PairDataset(TEXTS, TEXTS)
    trainer = Trainer(
        output=tmp_path, batch_size=8, epochs=4, learning_rate=1e-3, progress=False, **settings
    )
    objective = GlobalCache(temperature=0.1, num_left=pairs.num_left, num_right=pairs.num_right)
    result = trainer.fit(model, pairs, objective)
    assert next(model.parameters()).is_cuda
    corpus = Corpus([str(number) for number in range(len(TEXTS))], TEXTS)
    on_gpu = embed(model.eval().left, corpus, batch_size=16, progress=False).vectors
    on_cpu = embed(
        load_model(result.model_folder).left, corpus, batch_size=16, progress=False
    ).vectors
    np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-5)


def test_saving_adapters_takes_no_memory_of_the_gpu(tmp_path: Path, model: TextEncoder) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'dualenc[lora]'")
    add_adapters(model.left.backbone, rank=2)
    model.to(GPU)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.save(tmp_path / "model")
    assert torch.cuda.max_memory_allocated() == held
    assert next(model.parameters()).is_cuda


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("k", [1, 101, 5000])
def test_exact_search_finds_what_faiss_finds(
    dtype: type, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores to 1e-6, though the training around it allows TF32 and autocast; with ties, the same
    documents."""
    generator = np.random.default_rng(0)
    queries, documents = generator.standard_normal((700, 96)), generator.standard_normal((5000, 96))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    whole = generator.integers(-1, 2, (5000, 4)).astype(dtype)  # of 81 kinds: their scores tie
    ids = [str(number) for number in generator.permutation(5000)]
    expected = exact_search(queries.astype(dtype), documents.astype(dtype), k)
    tied = exact_search(whole[:50], whole, k, document_ids=ids)
    monkeypatch.setattr(exact, "DOCUMENT_BLOCK", 1500)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            scores, columns = exact_search(
                queries.astype(dtype), documents.astype(dtype), k, device=GPU
            )
            found = exact_search(whole[:50], whole, k, document_ids=ids, device=GPU)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    np.testing.assert_allclose(scores, expected[0], rtol=0, atol=1e-6)
    similarity = np.take_along_axis(
        queries.astype(dtype).astype(float) @ documents.astype(dtype).T, columns, 1
    )
    np.testing.assert_allclose(similarity, scores, rtol=0, atol=1e-6)
    for ours, theirs in zip(found, tied):
        np.testing.assert_array_equal(ours, theirs)


def test_a_model_on_the_gpu_is_evaluated_there(
    model: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = RetrievalEvaluator(pairs=PairDataset(TEXTS, [text[::-1] for text in TEXTS]))
    expected = evaluator(model.cpu().eval())
    monkeypatch.setattr(exact, "_search_by_faiss", lambda *_: pytest.fail("searched on the CPU"))
    assert evaluator(model.to(GPU)) == pytest.approx(
        expected, abs=0.02
    )  # a rank or two, where scores nearly tie
