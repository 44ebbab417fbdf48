"""A text is not a list of ids, names or texts: refused in one line, or taken as one of several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.data import Corpus, PairDataset, open_corpus
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import train_tokenizer
from dualenc.errors import DualencError, nearest
from dualenc.evaluation.corruptions import read_corrupted
from dualenc.evaluation.retrieval import retrieve
from dualenc.evaluation.zero_shot import class_prompts
from dualenc.recipe.resolve import read_recipe
from dualenc.search import Index
from dualenc.search.index import change
from dualenc.search.lexical import Lexical
from dualenc.search.where import parse_conditions

VECTORS = np.eye(2, 4, dtype=np.float32)
IDS = ["a", "b"]

REFUSED: list[Callable[[], Any]] = [
    lambda: Embeddings("ab", VECTORS),
    lambda: Embeddings(IDS, VECTORS).rows_of("ab"),
    lambda: Index.build(VECTORS, "ab", "Flat", recall_queries=0),
    lambda: Corpus("ab", ["x", "y"]),
    lambda: Corpus(IDS, "xy"),
    lambda: PairDataset("ab", ["x", "y"]),
    lambda: retrieve("ab", VECTORS, IDS, VECTORS),
    lambda: retrieve(IDS, VECTORS, "ab", VECTORS),
    lambda: class_prompts("cat"),
    lambda: train_tokenizer("some text", 300),
    lambda: Lexical.build("some text"),
]


@pytest.mark.parametrize("call", REFUSED)
def test_a_text_alone_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(
        DualencError, match=r"is one text, not a list of texts; give \[|is of type str; give a list"
    ):
        call()


def test_removing_takes_a_list_of_ids(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    vectors = np.eye(15, 16, dtype=np.float32)
    Index.build(
        vectors, [str(number) for number in range(15)], "Flat", folder=folder, recall_queries=0
    )
    with pytest.raises(
        DualencError, match=r"^ids: '12' is one text, not a list of texts; give \['12'\]$"
    ):
        change.remove(folder, "12")
    assert len(Index.open(folder)) == 15
    assert "12" not in list(change.remove(folder, ["12"]).ids)


def test_a_text_alone_is_one_of_several_where_that_is_natural(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,text,tags\na,one,red\n")
    columns = open_corpus(tmp_path / "x.csv", columns="tags").columns
    assert columns is not None
    assert columns.column_names == ["tags"]
    assert parse_conditions("year>=2020", {"year": "integer"}) == parse_conditions(
        ["year>=2020"], {"year": "integer"}
    )
    assert class_prompts(["cat"], "a {}") == ["a cat"]
    (tmp_path / "r.yaml").write_text("model: {class_path: TextEncoder}\n")
    with pytest.raises(DualencError, match="nonsense"):
        read_recipe(tmp_path / "r.yaml", "nonsense.key=3")
    (tmp_path / "c").mkdir()
    np.save(tmp_path / "c" / "fog.npy", np.zeros((5, 32, 32, 3), np.uint8))
    np.save(tmp_path / "c" / "labels.npy", np.zeros(5, np.int64))
    assert read_corrupted(tmp_path / "c", "fog").corruptions == ("fog",)


@pytest.mark.parametrize(
    ("word", "names", "suggested"),
    [
        ("question", ["response", "q"], ""),
        ("positive", ["passage"], ""),
        ("quetion", ["question", "answer"], "question"),
        ("doc", ["document"], "document"),
        ("Query", ["query"], "query"),
        ("lr", ["learning_rate"], "learning_rate"),
    ],
)
def test_only_names_that_are_alike_are_suggested(
    word: str, names: list[str], suggested: str
) -> None:
    assert nearest(word, names) == (f" (did you mean {suggested}?)" if suggested else "")
