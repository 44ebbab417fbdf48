"""A model in MTEB scores what our own evaluation scores, and each input goes where its type says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dualenc.cli import main
from dualenc.encoders import TextEncoder, VectorEncoder, load_model
from dualenc.errors import DualencError
from dualenc.evaluation.mteb import MTEBEncoder
from dualenc.files import write_json
from dualenc.reading import read_json
from dualenc.types import Side
from tests.commands import toy

mteb = pytest.importorskip("mteb", reason="mteb is not installed; pip install mteb")

from datasets import Dataset  # noqa: E402
from mteb.types import PromptType  # noqa: E402

from tests.evaluation.mteb_tasks import retrieval_task, text_task  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.text_model(tmp_path_factory.mktemp("models") / "texts")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.image_text_model(tmp_path_factory.mktemp("models") / "clip")


def scores_of(model: Any, task: Any) -> dict[str, float]:
    """What mteb reports, which it rounds to five places."""
    results = mteb.evaluate(model, task, cache=None, show_progress_bar=False)
    scores: dict[str, float] = results.task_results[0].scores["test"][0]
    return scores


@pytest.mark.slow
def test_texts_score_as_in_our_evaluation_and_as_through_sentence_transformers(
    text_model: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    data = toy.write_beir(tmp_path / "beir", documents=120, queries=30)
    words = ["evaluate", "retrieval", str(text_model), str(data), "--out", str(tmp_path / "out"), "--keep-self-matches"]
    assert main(words) == 0
    ours = json.loads((tmp_path / "out" / "metrics.json").read_text())["systems"][text_model.name]["mean"]
    theirs = scores_of(MTEBEncoder(text_model), text_task(data))
    assert 0.05 < ours["ndcg@10"] < 0.95
    for name in ("ndcg@10", "recall@10", "recall@100", "map@100"):
        assert theirs[name.replace("@", "_at_")] == pytest.approx(round(ours[name], 5), abs=1e-6), name
    through_them = scores_of(SentenceTransformer(str(text_model), device="cpu"), text_task(data))
    assert through_them["ndcg_at_10"] == pytest.approx(theirs["ndcg_at_10"], abs=1e-6)


@pytest.mark.slow
def test_images_and_texts_score_as_in_our_evaluation(clip: Path, tmp_path: Path) -> None:
    """24 images with two captions each, images among captions and captions among images."""
    data = tmp_path / "data"
    data.mkdir()
    toy.save_images(data / "pictures", 24)
    captions = [[f"{' '.join(toy.WORDS[(i + k) % 12] for k in range(4))} {i}", f"plain {i}"] for i in range(24)]
    rows = [{"image": f"pictures/{i:02d}.png", "captions": own} for i, own in enumerate(captions)]
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["evaluate", "image-text", str(clip), str(data), "--out", str(tmp_path / "out")]) == 0
    ours = json.loads((tmp_path / "out" / "metrics.json").read_text())["metrics"]

    images = [Image.open(data / row["image"]) for row in rows]  # type: ignore[arg-type]
    pictures = Dataset.from_dict({"id": [f"i{i}" for i in range(24)], "image": images})
    texts = Dataset.from_dict(
        {"id": [f"t{i}-{k}" for i in range(24) for k in range(2)], "text": [text for own in captions for text in own]}
    )
    owner = {f"t{i}-{k}": {f"i{i}": 1} for i in range(24) for k in range(2)}
    owned = {f"i{i}": {f"t{i}-{k}": 1 for k in range(2)} for i in range(24)}
    to_image = scores_of(MTEBEncoder(clip), retrieval_task(texts, pictures, owner, "LocalToImage", category="t2i"))
    to_text = scores_of(MTEBEncoder(clip), retrieval_task(pictures, texts, owned, "LocalToText", category="i2t"))
    for k in (1, 5, 10):
        # One image answers a caption, so that its recall is the share of captions whose image was found.
        assert to_image[f"recall_at_{k}"] == pytest.approx(round(ours[f"text_to_image_recall@{k}"], 5), abs=1e-6)
        assert to_text[f"hit_rate_at_{k}"] == pytest.approx(round(ours[f"image_to_text_recall@{k}"], 5), abs=1e-6)
    # nDCG of the ranks, from the formula
    model = load_model(clip)
    with torch.no_grad():
        left = model("left", model.left.prepare([image.convert("RGB") for image in images])).numpy()
        right = model("right", model.right.prepare([text for own in captions for text in own])).numpy()
    scores = right.astype(np.float64) @ left.T.astype(np.float64)
    ranks = [1 + int((row > row[number // 2]).sum()) for number, row in enumerate(scores)]
    gains = [1 / np.log2(1 + rank) if rank <= 10 else 0.0 for rank in ranks]
    assert to_image["ndcg_at_10"] == pytest.approx(round(float(np.mean(gains)), 5), abs=1e-6)


def encode(
    model: MTEBEncoder, prompt_type: PromptType | None = None, *, name: str = "Some", **batch: Any
) -> np.ndarray:
    task: Any = SimpleNamespace(name=name, type="Retrieval")
    return model.encode([batch], task_metadata=task, prompt_type=prompt_type, show_progress_bar=False)


def test_queries_and_documents_take_their_own_towers_and_prompts() -> None:
    torch.manual_seed(0)
    model = load_model_with_two_towers()
    text = ["shock and flow"]
    with torch.no_grad():
        sides: dict[Side, np.ndarray] = {
            side: model(side, model.tower(side).prepare(text)).numpy() for side in ("left", "right")
        }
    assert not np.allclose(sides["left"], sides["right"], atol=0.01)
    wrapped = MTEBEncoder(model)
    np.testing.assert_allclose(encode(wrapped, PromptType.query, text=text), sides["left"], atol=1e-6)
    np.testing.assert_allclose(encode(wrapped, PromptType.document, text=text), sides["right"], atol=1e-6)
    np.testing.assert_allclose(encode(wrapped, text=text), sides["right"], atol=1e-6)
    np.testing.assert_allclose(encode(MTEBEncoder(model, side="left"), text=text), sides["left"], atol=1e-6)


def load_model_with_two_towers() -> TextEncoder:
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    prompts = {"query_prompt": "query: ", "document_prompt": "passage: "}
    return TextEncoder(config=config, tokenizer=toy._tokenizer(), shared=False, max_length=32, **prompts)


def test_a_prompt_of_the_task_comes_before_that_of_the_side(text_model: Path, tmp_path: Path) -> None:
    model = load_model(text_model)
    model.save(tmp_path / "model")
    path = tmp_path / "model" / "config_sentence_transformers.json"
    config = read_json(path)
    config["prompts"] |= {"SciFact-query": "shock ", "Retrieval-document": "lift "}
    write_json(path, config)
    wrapped, text = MTEBEncoder(tmp_path / "model"), ["heat of a plate"]

    def with_prompt(prompt: str) -> np.ndarray:
        with torch.no_grad():
            tokens = model.left.prepare.tokenizer([prompt + text[0]], return_tensors="pt")  # type: ignore[attr-defined]
            vector: np.ndarray = model.left(dict(tokens)).numpy()
        return vector

    for name, kind, prompt in [
        ("SciFact", PromptType.query, "shock "),
        ("NFCorpus", PromptType.query, "query: "),
        ("NFCorpus", PromptType.document, "lift "),
        ("SciFact", PromptType.query, "shock "),  # the model's own prompts have stayed
    ]:
        np.testing.assert_allclose(encode(wrapped, kind, name=name, text=text), with_prompt(prompt), atol=1e-6)


def test_an_item_of_text_and_image_is_the_sum_of_both(clip: Path) -> None:
    wrapped, pictures, texts = MTEBEncoder(clip), [Image.new("L", (40, 30), 90)] * 2, ["red 1", "blue 2"]
    both = encode(wrapped, PromptType.query, text=texts, image=pictures)
    total = encode(wrapped, text=texts) + encode(wrapped, image=pictures)
    np.testing.assert_allclose(both, total / np.linalg.norm(total, axis=1, keepdims=True), atol=1e-6)


def test_shorter_vectors_and_similarities(text_model: Path) -> None:
    whole, short = (encode(MTEBEncoder(text_model, dim=dim), text=["drag", "lift", "jet"]) for dim in (None, 8))
    assert (whole.shape, short.shape) == ((3, 32), (3, 8))
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, atol=1e-6)
    wrapped = MTEBEncoder(text_model)
    cosines = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in 2 * whole] for a in 3 * whole])
    np.testing.assert_allclose(wrapped.similarity(3 * whole, 2 * whole).numpy(), cosines, atol=1e-6)
    np.testing.assert_allclose(wrapped.similarity_pairwise(3 * whole, whole).numpy(), np.diag(cosines), atol=1e-6)


@pytest.mark.slow
def test_results_of_another_model_in_the_same_folder_are_not_taken_from_the_cache(tmp_path: Path) -> None:
    data, cache = toy.write_beir(tmp_path / "beir", documents=60, queries=12), mteb.ResultCache(tmp_path / "cache")
    found = []
    for seed in (0, 1, 1):
        toy.text_model(tmp_path / "run" / "model", seed=seed)
        model = MTEBEncoder(tmp_path / "run" / "model")
        assert model.mteb_model_meta.name == "run/model"
        results = mteb.evaluate(model, text_task(data), cache=cache, show_progress_bar=False)
        found.append((model.mteb_model_meta.revision, results.task_results[0].scores["test"][0]["main_score"]))
    assert found[0] != found[1] == found[2]
    assert len(list((tmp_path / "cache").rglob("LocalTexts.json"))) == 2


def test_the_protocol_is_met(text_model: Path, clip: Path) -> None:
    from mteb.models import EncoderProtocol

    assert isinstance(MTEBEncoder(text_model), EncoderProtocol)
    assert MTEBEncoder(text_model).mteb_model_meta.modalities == ["text"]
    assert MTEBEncoder(clip).mteb_model_meta.modalities == ["text", "image"]


def test_mistakes_are_told(text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DualencError, match="takes vectors"):
        MTEBEncoder(VectorEncoder(input_dim=8))
    with pytest.raises(DualencError, match="dim is 64: give 1 to 32"):
        MTEBEncoder(text_model, dim=64)
    with pytest.raises(DualencError, match="side is 'middle'"):
        MTEBEncoder(text_model, side="middle")  # type: ignore[arg-type]
    with pytest.raises(DualencError, match="task Some has image, and the model takes text"):
        encode(MTEBEncoder(text_model), image=[Image.new("RGB", (8, 8))])
    with pytest.raises(DualencError, match="precision is 'int8'"):
        MTEBEncoder(text_model).encode([], task_metadata=SimpleNamespace(name="Some"), precision="int8")  # type: ignore[arg-type]
    with pytest.raises(DualencError, match="absent"):
        MTEBEncoder(tmp_path / "absent")
    monkeypatch.setitem(sys.modules, "mteb.models", None)
    with pytest.raises(DualencError, match="pip install 'dualenc"):
        MTEBEncoder(text_model)
