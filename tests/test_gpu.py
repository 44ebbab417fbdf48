"""On a real GPU: what the CPU computes, and runs that resume bit for bit. DUALENC_TEST_GPU=1 shows the tests one."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualenc.data import PairDataset
from dualenc.data.corpus import Corpus
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.encoders.load import load_model
from dualenc.objectives import GlobalCache
from dualenc.training import Trainer
from dualenc.training.evaluators import embed_side
from tests.objectives.every import SETTINGS, Setting
from tests.objectives.test_device import KEEP_TABLES
from tests.objectives.test_device import train as train_plainly
from tests.training.fakes import TinyEncoder, same, weights
from tests.training.runs import train, train_and_die

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and DUALENC_TEST_GPU=1")
GPU = "cuda:0"


# A GPU's generator gives other numbers than that of a CPU.
DRAWING = ("EMC2", "GlobalCache", "ISIR", "NegativeCache")
EXACT = [s for s in SETTINGS if s.objective.__name__ not in DRAWING and "negatives" not in s.arguments]


@pytest.mark.parametrize("setting", EXACT, ids=lambda s: s.name)
def test_losses_are_those_of_the_cpu(setting: Setting) -> None:
    expected, _ = train_plainly(setting, "cpu")
    found, _ = train_plainly(setting, GPU)
    assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("setting", KEEP_TABLES, ids=lambda s: s.name)
def test_tables_in_cpu_memory_give_the_same_losses(setting: Setting) -> None:
    expected, _ = train_plainly(setting, GPU)
    found, _ = train_plainly(replace(setting, arguments=setting.arguments | {"state_device": "cpu"}), GPU)
    assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("settings", [{}, {"chunk_size": 2}, {"num_workers": 1}], ids=str)
def test_killed_and_resumed_equals_unbroken(tmp_path: Path, settings: dict[str, int]) -> None:
    train(tmp_path / "unbroken", **settings)
    # CUDA does not live through a fork.
    process = multiprocessing.get_context("spawn").Process(target=train_and_die, args=(tmp_path / "run", 6, settings))
    process.start()
    process.join()
    train(tmp_path / "run", model=TinyEncoder(dropout=0.2), resume=True, **settings)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "unbroken"))


WORDS = ["a", "few", "words", "that", "stand", "for", "all", "there", "are", "in", "the", "world", "of", "texts"]
TEXTS = [" ".join(np.random.default_rng(number).choice(WORDS, 6)) for number in range(64)]


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16"}, {"compile": True}], ids=str)
def test_a_text_encoder_is_trained_saved_and_loaded(tmp_path: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, 300, max_length=16)
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"intermediate_size": 64, "max_position_embeddings": 16, "vocab_size": len(tokenizer)}
    model, pairs = TextEncoder(config=config, tokenizer=tokenizer, max_length=16), PairDataset(TEXTS, TEXTS)
    trainer = Trainer(output=tmp_path, batch_size=8, epochs=4, learning_rate=1e-3, progress=False, **settings)
    objective = GlobalCache(temperature=0.1, num_left=pairs.num_left, num_right=pairs.num_right)
    result = trainer.fit(model, pairs, objective)
    assert next(model.parameters()).is_cuda
    corpus = Corpus([str(number) for number in range(len(TEXTS))], TEXTS)
    on_gpu, on_cpu = (
        embed_side(of, "left", corpus, 16).vectors for of in (model.eval(), load_model(result.model_folder).cpu())
    )
    np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-5)
