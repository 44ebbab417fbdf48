"""What all tests share: one thread, no network, caches that vanish, and real data where it is at
hand."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before torch, datasets or transformers are imported: they read these once. A forked test waits
# forever for a second thread of its parent.
os.environ["OMP_NUM_THREADS"] = "1"
# Many tests fork, which CUDA does not live through; tests/test_gpu.py is for machines with a GPU.
if "DUALENC_TEST_GPU" in os.environ:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="dualenc-tests-")
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Wall-clock limits per example say nothing on a machine that does other work at the same time.
settings.register_profile(
    "dualenc",
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("dualenc")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose tests are all slow are not imported by the quick run: they bring the largest
    libraries."""
    if collection_path.suffix != ".py" or "not slow" not in config.option.markexpr:
        return None
    all_slow = re.search(
        r"^pytestmark = pytest\.mark\.(slow|nightly)$",
        collection_path.read_text("utf-8"),
        re.MULTILINE,
    )
    return True if all_slow else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nightly tests are slow ones, so that `-m "not slow"` is the quick run."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server of the tests' own that has pgvector."""
    from tests.helpers.postgres_server import running_server

    with running_server() as target:
        yield target


@pytest.fixture(scope="module")
def postgres(postgres_server: str) -> Iterator[str]:
    """The URL of a new database: files of tests do not see each other's tables."""
    from tests.helpers.postgres_server import new_database

    with new_database(postgres_server) as target:
        yield target


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a query-document model that knows the words of `toy`."""
    from tests.helpers import toy  # brings transformers, which not every test needs

    return toy.text_model(tmp_path_factory.mktemp("models") / "toy-text")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the real data sets: $DUALENC_TEST_DATA, or `../shared/data` beside the
    checkout."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("DUALENC_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(
            f"no real data at {folder}; "
            "set DUALENC_TEST_DATA to the folder that holds scifact, cifar10, …"
        )
    return folder
