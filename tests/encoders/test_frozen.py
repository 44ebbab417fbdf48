"""Encoders of queries over an index: maps as modules, folders, training, interpolation,
refusals."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn import functional as F

from dualenc.data.pairs import PairDataset
from dualenc.encoders import (
    ImageEncoder,
    IndexEncoder,
    TextEncoder,
    VectorEncoder,
    interpolate,
    load_model,
    with_map,
)
from dualenc.encoders.vector import VectorTower
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.objectives import InfoNCE
from dualenc.training.trainer import Trainer
from dualenc.types import Inputs
from tests.helpers.fakes import same

VECTORS = np.random.default_rng(0).normal(size=(7, 32)).astype(np.float32) * 3


def facts(**changes: Any) -> Provenance:
    """Facts about the documents of an index."""
    known = {
        "model": "me/base",
        "model_checksum": "ab12",
        "side": "right",
        "dim": 32,
        "metric": "cosine",
    }
    return Provenance.from_entries({**known, **changes})


def shaken(tower: VectorTower) -> VectorTower:
    """With random weights: new ones are zeros and identities."""
    torch.manual_seed(1)
    for weight in tower.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return tower


def rows(vectors: np.ndarray = VECTORS) -> Inputs:
    return {"vector": torch.from_numpy(vectors)}


@pytest.fixture
def text(text_encoder: Any) -> TextEncoder:
    torch.manual_seed(0)
    return text_encoder(query_prompt="ask: ", document_prompt="say: ")


@pytest.mark.parametrize("dim", [32, 5])
def test_dense_and_its_modules_are_the_formula_which_begins_as_the_identity(dim: int) -> None:
    new = VectorTower("dense", 32, 32, 9)
    torch.testing.assert_close(
        new(rows()), F.normalize(torch.from_numpy(VECTORS)), atol=1e-6, rtol=0
    )
    tower = shaken(VectorTower("dense", 32, dim, 9))
    w = {name.removeprefix("map."): weight.double() for name, weight in tower.state_dict().items()}
    x = math.sqrt(32) * F.normalize(torch.from_numpy(VECTORS).double())
    z = x @ w["up.weight"].T + w["up.bias"]
    gelu = z * (1 + torch.erf(z / math.sqrt(2))) / 2
    skip = x if dim == 32 else x @ w["skip.weight"].T
    wanted = F.normalize(skip + gelu @ w["down.weight"].T + w["down.bias"])
    torch.testing.assert_close(tower(rows()).double(), wanted, atol=1e-6, rtol=0)
    modules = torch.nn.Sequential(*tower.as_modules())
    mapped = modules({"sentence_embedding": torch.from_numpy(VECTORS)})["sentence_embedding"]
    torch.testing.assert_close(mapped.double(), wanted, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "linear"])
def test_a_mapped_minilm_opens_in_sentence_transformers(
    minilm: Path, texts: list[str], tmp_path: Path, kind: Any
) -> None:
    base = TextEncoder(str(minilm), query_prompt="query: ")
    tower = shaken(VectorTower(kind, 384, 384, 64))
    model = IndexEncoder(with_map(base, tower), facts(dim=384))
    expected = tower(rows(base.encode_query(texts))).detach().numpy()
    model.save(tmp_path / "model")
    other = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(texts)
    for queries in (
        model.encode_query(texts),
        other,
        load_model(tmp_path / "model").encode_query(texts),
    ):
        np.testing.assert_allclose(queries, expected, atol=1e-5)


@pytest.mark.parametrize("prompt", ["ask: ", ""])
def test_a_text_folder_keeps_all(
    text_encoder: Any, texts: list[str], tmp_path: Path, prompt: str
) -> None:
    model = IndexEncoder(text_encoder(query_prompt=prompt, shared=False), facts())
    model.trained_ids = ["7", "é"]
    model.prompts = {"web_query": "web: "}
    queries = model.encode_query(texts)
    model.save(tmp_path / "one", card={"license": "apache-2.0"})
    again: Any = load_model(tmp_path / "one")
    assert (again.documents, again.trained_ids) == (facts(), ["7", "é"])
    other = SentenceTransformer(str(tmp_path / "one"), device="cpu")
    assert (other.default_prompt_name, other.prompts["web_query"]) == (
        "query" if prompt else None,
        "web: ",
    )
    np.testing.assert_allclose(again.encode_query(texts), other.encode(texts), atol=1e-5)
    for loaded in (again, TextEncoder(str(tmp_path / "one"))):
        assert np.array_equal(loaded.encode_query(texts), queries)
    again.save(tmp_path / "two" / "one", card={"license": "apache-2.0"})
    for name in (
        "README.md",
        "dualenc.json",
        "trained_documents.json",
        "modules.json",
        "model.safetensors",
    ):
        assert (tmp_path / "two" / "one" / name).read_bytes() == (
            tmp_path / "one" / name
        ).read_bytes(), name


@pytest.mark.parametrize("kind", ["dense", "linear", "mlp", "identity"])
def test_a_vector_folder_keeps_all(tmp_path: Path, kind: Any) -> None:
    size = 32 if kind == "identity" else 20
    queries = VectorEncoder(
        size, tower=kind, dim=32, hidden=9, right_tower="linear", right_input_dim=32
    )
    shaken(queries.left)
    model = IndexEncoder(queries, facts(model=None, model_checksum=None, metric="ip"))
    assert model.num_parameters == sum(weight.numel() for weight in queries.left.parameters())
    model.trained_ids = ["7"]
    model.save(tmp_path / "model")
    again: Any = load_model(tmp_path / "model")
    assert (again.documents, again.trained_ids) == (model.documents, ["7"])
    items: Any = VECTORS[:, :size]
    assert np.array_equal(again.encode_query(items), model.encode_query(items))
    unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    np.testing.assert_allclose(again.encode(VECTORS, "right"), unit, atol=1e-6)


def test_queries_are_cut_to_an_index_of_first_components(
    text: TextEncoder, texts: list[str], tmp_path: Path
) -> None:
    whole = text.encode_query(texts)[:, :12]
    expected = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    IndexEncoder(text, facts(dim=12)).save(tmp_path / "model")
    assert text.dim == 32
    np.testing.assert_allclose(
        load_model(tmp_path / "model").encode_query(texts), expected, atol=1e-6
    )


def test_a_map_to_another_size_is_that_of_both_sides(text: TextEncoder, texts: list[str]) -> None:
    tower = shaken(VectorTower("linear", 32, 40, None))
    mapped = with_map(text, tower)
    assert (mapped.dim, text.dim, mapped.shares_weights) == (40, 32, True)
    for side in ("left", "right"):
        expected = tower(rows(text.encode(texts, side))).detach().numpy()
        np.testing.assert_allclose(mapped.encode(texts, side), expected, atol=1e-6)
    same_size = with_map(text, VectorTower("dense", 32, 32, 4))
    np.testing.assert_array_equal(same_size.encode_document(texts), text.encode_document(texts))


@pytest.mark.parametrize("dim", [20, 40])
def test_a_map_of_the_first_components(
    text: TextEncoder, texts: list[str], tmp_path: Path, dim: int
) -> None:
    """Of an index of cut vectors: both sides are cut, scaled to length one and, where the size
    changes, mapped."""
    tower = shaken(VectorTower("dense", 20, dim, 9))
    mapped = with_map(text, tower)
    queries, documents = (
        F.normalize(torch.from_numpy(text.encode(texts, side)[:, :20]))
        for side in ("left", "right")
    )
    expected = documents if dim == 20 else tower({"vector": documents}).detach()
    np.testing.assert_allclose(mapped.encode_document(texts), expected, atol=1e-6)
    IndexEncoder(mapped, facts(dim=dim)).save(tmp_path / "model")
    for model in (mapped, load_model(tmp_path / "model")):
        np.testing.assert_allclose(
            model.encode_query(texts), tower({"vector": queries}).detach(), atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"chunk_size": 2}, {"weight_average": 0.9}])
@pytest.mark.parametrize("kind", ["text", "vector"])
def test_training_moves_queries_alone_and_resumes_bit_for_bit(
    text_encoder: Any, tmp_path: Path, changes: dict[str, Any], kind: Any
) -> None:
    items: Any = list("dcbsgk") if kind == "text" else list(VECTORS[:6, ::-1].copy())
    right_id = [0, 2, 3, 4, 5, 6]
    pairs = PairDataset(
        items, list(VECTORS), None, right_id, left_modality=kind, right_modality="vector"
    )

    def untrained() -> IndexEncoder:
        torch.manual_seed(0)
        return IndexEncoder(
            text_encoder() if kind == "text" else VectorEncoder(32, tower="dense"), facts()
        )

    def train(output: str, fails_at: int = 0, resume: bool = False) -> dict[str, torch.Tensor]:
        objective = InfoNCE(num_left=6, num_right=7)
        calls = itertools.count(1)
        objective.register_forward_pre_hook(lambda *_: 1 / 0 if next(calls) == fails_at else None)
        settings = {
            "batch_size": 3,
            "max_steps": 3,
            "save_every": 1,
            "progress": False,
            "learning_rate": 0.01,
        }
        Trainer(output=tmp_path / output, **settings, **changes).fit(
            untrained(), pairs, objective, resume=resume
        )
        return load_model(tmp_path / output / "model").state_dict()

    whole = train("whole")
    with pytest.raises(ZeroDivisionError):
        train("broken", fails_at=3)
    resumed = train("broken", resume=True)
    assert same(whole, resumed)
    assert not same(whole, untrained().state_dict())
    assert all(name.startswith("left.") for name in whole)


def test_interpolation_is_the_straight_line_between_weights(
    text_encoder: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'dualenc[lora]'")
    text_encoder().save(tmp_path / "base")
    original = IndexEncoder(TextEncoder(str(tmp_path / "base")), facts())
    adapted = IndexEncoder(
        TextEncoder(str(tmp_path / "base"), lora_rank=2, lora_targets=["query"]), facts()
    )
    for weight in adapted.parameters():
        torch.nn.init.normal_(weight)
    state = interpolate(original, adapted, 0.25)
    assert state.keys() == original.state_dict().keys()
    weights = {}
    for name, weight in adapted.state_dict().items():  # which still has the adapters
        weights[name.replace("base_layer.", "")] = weight
    for name, first in original.state_dict().items():
        last = weights[name]
        layer = name.removesuffix("weight")
        if f"{layer}lora_A.default.weight" in weights:  # W + 2·BA
            last = (
                last
                + 2
                * weights[f"{layer}lora_B.default.weight"]
                @ weights[f"{layer}lora_A.default.weight"]
            )
        torch.testing.assert_close(state[name], 0.25 * first + 0.75 * last, atol=1e-5, rtol=0)
    assert len(weights) == len(state) + 4
    counted = torch.nn.BatchNorm1d(2)
    counted.num_batches_tracked = torch.tensor(5)
    assert interpolate(torch.nn.BatchNorm1d(2), counted, 0.5)["num_batches_tracked"] == 5
    with pytest.raises(DualencError, match="differ in bias"):
        interpolate(torch.nn.BatchNorm1d(3), counted, 0.5)
    with pytest.raises(DualencError, match="keep is nan"):
        interpolate(counted, counted, math.nan)


def test_parts_that_do_not_fit_are_refused(text: TextEncoder, text_encoder: Any) -> None:
    with pytest.raises(
        DualencError, match="documents are the vectors of the index; embed new ones with me/base"
    ):
        IndexEncoder(text, facts()).encode_document(["a text"])
    with pytest.raises(
        DualencError, match="index holds vectors of 40 numbers, but the query model gives 32"
    ):
        IndexEncoder(text, facts(dim=40))
    with pytest.raises(DualencError, match=r"vectors of 32 numbers.* gives 4"):
        IndexEncoder(ImageEncoder("test_resnet", image_size=32, projector_dim=4), facts())
    with pytest.raises(DualencError, match="kind mlp cannot be written"):
        with_map(text, VectorTower("mlp", 32, 32, 4))
    with pytest.raises(DualencError, match="truncates its vectors to 12 numbers"):
        with_map(text_encoder(truncate_dim=12), VectorTower("linear", 12, 12, None))
    with pytest.raises(
        DualencError, match="takes vectors of 40 numbers, but the text model gives 32"
    ):
        with_map(text, VectorTower("linear", 40, 32, None))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("trained_documents.json", None, "trained_documents.json: no such file"),
        ("trained_documents.json", {"ids": "7"}, "'ids' is a string, not a list"),
        ("trained_documents.json", {"ids": ["7", 10**400]}, "ids must be strings"),
        ("dualenc.json", {"documents": []}, "'documents' is a list"),
        ("dualenc.json", {"documents": {"model": None}}, "documents: lacks 'dim'"),
        (
            "dualenc.json",
            {"documents": facts(dim="32").entries()},
            "'dim' is a string, not an integer",
        ),
        (
            "dualenc.json",
            {"documents": facts(dim=10**400).entries()},
            "dualenc.json: input_dim is 1000",
        ),
        (
            "dualenc.json",
            {"documents": facts(metric="l2").entries()},
            "'metric' is 'l2', not cosine or ip",
        ),
        ("dualenc.json", {"queries": "vector"}, "queries.dualenc.json: no such file"),
    ],
)
def test_corrupted_folders_are_refused_in_one_line(
    text: TextEncoder, tmp_path: Path, file: str, content: Any, message: str
) -> None:
    IndexEncoder(text, facts()).save(tmp_path / "model")
    path = tmp_path / "model" / file
    changed = json.dumps({**json.loads(path.read_text()), **(content or {})})
    path.unlink()
    if content is not None:
        path.write_text(changed)
    with pytest.raises(DualencError, match=message) as caught:
        load_model(tmp_path / "model")
    assert "\n" not in str(caught.value)
