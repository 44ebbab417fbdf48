"""Reading: training pairs, corpora to embed and image views, from every supported format."""

from dualenc.data.corpus import Corpus, RetrievalSet
from dualenc.data.pairs import Items, Modality, Pair, PairDataset, Side
from dualenc.data.ragged import Ragged

__all__ = ["Corpus", "Items", "Modality", "Pair", "PairDataset", "Ragged", "RetrievalSet", "Side"]
