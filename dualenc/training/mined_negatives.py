"""Online hard-negative mining (ANCE: Xiong et al. 2021, arXiv:2007.00808).

Every few epochs, the model in training encodes all items, the nearest right items of each left item
are searched exactly, and negatives are chosen by the rule of `dualenc mine`. Ranks share the work
and get the same negatives.
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
from dualenc.io.cpus import usable_workers
from dualenc.objectives.base import Objective
from dualenc.search.embed.encode import embed
from dualenc.search.hard_negatives import Negatives, Rule
from dualenc.search.mining import Exclusions, NegativeSearch
from dualenc.seeds import preserve_random_state
from dualenc.training.settings import TrainerSettings
from dualenc.types import Side

BATCH_SIZE = 64
"""Number of items to encode at a time."""
_PRECISIONS: dict[str, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}


def check_minable(pairs: PairDataset, objective: Objective) -> None:
    """Check that hard negatives can be mined in the data, and used by the objective.

    Args:
        pairs: the training pairs.
        objective: the objective.

    Raises:
        DualencError: the data has nothing to mine, or the objective takes no mined negatives.
    """
    reason = None
    if pairs.views:
        reason = "mines right items for left ones, but the data is two views of images"
    elif isinstance(pairs, Mixture) and pairs.batches == "one_source":
        reason = "mines among the items of all sources, which data.batches=one_source keeps apart"
    elif not objective.takes_mined:
        reason = (
            "needs an objective that takes mined negatives, such as InfoNCE or SogCLR, "
            f"and {objective.name} takes none"
        )
    if reason is not None:
        raise DualencError(f"mine_every {reason}", fix="leave mine_every out")


class NegativeMiner:
    """Mines hard negatives with the model in training, every `mine_every` epochs.

    `mine` replaces the `negatives` of the pairs. Meanwhile each rank holds the vectors of all items
    in main memory, in float32.

    Args:
        model: the model in training.
        pairs: the training pairs; their negatives are replaced.
        settings: settings of the run.
        mixed_precision: precision of the run: "no", "bf16" or "fp16".
        device: device of this rank.
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
        """Return True if mining is due at the start of an epoch.

        Args:
            epoch: number of the epoch, from 0. The model has learned nothing before the first one.
        """
        return epoch > 0 and epoch % (self.settings.mine_every or 1) == 0

    def mine(self) -> dict[str, float]:
        """Replace the negatives of the pairs. All ranks call it together.

        Returns:
            seconds: time taken; mean_rank: mean rank of the negatives; without_negatives: share of
            left items that have none.
        """
        begin = time.perf_counter()
        left_ids = distinct(self.pairs.left_id)
        # Workers that read images draw a seed from the global generator, which would shift it.
        with preserve_random_state():
            queries = self._embed("left", self.left.take(left_ids))
            documents = self._embed("right", self.right)
        own = self._choose(queries, documents)
        mined: dict[int, Negatives] = {}
        for part in distributed.gather_objects(own):
            mined |= part
        # Left items without a vector, or outside the training pairs, were not mined.
        rows: list[Any] = [mined[row].ids if row in mined else [] for row in range(len(self.left))]
        by_left_id = Ragged.from_rows(rows)
        self._set_negatives(by_left_id.take(self.pairs.left_id))
        ranks = []
        num_with_negatives = 0
        for negatives in mined.values():
            ranks += negatives.ranks.tolist()
            num_with_negatives += len(negatives.ids) > 0
        return {
            "seconds": time.perf_counter() - begin,
            "mean_rank": float(np.mean(ranks)) if ranks else 0.0,
            "without_negatives": 1 - num_with_negatives / len(left_ids),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the mined negatives; {} before the first mining."""
        # Before it, the negatives are those of the data, which a resumed run reads again.
        if not self.is_mined or self.pairs.negatives is None:
            return {}
        arrays = self.pairs.negatives._asdict()
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        if state:
            arrays = {name: tensor.numpy().copy() for name, tensor in state.items()}
            self._set_negatives(Ragged(**arrays))

    def _set_negatives(self, negatives: Ragged) -> None:
        self.pairs.negatives = negatives
        self.is_mined = True

    def _embed(self, side: Side, corpus: Corpus) -> Embeddings:
        return embed(
            self.model.tower(side),
            corpus,
            batch_size=BATCH_SIZE,
            autocast=self.autocast,
            num_workers=usable_workers(self.settings.num_workers),
            progress=f"mine: embed {side} items" if self.settings.progress else False,
        )

    def _choose(self, queries: Embeddings, documents: Embeddings) -> dict[int, Negatives]:
        """Return the negatives of this rank's share of the left items, by row."""
        if self._exclusions is None:
            # On one rank only: reading the contents of large data takes minutes.
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
        # Blocks are dealt to the ranks in turn.
        own_blocks = search.blocks()[distributed.rank() :: distributed.world_size()]
        for block in own_blocks:
            chosen |= search.choose(block)
        return chosen
