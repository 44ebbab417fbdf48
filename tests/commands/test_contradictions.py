"""Options that would be without effect beside others are refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.in_process import failure

LINES = [
    ("index {ix} --verify --append", "--verify does not go with --append"),
    ("index {ix} --verify --remove ids.txt", "--verify does not go with --remove"),
    ("index {ix} --verify --bm25", "--verify does not go with --bm25"),
    ("index {ix} --verify --out {ix}", "--verify does not go with --out"),
    ("index {ix} data.csv --verify", "--verify does not go with DATA"),
    ("index {ix} --verify --factory Flat", "--verify does not go with --factory"),
    ("index {ix} --verify --split test", "--verify does not go with --split"),
    ("index {ix} --remove ids.txt --bm25", "--remove does not go with --bm25"),
    ("index {ix} --remove ids.txt --append", "--remove does not go with --append"),
    ("index {ix} --remove ids.txt --side left", "--remove does not go with --side"),
    ("index {ix} --bm25 --append", "an index without --out does not go with --append"),
    ("index {ix} --texts --metric ip", "an index without --out does not go with --metric"),
    ("index emb --out {ix} --append --factory Flat", "--append does not go with --factory"),
    ("index emb --out {ix} --append --queries emb", "--append does not go with --queries"),
    ("index emb --out {ix} --side left", "EMBEDDINGS without DATA does not go with --side"),
    ("index emb --out {ix} --text-column a", "EMBEDDINGS without DATA does not go with --text-col"),
    ("migrate {ix} --rollback --report-only", "--rollback does not go with --report-only"),
    ("migrate {ix} --rollback --data beir", "--rollback does not go with --data"),
    ("migrate {ix} model --report-only --anyway", "--report-only does not go with --anyway"),
    ("search {ix} query --weight 0.3", "--weight is for --hybrid; give both, or leave it out"),
    ("evaluate retrieval model beir --weight 0", "--weight is for --hybrid"),
    ("evaluate retrieval m {beir} --left-column a", "--left-column is for tables of pairs"),
    ("evaluate corrupted m data --train-limit 5", "--train-limit are for --train; name the images"),
    ("recipe --keys", "--keys is for one recipe; name it"),
]


@pytest.mark.parametrize(("line", "message"), LINES)
def test_options_without_effect_are_refused(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = tmp_path / "ix"
    index.mkdir()
    (index / "meta.json").write_text('{"format": "dualenc index"}')
    (tmp_path / "beir").mkdir()
    (tmp_path / "beir" / "corpus.jsonl").write_text('{"_id": "a", "text": "a"}\n')
    words = line.format(ix=index, beir=tmp_path / "beir").split()
    assert message in failure(capsys, *words)
    assert [path.name for path in index.iterdir()] == ["meta.json"]
