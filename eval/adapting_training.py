"""The methods that `adapting.py` compares, and one training of a map of queries by one of them."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from adapting_task import Task
from comparison_table import Settings
from torch import Tensor

from dualenc.encoders import VectorEncoder, interpolate
from dualenc.objectives import FrozenCorpus, InfoNCE, Objective

EVALUATIONS = 10
SHARES = tuple(step / 10 for step in range(11))
"""Of the original weights."""


class Method(NamedTuple):
    """A row of the table.

    Attributes:
        drawn: documents drawn uniformly from the index as further negatives of a step.
        mined: negatives of each query, near documents at the start of an epoch.
    """

    batch_size: int = 32
    drawn: int = 0
    mined: int = 0


EXACT = "FrozenCorpus+"
"""With the positive in the softmax."""
METHODS = {
    EXACT: Method(),
    "FrozenCorpus": Method(),
    "InfoNCE, B = 32": Method(),
    "InfoNCE, B = 512": Method(batch_size=512),
    "InfoNCE, 512 drawn": Method(drawn=512),
    "InfoNCE, mined": Method(mined=8),
}


class Training:
    """One training of a map of queries, and its clock.

    Args:
        task: what to train on.
        settings: method, map, temperature, rate, seed, and either steps or seconds.
    """

    def __init__(self, task: Task, settings: Settings) -> None:
        self.task = task
        self.settings = settings
        self.method = METHODS[settings["method"]]
        torch.manual_seed(settings["seed"])
        self.random = torch.Generator().manual_seed(settings["seed"])
        dim = task.queries.shape[1]
        self.model = VectorEncoder(dim, tower=settings["map"], right_tower="identity")
        self.original = copy.deepcopy(self.model)
        sizes = {"num_left": len(task.queries), "num_right": len(task.documents)}
        self.objective: Objective = InfoNCE(temperature=settings["temperature"], **sizes)
        if settings["method"].startswith("FrozenCorpus"):
            options = {
                "temperature": settings["temperature"],
                "positive_in_softmax": settings["method"] == EXACT,
            }
            self.objective = FrozenCorpus(task.documents, **options, **sizes)
        self.rate = settings["rate"] * math.sqrt(self.method.batch_size / 32)
        self.optimizer = torch.optim.AdamW(
            self.model.left.parameters(), self.rate, weight_decay=0.01
        )
        self.steps = 0
        self.seconds = 0.0
        self.mined = torch.empty(0, 0)

    @property
    def progress(self) -> float:
        """Share of the training that is done."""
        if "seconds" in self.settings:
            return self.seconds / self.settings["seconds"]
        return self.steps / self.settings["steps"]

    def encode(self, queries: Tensor) -> Tensor:
        """Map query vectors (n, D)."""
        embeddings: Tensor = self.model.left({"vector": queries})
        return embeddings

    def run(self, keep_best: bool = True) -> dict[str, Any]:
        """Train, measure the last weights, and the best evaluation's, which replace them if
        `keep_best`."""
        best_quality = -1.0
        best_progress = next_evaluation = 0.0
        best = copy.deepcopy(self.model.state_dict())
        for pairs in self.batches():
            if self.progress >= next_evaluation:
                quality, _ = self.held_out_quality()
                if quality > best_quality:
                    best_quality = quality
                    best_progress = self.progress
                    best = copy.deepcopy(self.model.state_dict())
                next_evaluation += 1 / EVALUATIONS
            if self.progress >= 1:
                break
            begun = time.process_time()
            self.step(pairs)
            self.seconds += time.process_time() - begun
        last = self.task.grouped(self.task.quality(self.encode, self.task.test))
        share = 0.0
        if keep_best:
            self.model.load_state_dict(best)
            share = self.interpolate()
        tested = self.task.grouped(self.task.quality(self.encode, self.task.test))
        outcome = {
            "validation": round(best_quality, 4),
            **tested,
            "last": {name: last[name] for name in last if " " not in name},
        }
        outcome |= {"share": share} if self.task.known else {}
        return outcome | {
            "spent": round(self.seconds, 2),
            "done": self.steps,
            "best": round(best_progress, 2),
        }

    def held_out_quality(self) -> tuple[float, float]:
        """Mean nDCG@10 over all held-out queries, and over those of new documents."""
        parts = [
            self.task.quality(self.encode, qrels)
            for qrels in (self.task.new, self.task.known)
            if qrels
        ]
        new, known = (
            list(parts[0].values()),
            [value for part in parts[1:] for value in part.values()],
        )
        return statistics.mean(new + known), statistics.mean(new)

    def interpolate(self) -> float:
        """Choose and take a share of the original weights, as `dualenc adapt` does: the best for
        held-out queries among those that cost the ones of new documents nothing. None, where the
        stopping looked at new documents alone."""
        if not self.task.known:
            return 0.0
        adapted = copy.deepcopy(self.model)
        measured = []
        for share in SHARES:
            self.model.load_state_dict(interpolate(self.original, adapted, share))
            measured.append((*self.held_out_quality(), share))
        _, least, _ = measured[-1]
        _, _, share = max(
            (round(quality, 6), new, share) for quality, new, share in measured if new >= least
        )
        self.model.load_state_dict(interpolate(self.original, adapted, share))
        return share

    def batches(self) -> Iterator[Tensor]:
        """Batches (B, 2) of random pairs without end; what is mined at the start of an epoch counts
        as training."""
        pairs = torch.from_numpy(self.task.pairs)
        batch_size = min(self.method.batch_size, len(pairs))
        while True:
            begun = time.process_time()
            if self.method.mined:
                self.mine()
            self.seconds += time.process_time() - begun
            order = torch.randperm(len(pairs), generator=self.random)
            for start in range(0, len(pairs) - batch_size + 1, batch_size):
                yield pairs[order[start : start + batch_size]]

    @torch.no_grad()
    def mine(self) -> None:
        """Find (Q, mined) near documents: no known positive, and at most 0.95 of the best
        positive's score."""
        task = self.task
        self.mined = torch.full((len(task.queries), self.method.mined), -1)
        for rows in torch.from_numpy(task.pairs[:, 0]).unique().split(1024):
            scores = self.encode(task.queries[rows]) @ task.documents.T  # (n, N)
            positives = task.positives[rows]  # (n, K); the first of a query is never padding
            positives = torch.where(positives < 0, positives[:, :1], positives)
            highest = 0.95 * scores.gather(1, positives).amax(dim=1, keepdim=True)
            scores.scatter_(1, positives, -torch.inf)
            values, nearest = scores.masked_fill(scores > highest, -torch.inf).topk(
                self.method.mined
            )
            self.mined[rows] = nearest.masked_fill(values.isinf(), -1)

    def step(self, pairs: Tensor) -> None:
        """Train on a batch (B, 2): a tenth of warm-up, then along a cosine, as `Trainer` does."""
        decay = (1 + math.cos(math.pi * self.progress)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, 0.01 + 10 * self.progress) * decay
        queries, documents = pairs.unbind(dim=1)
        negatives: dict[str, Tensor] = {}
        if self.method.drawn or self.method.mined:
            rows = torch.randint(
                len(self.task.documents), (self.method.drawn,), generator=self.random
            )
            if self.method.mined:
                rows = self.mined[queries].unique()
                rows = rows[rows >= 0]
            negatives = {"negatives": self.task.documents[rows], "negative_id": rows}
        embeddings = self.encode(self.task.queries[queries])
        positives = {"left_positives": self.task.positives[queries]}
        loss = self.objective(
            embeddings, self.task.documents[documents], queries, documents, **positives, **negatives
        ).loss
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.left.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
