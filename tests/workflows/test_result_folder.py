"""The folder of a task's results is checked before the work and written at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualenc.errors import DualencError
from dualenc.evaluation.report_page import Table
from dualenc.workflows import result_folder
from dualenc.workflows.result_folder import check_result_folder, write_results


def check(folder: Path, task: str = "probe") -> None:
    check_result_folder(folder, task, f"evaluation of {task}", lambda path: False)


def write(folder: Path) -> None:
    folder.mkdir()
    rows = Table("Probes", [{"probe": "1-NN", "accuracy": 0.5}])
    write_results(folder, "A probe", "probe", {"model": "m"}, {"accuracy": 0.5}, [rows])


def test_results_are_written_again_by_their_task_alone(tmp_path: Path) -> None:
    check(tmp_path / "new")
    write(tmp_path / "out")
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics == {"task": "probe", "model": "m", "accuracy": 0.5}
    assert "A probe" in (tmp_path / "out" / "report.html").read_text()
    check(tmp_path / "out")
    with pytest.raises(DualencError, match="holds no evaluation of retrieval"):
        check(tmp_path / "out", "retrieval")


def test_a_folder_that_is_left_without_its_page_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(result_folder, "write_report", fail)
    with pytest.raises(OSError):  # noqa: PT011
        write(tmp_path / "out")
    check(tmp_path / "out")


def test_what_an_interrupted_run_left_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "begun").touch()
    with pytest.raises(DualencError, match="holds no adaptation"):
        check_result_folder(tmp_path / "out", "adapt", "adaptation", lambda path: False)
    is_begun = lambda path: (path / "begun").is_file()  # noqa: E731
    check_result_folder(tmp_path / "out", "adapt", "adaptation", is_begun)
