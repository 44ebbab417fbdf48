"""`dualenc adapt --model OTHER`: the model of an index is gone, and another one learns its
queries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dualenc.encoders import IndexEncoder, load_model
from tests.helpers import toy
from tests.helpers.in_process import failure, found, run

pytestmark = pytest.mark.slow
NUM = 240


@pytest.fixture(scope="module")
def gone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of vectors of another size from a matrix; a model; texts that begin with titles."""
    folder = tmp_path_factory.mktemp("gone")
    random = np.random.default_rng(0)
    words = [f"{one}{two}" for one in toy.WORDS for two in toy.ANIMALS]
    meaning = random.normal(size=(len(words), 24)).astype(np.float32)
    lines, vectors = [], []
    for row in range(NUM):
        chosen = random.choice(len(words), 8, replace=False)
        text = " ".join(words[each] for each in chosen)
        title = " ".join(words[each] for each in chosen[:4])
        lines.append(json.dumps({"_id": f"d{row}", "text": f"{title}. {text}"}))
        vectors.append(meaning[chosen].sum(axis=0))
    (folder / "documents.jsonl").write_text("\n".join(lines))
    np.save(folder / "vectors.npy", np.array(vectors))
    run(
        *("index", folder / "vectors.npy", folder / "documents.jsonl", "--texts"),
        *("--out", folder / "index"),
    )
    toy.text_model(folder / "local")
    return folder


@pytest.mark.parametrize("train", ["perceptron", "linear", "lora", "all"])
def test_titles_teach_another_model(
    gone: Path, tmp_path: Path, train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out documents are found far better than by chance, whatever the sizes of the vectors."""
    run(
        *("adapt", gone / "index", "--model", gone / "local", "--out", tmp_path / "run"),
        *("--train", train, "--epochs", 2),
    )
    report = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert report["replaces the model of the index"] == str(gone / "local")
    (quality,) = report["quality"]
    assert quality["queries of"] == "new documents"
    # By chance the one of 240 documents is among the first ten in 4 of 100 cases.
    assert quality["adapted"] > 0.15
    model = load_model(tmp_path / "run" / "model")
    assert isinstance(model, IndexEncoder)
    assert model.left.dim == 24
    text = json.loads((gone / "documents.jsonl").read_text().splitlines()[5])["text"]
    hits = found(capsys, gone / "index", text, "--model", tmp_path / "run" / "model")
    assert len(hits) == 10


def test_adapters_that_are_not_kept_leave_the_original(gone: Path, tmp_path: Path) -> None:
    """With all of the original's weights nothing is trained, and its adapters are merged."""
    for train in ("lora", "all"):
        run(
            *("adapt", gone / "index", "--model", gone / "local", "--out", tmp_path / train),
            *("--train", train, "--held-out", 0, "--keep", 1),
        )
    models = [load_model(tmp_path / train / "model") for train in ("lora", "all")]
    vectors = [model.encode(["a text", "another"]) for model in models]
    np.testing.assert_allclose(*vectors, atol=1e-6)


def test_logs_take_part(gone: Path, tmp_path: Path) -> None:
    clicks = "".join(f"query {row % 50},d{row}\n" for row in range(100))
    (tmp_path / "clicks.csv").write_text(f"query,document\n{clicks}")
    run(
        *("adapt", gone / "index", tmp_path / "clicks.csv", "--model", gone / "local"),
        *("--out", tmp_path / "run", "--epochs", 1, "--train", "linear"),
    )
    report = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert report["pairs"] == NUM + 100
    assert "first sentences of 240 documents" in report["log"]


def test_what_is_refused(gone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", tmp_path / "run")
    assert "no log is named" in failure(capsys, "adapt", gone / "index", *out)
    run("index", gone / "vectors.npy", "--out", tmp_path / "bare")
    told = failure(capsys, "adapt", tmp_path / "bare", "--model", gone / "local", *out)
    assert "keeps no texts" in told
    assert "--texts" in told
    told = failure(
        capsys,
        *("adapt", gone / "index", "--model", gone / "local", *out, "--second", gone),
    )
    assert "--second needs the model of the index" in told
