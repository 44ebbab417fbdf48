"""`dualenc push-model` and `push-data`: folders to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dualenc.errors import DualencError
from dualenc.files import atomic_path
from dualenc.reading import read_json_object
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.encoders.card import Results


def push_model(
    model: str,
    repo: str,
    *,
    results: list[str] | None = None,
    license: str | None = None,
    public: bool = False,
    revision: str | None = None,
    message: str = "Upload a model",
) -> None:
    """Upload a model folder to the Hugging Face hub, where its own library loads it by name.

    A new repository is private unless `public` is given; an existing one keeps its visibility. The folder's README.md
    becomes the model card, with the repository's name in its title and examples; `results` and `license` are first
    written into its front matter, where the hub reads them. Log in first with `hf auth login`, or set HF_TOKEN.

    Args:
        model: folder that training or `DualEncoder.save` wrote.
        repo: name of the repository, owner/name.
        results: folder that `dualenc evaluate retrieval`, `image-text` or `zero-shot` wrote for this model; may be
            repeated.
        license: of the weights, as the hub spells it: apache-2.0, mit, cc-by-nc-4.0; by default what the model card
            says, which is the base model's.
        public: make a new repository public.
        revision: branch to upload to; main by default.
        message: of the commit.
    """
    # Heavy libraries are imported in functions, so that help is instant.
    from dualenc.encoders import load_model
    from dualenc.encoders.card import with_metadata, with_repository, with_results
    from dualenc.encoders.dual import MODEL_FILES
    from dualenc.search.embed import tower_checksum

    folder = Path(model)
    if not any((folder / name).is_file() for name in MODEL_FILES):
        raise DualencError(f"{folder}: holds no model; name the folder that training wrote, such as runs/mine/model")
    _check_name(repo)
    path = folder / "README.md"
    card = path.read_text(encoding="utf-8") if path.is_file() else load_model(folder).model_card(folder.name, {})
    if results:
        encoder = load_model(folder)
        weights = {tower_checksum(encoder.left), tower_checksum(encoder.right)}
        found = [result for evaluation in results for result in _results_of(Path(evaluation), weights)]
        card = with_results(card, folder.resolve().name, found)
    named = with_repository(card, repo)
    if license is not None:
        named = with_metadata(named, repo, license=license)
    _write_card(path, named)
    try:
        _upload(folder, repo, "model", public, revision, message)
    except DualencError:
        # A card must not name a repository that does not hold the model.
        _write_card(path, card)
        raise


def _check_name(repo: str) -> None:
    if repo.count("/") != 1:
        raise DualencError(f"{repo}: no name of a repository; give owner/name")


def _write_card(path: Path, card: str) -> None:
    with atomic_path(path) as part:
        part.write_text(card, encoding="utf-8")


def _results_of(evaluation: Path, weights: set[str]) -> list[Results]:
    """The results of one evaluation, which must be of these weights."""
    from dualenc.encoders.card import Results
    from dualenc.evaluation.output import evaluated_weights
    from dualenc.evaluation.retrieval import HEADLINES

    if not (evaluation / "metrics.json").is_file():
        raise DualencError(f"{evaluation}: has no metrics.json; give a folder that `dualenc evaluate` wrote")
    metrics: dict[str, Any] = read_json_object(evaluation / "metrics.json")
    task = metrics.get("task")
    if task not in ("retrieval", "image-text", "zero-shot"):
        raise DualencError(f"{evaluation}: holds results of {task}; give those of retrieval, image-text or zero-shot")
    evaluated = evaluated_weights(evaluation)
    if not evaluated or not evaluated <= weights:
        raise DualencError(f"{evaluation}: is not about the weights that the model has now; evaluate it again")
    if task == "retrieval":
        # The model is the first system.
        datasets = next(iter(metrics["systems"].values()))["datasets"]
        return [
            Results(task, name, metrics["split"], {metric: scores["metrics"][metric] for metric in HEADLINES})
            for name, scores in datasets.items()
        ]
    return [Results(task, Path(metrics["data"]).name or metrics["data"], metrics["split"], metrics["metrics"])]


def push_data(
    embeddings: str, repo: str, *, public: bool = False, revision: str | None = None, message: str = "Upload embeddings"
) -> None:
    """Upload a folder of embeddings to the Hugging Face hub as a data set.

    A new repository is private unless `public` is given. Files that it already holds unchanged are not sent again.

    Args:
        embeddings: folder that `dualenc embed` wrote, finished.
        repo: name of the repository, owner/name.
        public: make a new repository public.
        revision: branch to upload to; main by default.
        message: of the commit.
    """
    from dualenc.data.embeddings import Embeddings

    _check_name(repo)
    # Refuses unfinished embeddings and other folders.
    Embeddings.open(embeddings)
    _upload(Path(embeddings), repo, "dataset", public, revision, message)


def _upload(
    folder: Path, repo: str, kind: Literal["model", "dataset"], public: bool, revision: str | None, message: str
) -> None:
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)
        if revision is not None:
            hub.create_branch(repo, branch=revision, repo_type=kind, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            repo_type=kind,
            revision=revision,
            commit_message=message,
            # Locks and half-written files begin with a dot.
            ignore_patterns=[".*", "**/.*"],
        )
    except Exception as error:
        # The client and the network libraries below it raise many types.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        remedy = "check the name, and log in: hf auth login"
        raise DualencError(f"{repo}: could not be uploaded ({reason}); {remedy}") from error
    print(printable(f"{folder} → {commit.commit_url}"))
