"""Readers for training pairs, corpora to embed and image views, in every supported format."""

from dualenc.data.corpus import Corpus, RetrievalSet
from dualenc.data.document_splits import fold_by_documents, split_by_documents
from dualenc.data.mixture import Mixture
from dualenc.data.pairs import Pair, PairDataset
from dualenc.data.ragged import Ragged
from dualenc.data.readers.beir import BeirPairs, read_beir
from dualenc.data.readers.captioned_images import ImageFolderPairs
from dualenc.data.readers.clicks import IndexPairs
from dualenc.data.readers.document_pairs import DocumentPairs
from dualenc.data.readers.image_views import ImageFolderViews, ImageViews, TableViews
from dualenc.data.readers.mined_pairs import MinedPairs
from dualenc.data.readers.sources import open_corpus, open_pairs
from dualenc.data.readers.table_pairs import TablePairs
from dualenc.data.readers.vectors import VectorPairs
from dualenc.data.readers.webdataset import WebDatasetPairs
from dualenc.io.decoding import open_image
from dualenc.types import Items, Modality, Side

__all__ = [
    "BeirPairs",
    "Corpus",
    "DocumentPairs",
    "ImageFolderPairs",
    "ImageFolderViews",
    "ImageViews",
    "IndexPairs",
    "Items",
    "MinedPairs",
    "Mixture",
    "Modality",
    "Pair",
    "PairDataset",
    "Ragged",
    "RetrievalSet",
    "Side",
    "TablePairs",
    "TableViews",
    "VectorPairs",
    "WebDatasetPairs",
    "fold_by_documents",
    "open_corpus",
    "open_image",
    "open_pairs",
    "read_beir",
    "split_by_documents",
]
