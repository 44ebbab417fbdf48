"""Hard negatives that the model in training mines anew every few epochs (ANCE: Xiong et al. 2021,
arXiv:2007.00808).

At the start of an epoch all items are encoded, the nearest right items of each left item are
searched exactly, and negatives are chosen by the rule of `dualenc mine`. Ranks share the work, and
all get the same negatives.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from dualenc import distributed
from dualenc.data.corpus import Corpus, corpora
from dualenc.data.mixture import Mixture
from dualenc.data.pairs import PairDataset
from dualenc.data.ragged import Ragged, distinct
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.objectives.base import Objective
from dualenc.search.embed.encode import embed
from dualenc.search.hard_negatives import Negatives, Rule
from dualenc.search.mining import Exclusions, NegativeSearch
from dualenc.seeds import preserve_random_state
from dualenc.training.settings import TrainerSettings
from dualenc.types import Side

BATCH_SIZE = 64
"""Items encoded at once."""
_PRECISIONS: dict[str, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}


def check_minable(pairs: PairDataset, objective: Objective) -> None:
    """Refuse data that has nothing to mine, and objectives that mined negatives are no use to."""
    reason = None
    if pairs.views:
        reason = "mines right items for left ones, and the data is two views of images"
    elif isinstance(pairs, Mixture) and pairs.batches == "one_source":
        reason = "mines among the items of all sources, which data.batches=one_source keeps apart"
    elif not objective.takes_mined:
        reason = f"is for InfoNCE, SogCLR and others with mined negatives, and {objective.name} takes none"
    if reason is not None:
        raise DualencError(f"mine_every {reason}; leave mine_every out")


class NegativeMiner:
    """Mines the negatives of training pairs with the model that is trained on them, every
    `mine_every` epochs.

    Each rank holds the vectors of all items, float32 in main memory. `mine` sets the `negatives` of
    `pairs`.
    """

    def __init__(
        self,
        model: DualEncoder,
        pairs: PairDataset,
        settings: TrainerSettings,
        mixed_precision: str,
        device: torch.device,
    ) -> None:
        self.model = model
        self.pairs = pairs
        self.settings = settings
        self.autocast = _PRECISIONS.get(mixed_precision)
        self.device = device
        self.left, self.right = corpora(pairs)
        self.is_mined = False
        self._exclusions: Exclusions | None = None

    def is_due(self, epoch: int) -> bool:
        """Whether an epoch begins with mining; the first one, 0, does not: the model has learned
        nothing yet."""
        return epoch > 0 and epoch % (self.settings.mine_every or 1) == 0

    def mine(self) -> dict[str, float]:
        """Replace the pairs' negatives; all ranks call it together.

        Returns:
            seconds; mean_rank of the negatives; without_negatives, the share of left items that
            have none.
        """
        begin = time.perf_counter()
        left_ids = distinct(self.pairs.left_id)
        # Workers that read images draw a seed from the global generator.
        with preserve_random_state():
            queries = self._embed("left", self.left.take(left_ids))
            documents = self._embed("right", self.right)
        own = self._choose(queries, documents)
        mined: dict[int, Negatives] = {}
        for part in distributed.gather_objects(own):
            mined |= part
        rows: list[Any] = [mined[row].ids if row in mined else [] for row in range(len(self.left))]
        self._set_negatives(Ragged.from_rows(rows).take(self.pairs.left_id))
        ranks = [rank for negatives in mined.values() for rank in negatives.ranks.tolist()]
        num_with_negatives = sum(len(negatives.ids) > 0 for negatives in mined.values())
        return {
            "seconds": time.perf_counter() - begin,
            "mean_rank": float(np.mean(ranks)) if ranks else 0.0,
            "without_negatives": 1 - num_with_negatives / len(left_ids),
        }

    def state_dict(self) -> dict[str, Any]:
        """The negatives in force; {} before the first mining."""
        if not self.is_mined or self.pairs.negatives is None:
            return {}
        return {
            name: torch.from_numpy(array) for name, array in self.pairs.negatives._asdict().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        if state:
            self._set_negatives(
                Ragged(**{name: tensor.numpy().copy() for name, tensor in state.items()})
            )

    def _set_negatives(self, negatives: Ragged) -> None:
        self.pairs.negatives = negatives
        self.is_mined = True

    def _embed(self, side: Side, corpus: Corpus) -> Embeddings:
        return embed(
            self.model.tower(side),
            corpus,
            batch_size=BATCH_SIZE,
            autocast=self.autocast,
            num_workers=self.settings.num_workers,
            progress=f"mine: embed {side} items" if self.settings.progress else False,
        )

    def _choose(self, queries: Embeddings, documents: Embeddings) -> dict[int, Negatives]:
        """The negatives of this rank's share of the left items; items that cannot be read have no
        vector."""
        if self._exclusions is None:
            # All contents are read, which takes minutes on large data: once, not on every rank.
            self._exclusions = distributed.from_main(
                partial(Exclusions, self.pairs, self.left, self.right)
            )
        rule = Rule(self.settings.mine_negatives, relative=self.settings.mine_relative)
        search = NegativeSearch(
            queries,
            documents,
            self.pairs,
            self.left,
            self.right,
            rule,
            self._exclusions,
            self.device,
        )
        chosen: dict[int, Negatives] = {}
        for block in search.blocks()[distributed.rank() :: distributed.world_size()]:
            chosen.update(search.choose(block))
        return chosen
