"""Each fault of stored vectors is alarmed and named; without one there is no alarm."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import pytest
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

import dualenc
from dualenc.encoders import TextEncoder, load_model
from dualenc.encoders.text import TextPrepare
from dualenc.errors import BelowTarget, DualencError
from dualenc.io.provenance import Provenance
from dualenc.search import Embeddings, Index
from dualenc.search.index.open import write_contents
from dualenc.search.texts import write_texts
from dualenc.workflows.check_vectors import CheckResult, check
from tests.helpers import toy
from tests.helpers.checked import (
    documents,
    encoded,
    finding,
    names,
    recorded,
    save_embeddings,
    save_index,
)
from tests.helpers.embeddings_on_disk import on_disk
from tests.helpers.folder_contents import contents
from tests.helpers.started_migration import new_vectors, started

pytestmark = pytest.mark.slow

TEXTS = documents(300)


class Made(NamedTuple):
    """A model, its vectors of `TEXTS`, and an index of them."""

    model: Path
    encoder: TextEncoder
    vectors: np.ndarray
    about: dict[str, Any]
    index: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("check")
    model = toy.text_model(folder / "model")
    encoder = load_model(model)
    assert isinstance(encoder, TextEncoder)
    vectors = encoded(encoder.right, TEXTS)
    about = recorded(model)
    return Made(model, encoder, vectors, about, save_index(folder / "i", vectors, TEXTS, about))


def alarmed(folder: Path, name: str, **options: Any) -> str:
    """The line of an alarm; nothing is written."""
    before = contents(folder)
    result = check(folder, **options)
    assert contents(folder) == before
    found = finding(result, name)
    assert found.state == "alarm", result.findings
    with pytest.raises(BelowTarget, match="alarm"):
        result.check()
    return found.line


def assert_clean(result: CheckResult) -> None:
    assert not result.alarms, result.alarms


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "IVF4,PQ8", "PQ8x4fs", "SQ8"])
def test_no_alarm_without_a_fault(made: Made, tmp_path: Path, factory: str) -> None:
    result = check(save_index(tmp_path / "index", made.vectors, TEXTS, made.about, factory))
    assert_clean(result)
    assert finding(result, "canaries").numbers["texts"] >= 224
    result.check()


def test_no_alarm_for_embeddings(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_embeddings(tmp_path / "emb", made.vectors, TEXTS, made.about)
    capsys.readouterr()
    result = check(folder)
    assert capsys.readouterr() == ("", "")
    assert_clean(result)
    assert finding(result, "recall").state == "skipped"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "IVF8,PQ8", ""])
def test_a_hundred_clean_sets(tmp_path: Path, factory: str, seed: int) -> None:
    """Other models, texts, sizes and precisions; also the queries are of one distribution."""
    random = np.random.default_rng(seed)
    model = toy.text_model(tmp_path / "model", seed)
    encoder = load_model(model)
    texts = documents(int(random.integers(300, 900)), seed)
    vectors = encoded(encoder.right, texts)
    if seed % 2:
        vectors = vectors.astype(np.float16).astype(np.float32)
    about = recorded(model)
    if not factory:
        assert_clean(check(save_embeddings(tmp_path / "emb", vectors, texts, about)))
        return
    folder = save_index(tmp_path / "index", vectors, texts, about, factory)
    kept, now = documents(300, 1000 + seed), documents(200, 2000 + seed)
    np.save(folder / "queries.npy", encoded(encoder.left, kept))
    table = tmp_path / "now.jsonl"
    table.write_text("".join(json.dumps({"text": text}) + "\n" for text in now))
    assert_clean(check(folder))
    result = check(folder, queries=table)
    assert_clean(result)
    assert finding(result, "drift").state == "ok"


@contextmanager
def other_prompt(encoder: TextEncoder, prompt: str) -> Iterator[None]:
    tower = encoder.right
    before = tower.prepare
    tower.prepare = TextPrepare(tower.parts, prompt, "document")
    yield
    tower.prepare = before


@pytest.mark.parametrize("factory", ["Flat", "IVF4,PQ8"])
@pytest.mark.parametrize(
    ("prompt", "line"),
    [("", "without the prompt 'passage: '"), ("query: ", "the prompt of the other side: ")],
)
def test_other_prompt(made: Made, tmp_path: Path, factory: str, prompt: str, line: str) -> None:
    with other_prompt(made.encoder, prompt):
        vectors = encoded(made.encoder.right, TEXTS)
    folder = save_index(tmp_path / "index", vectors, TEXTS, made.about, factory)
    assert line in alarmed(folder, "canaries")


@pytest.mark.parametrize(("mode", "name"), [("cls", "cls"), ("lasttoken", "last")])
def test_other_pooling(made: Made, tmp_path: Path, mode: str, name: str) -> None:
    tower = made.encoder.right
    before = tower.head
    tower.head = nn.Sequential(Pooling(32, mode))
    vectors = encoded(tower, TEXTS)
    tower.head = before
    folder = save_embeddings(tmp_path / "emb", vectors, TEXTS, made.about)
    assert f"{name} pooling instead of mean" in alarmed(folder, "canaries")


def test_truncated_texts(made: Made, tmp_path: Path) -> None:
    module = made.encoder.right.parts[0]
    module.max_seq_length, before = 32, module.max_seq_length
    vectors = encoded(made.encoder.right, TEXTS)
    module.max_seq_length = before
    folder = save_index(tmp_path / "index", vectors, TEXTS, made.about)
    assert "texts cut at 32 tokens instead of 64" in alarmed(folder, "canaries")


def test_other_weights_behind_the_same_name(made: Made, tmp_path: Path) -> None:
    model = toy.text_model(tmp_path / "model")
    folder = save_index(tmp_path / "index", made.vectors, TEXTS, recorded(model))
    assert_clean(check(folder))
    shutil.rmtree(model)
    toy.text_model(model, seed=1)
    assert "weights or settings are others than those recorded" in alarmed(folder, "canaries")
    # Beginnings of texts that are whole serve as well.
    shutil.rmtree(folder / "texts")
    assert "weights or settings are others than those recorded" in alarmed(folder, "canaries")
    # Without any text the checksum still tells.
    about = Provenance.from_entries({**recorded(made.model), "model": str(model)})
    Index.build(Embeddings(names(300), made.vectors, about), None, "Flat").save(tmp_path / "bare")
    line = alarmed(tmp_path / "bare", "canaries")
    assert "the model has another checksum than is recorded" in line


def test_weights_without_a_checksum(made: Made, tmp_path: Path) -> None:
    other = load_model(toy.text_model(tmp_path / "other", seed=1))
    vectors = encoded(other.right, TEXTS)
    about = {**made.about, "model_checksum": None}
    folder = save_index(tmp_path / "index", vectors, TEXTS, about, "IVF4,PQ8")
    assert "another model or other weights" in alarmed(folder, "canaries")
    assert_clean(check(folder, model=str(tmp_path / "other")))


def test_two_models_mixed(made: Made, tmp_path: Path) -> None:
    other = load_model(toy.text_model(tmp_path / "other", seed=1))
    vectors = made.vectors.copy()
    vectors[200:] = encoded(other.right, TEXTS[200:])
    folder = save_index(tmp_path / "index", vectors, TEXTS, made.about)
    line = alarmed(folder, "mixture")
    assert "mixed vectors" in line
    assert re.search(r"in rows 20\d to 299", line)


def test_a_part_with_another_prompt(made: Made, tmp_path: Path) -> None:
    vectors = made.vectors.copy()
    with other_prompt(made.encoder, ""):
        vectors[200:] = encoded(made.encoder.right, TEXTS[200:])
    folder = save_index(tmp_path / "index", vectors, TEXTS, made.about)
    assert "without the prompt" in alarmed(folder, "mixture")


def test_zero_and_not_finite_vectors(made: Made, tmp_path: Path) -> None:
    index = Index.open(made.index)
    vectors = made.vectors.copy()
    vectors[7], vectors[9, 3], vectors[11, 0] = 0, np.nan, np.inf
    # `embed` and `index` refuse them; here they are written as by a program that does not.
    flat = faiss.IndexFlatIP(32)
    flat.add(vectors)
    folder = tmp_path / "index"
    folder.mkdir()
    write_contents(folder, folder, flat, index.ids, TEXTS, None, index.provenance)
    assert alarmed(folder, "zero") == "1 of 300 vectors are zero; the first is that of 'd7'"
    assert "2 of 300 vectors are not finite; the first is that of 'd9'" in alarmed(folder, "finite")


def test_all_vectors_zero_or_of_another_dimension(made: Made, tmp_path: Path) -> None:
    result = check(save_embeddings(tmp_path / "zero", 0 * made.vectors, TEXTS, made.about))
    assert finding(result, "zero").state == "alarm"
    assert "all vectors of the texts are zero" in finding(result, "canaries").line
    wide = np.tile(made.vectors, 2)
    folder = save_embeddings(tmp_path / "wide", wide, TEXTS, {**made.about, "normalized": False})
    assert "the model gives 32 numbers and the vectors have 64" in alarmed(folder, "canaries")


def test_vectors_that_are_not_normalized(made: Made, tmp_path: Path) -> None:
    vectors = made.vectors.copy()
    vectors[250:] *= 3
    folder = save_embeddings(tmp_path / "emb", vectors, TEXTS, made.about)
    assert "50 of 300 vectors are not normalized: lengths 3 to 3" in alarmed(folder, "length")
    # Where the record does not ask for it, the canaries show that the model would.
    about = {**made.about, "normalized": False}
    folder = save_embeddings(tmp_path / "unknown", 3 * made.vectors, TEXTS, about)
    assert "not normalized: lengths 3 to 3" in alarmed(folder, "canaries")


def test_one_vector_under_many_texts(made: Made, tmp_path: Path) -> None:
    vectors = made.vectors.copy()
    vectors[100:112] = vectors[100]
    folder = save_index(tmp_path / "index", vectors, TEXTS, made.about)
    assert alarmed(folder, "duplicates") == "12 different texts have the same vector"


def test_one_text_under_many_ids_is_no_fault(made: Made, tmp_path: Path) -> None:
    texts, vectors = list(TEXTS), made.vectors.copy()
    texts[100:130], vectors[100:130] = [texts[100]] * 30, vectors[100]
    assert_clean(check(save_index(tmp_path / "index", vectors, texts, made.about)))


def test_ids_without_text(made: Made, tmp_path: Path) -> None:
    folder = save_index(tmp_path / "index", made.vectors, TEXTS, made.about)
    texts = ["" if row in (3, 5) else text for row, text in enumerate(TEXTS)]
    write_texts(folder, names(300), texts, Index.open(folder).items_checksum)
    assert alarmed(folder, "texts") == "2 of 300 ids have no text, such as 'd3'"


def test_texts_of_other_items(made: Made, tmp_path: Path) -> None:
    folder = save_index(tmp_path / "index", made.vectors, TEXTS, made.about)
    write_texts(folder, names(299), TEXTS[:299], "0")
    assert "is of other texts than the index" in alarmed(folder, "texts")


def test_an_id_twice(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    index = Index.open(made.index)
    ids = ["d0", *names(300)[:-1]]
    write_contents(folder, folder, index.faiss, ids, TEXTS, None, index.provenance)
    assert alarmed(folder, "ids") == "1 of 300 ids are repeated, such as 'd0'"


def test_counts_that_disagree(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.index, tmp_path / "index"))
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"count": 301}))
    assert "count is 301, but index.faiss has 300" in alarmed(folder, "opens")


def test_low_recall(made: Made, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(3000, 32)).astype(np.float32)
    about = {"side": "right", "modality": "text", "output": "embedding", "normalized": False}
    texts = documents(3000)
    index = save_index(tmp_path / "index", vectors, texts, about, "IVF64,Flat")
    assert finding(check(index), "recall").state == "ok"
    opened = faiss.read_index(str(index / "index.faiss"))
    opened.nprobe = 1
    part = tmp_path / "changed"
    part.mkdir()
    meta = Index.open(index).provenance
    write_contents(part, part, opened, names(3000), texts, None, meta)
    line = alarmed(part, "recall")
    assert "when built" in line
    assert finding(check(part), "recall").numbers["worst_tenth"] < 0.2


def test_drift_of_queries(made: Made, tmp_path: Path) -> None:
    folder = save_index(tmp_path / "index", made.vectors, TEXTS, made.about)
    random = np.random.default_rng(0)

    def queries(animals: bool, count: int) -> list[str]:
        return [
            " ".join(random.choice(toy.ANIMALS if animals else toy.WORDS, 4)) for _ in range(count)
        ]

    np.save(folder / "queries.npy", encoded(made.encoder.left, queries(True, 200)))
    same = tmp_path / "same.jsonl"
    same.write_text("".join(json.dumps({"text": each}) + "\n" for each in queries(True, 150)))
    assert finding(check(folder, queries=same), "drift").state == "ok"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": each}) + "\n" for each in queries(False, 150)))
    line = alarmed(folder, "drift", queries=other)
    assert "two-sample test p = 0.0005, level 0.001" in line


def test_drift_is_skipped_for_documents_as_queries(made: Made, tmp_path: Path) -> None:
    folder = save_index(tmp_path / "index", made.vectors, TEXTS, made.about)
    np.save(folder / "queries.npy", made.vectors[:100])
    np.save(tmp_path / "now.npy", made.vectors[:100] + 0.3)
    found = finding(check(folder, queries=tmp_path / "now.npy"), "drift")
    assert found.state == "skipped"
    assert "documents of the index" in found.line


def test_a_half_finished_swap(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.index, tmp_path / "index"))
    shutil.copytree(folder, tmp_path / ".index.part" / "old-index")
    assert "a killed process has left" in alarmed(folder, "swaps")
    assert (tmp_path / ".index.part" / "old-index").is_dir()


def test_a_swap_between_its_renames(made: Made, tmp_path: Path) -> None:
    """Opening the index puts it in place, as every command does; the alarm remains."""
    shutil.copytree(made.index, tmp_path / ".index.part" / "new-index")
    shutil.copytree(made.index, tmp_path / ".index.part" / "old-index")
    assert finding(check(tmp_path / "index"), "swaps").state == "alarm"


def test_unfinished_embeddings(made: Made, tmp_path: Path) -> None:
    folder = save_embeddings(tmp_path / "emb", made.vectors, TEXTS, made.about)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"complete": False}))
    assert "not finished" in alarmed(folder, "swaps")


def test_a_half_finished_migration(tmp_path: Path) -> None:
    migration = started(tmp_path, "Flat")
    assert finding(check(tmp_path / "index"), "migration").line.endswith("has only measured")
    on_disk(migration.work / "embeddings-35", new_vectors()[:35])
    line = alarmed(tmp_path / "index", "migration")
    assert "half migrated to new model: 35 vectors are embedded; finish: dualenc migrate" in line
    (migration.work / "plan.json").write_text(
        '{"format": "dualenc migration", "ended": "finished"}'
    )
    assert "a killed process has left" in alarmed(tmp_path / "index", "migration")


def test_a_work_folder_that_is_gone(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.index, tmp_path / "index"))
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"mapped": 120}))
    result = check(folder)
    assert "120 vectors are mapped" in finding(result, "migration").line
    assert finding(result, "canaries").state == "skipped"


def test_a_model_that_is_gone_is_skipped(made: Made, tmp_path: Path) -> None:
    about = {**made.about, "model": str(tmp_path / "gone")}
    folder = save_index(tmp_path / "index", made.vectors, TEXTS, about)
    found = finding(check(folder), "canaries")
    assert found.state == "skipped"
    assert "is gone; name its new place with --model" in found.line
    with pytest.raises(DualencError, match="gone"):
        check(folder, model=str(tmp_path / "gone"))


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(DualencError, match="neither an index nor embeddings"):
            dualenc.check(folder)


def test_a_corrupt_file_is_an_alarm(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.index, tmp_path / "index"))
    os.truncate(folder / "index.faiss", 1000)
    assert "index.faiss" in alarmed(folder, "opens")
