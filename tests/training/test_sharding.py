"""Ranks that hold a part of the model each train the model that one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualenc.data.pairs import PairDataset
from dualenc.encoders import TextEncoder, load_model, train_tokenizer
from dualenc.objectives import ISIR, InfoNCE, SogCLR
from dualenc.training.trainer import Trainer
from tests.training.launched import launch

pytestmark = pytest.mark.slow

WORDS = "a dog runs over the green grass two cats sit on very long sofa in evening reading book nobody ever".split()
LEFT = [" ".join(WORDS[(3 * i + j) % len(WORDS)] for j in range(1 + i % 5)) for i in range(24)]
RIGHT = [" ".join(WORDS[(3 * i + 2 * j) % len(WORDS)] for j in range(2 + i % 9)) for i in range(24)]

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
ADAPTED = {"config": LLAMA, "pooling": "last", "lora_rank": 2}

CASES: dict[str, dict[str, Any]] = {
    "InfoNCE": {},
    "SogCLR, cached": {"objective": SogCLR, "chunk_size": 2},
    "ISIR": {"objective": ISIR},
    "ISIR, adapters": {"objective": ISIR, "encoder": ADAPTED, "optimizer": "adamw", "learning_rate": 0.01},
}
SETTINGS = {
    "batch_size": 6,
    "epochs": 2,
    "learning_rate": 0.3,
    "optimizer": "sgd",
    "save_every": None,
    "progress": False,
}


def text_pairs(**arguments: Any) -> PairDataset:
    return PairDataset(LEFT, RIGHT, **arguments)


def text_encoder(**arguments: Any) -> TextEncoder:
    tokenizer = train_tokenizer([*LEFT, *RIGHT], vocab_size=300)
    torch.manual_seed(0)
    return TextEncoder(**{"config": BERT, "tokenizer": tokenizer, **arguments})


def one_case(output: Path, objective: Any = InfoNCE, encoder: dict[str, Any] | None = None, **changes: Any) -> None:
    pairs, model = text_pairs(), text_encoder(**(encoder or {}))
    loss = objective(num_left=24, num_right=24, temperature=0.1, learnable_temperature=True)
    Trainer(output=output, **{**SETTINGS, **changes}).fit(model, pairs, loss)


def all_cases(output: Path) -> None:
    for name, changes in CASES.items():
        print(name, flush=True)
        one_case(output / name, shard_model=True, **changes)


def embeddings(output: Path) -> Tensor:
    model = load_model(output / "model")
    with torch.no_grad():
        return torch.cat(
            [model.encode(side, model.tower(side).prepare(texts)) for side, texts in (("left", LEFT), ("right", RIGHT))]
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every case with one process, with two and with three."""
    folder = tmp_path_factory.mktemp("runs")
    for number in (2, 3):
        (folder / str(number)).mkdir()
        ranks = launch(folder / str(number), all_cases, folder / str(number), ranks=number)
        ended = [process.end(300) for process in ranks]
        assert [code for code, _ in ended] == [0] * number, ended[0][1][-3000:] + ended[1][1][-3000:]
    for name, changes in CASES.items():
        one_case(folder / "1" / name, **changes)
    return folder


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_the_model_is_that_of_one_process(runs, name, ranks):
    one = embeddings(runs / "1" / name)
    several = embeddings(runs / str(ranks) / name)
    print(name, ranks, (one - several).abs().max())
    assert (one - several).abs().max() < 1e-5
