"""`dualenc push-model` and `push-data`: folders to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dualenc.errors import DualencError
from dualenc.terminal import printable


def push_model(
    model: str, repo: str, *, public: bool = False, revision: str | None = None, message: str = "Upload a model"
) -> None:
    """Upload a model folder to the Hugging Face hub, where its own library loads it by name.

    A new repository is private unless told otherwise; an existing one keeps what it is. The folder's README.md becomes
    the model card. Log in before with `hf auth login`, or set HF_TOKEN.

    Args:
        model: folder that training or `DualEncoder.save` wrote.
        repo: name of the repository, owner/name.
        public: make a new repository public.
        revision: branch to upload to; main by default.
        message: of the commit.
    """
    from dualenc.encoders.dual import MODEL_FILES

    folder = Path(model)
    if not any((folder / name).is_file() for name in MODEL_FILES):
        raise DualencError(f"{folder}: holds no model; name the folder that training wrote, such as runs/mine/model")
    _upload(folder, repo, "model", public, revision, message)


def push_data(
    embeddings: str, repo: str, *, public: bool = False, revision: str | None = None, message: str = "Upload embeddings"
) -> None:
    """Upload a folder of embeddings to the Hugging Face hub as a data set.

    A new repository is private unless told otherwise. What is there of the same name and contents is not sent again.

    Args:
        embeddings: folder that `dualenc embed` wrote, finished.
        repo: name of the repository, owner/name.
        public: make a new repository public.
        revision: branch to upload to; main by default.
        message: of the commit.
    """
    from dualenc.search.embeddings import Embeddings

    Embeddings.open(embeddings)  # refuses what is not finished, or is something else
    _upload(Path(embeddings), repo, "dataset", public, revision, message)


def _upload(
    folder: Path, repo: str, kind: Literal["model", "dataset"], public: bool, revision: str | None, message: str
) -> None:
    from huggingface_hub import HfApi

    if repo.count("/") != 1:
        raise DualencError(f"{repo}: no name of a repository; give owner/name")
    hub = HfApi()
    try:
        hub.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)
        if revision is not None:
            hub.create_branch(repo, branch=revision, repo_type=kind, exist_ok=True)
        # Locks and half-written files begin with a dot.
        ignored = [".*", "**/.*"]
        done = hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            repo_type=kind,
            revision=revision,
            commit_message=message,
            ignore_patterns=ignored,
        )
    except Exception as error:  # of the hub's client and of the network below it, of many kinds
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise DualencError(
            f"{repo}: could not be uploaded ({why}); check the name, and log in: hf auth login"
        ) from error
    print(printable(f"{folder} → {done.commit_url}"))
