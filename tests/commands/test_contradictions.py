"""Options that would be without effect beside others are refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.in_process import failure

LINES = [
    ("index {ix} --verify", "--verify is now a separate command; use dualenc verify FOLDER"),
    ("index {ix} --verify --bm25", "use dualenc verify FOLDER"),
    ("index {ix} --remove ids.txt", "use dualenc remove INDEX IDS"),
    ("index emb --out {ix} --append", "use dualenc append INDEX MODEL DATA"),
    ("index model data.csv --out {ix} --append --factory Flat", "use dualenc append INDEX MODEL"),
    ("verify {ix} --remove ids.txt", "Unknown option: --remove"),
    ("verify {ix} --bm25", "Unknown option: --bm25"),
    ("verify {ix} --out {ix}", "Unknown option: --out"),
    ("verify {ix} data.csv", "Unused Tokens: ['data.csv']"),
    ("verify {ix} --factory Flat", "Unknown option: --factory"),
    ("verify {ix} --split test", "Unknown option: --split"),
    ("remove {ix} ids.txt --bm25", "Unknown option: --bm25"),
    ("remove {ix} ids.txt --append", "Unknown option: --append"),
    ("remove {ix} ids.txt --side left", "Unknown option: --side"),
    ("index {ix} --texts --metric ip", "an index without --out does not go with --metric"),
    ("append {ix} emb --factory Flat", "Unknown option: --factory"),
    ("append {ix} emb --queries emb", "Unknown option: --queries"),
    ("append {ix} emb --side left", "EMBEDDINGS without DATA does not go with --side"),
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
