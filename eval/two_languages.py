"""Captions in two languages, of which one is invented: a caption finds what another person wrote of
the same image.

    python eval/two_languages.py FLICKR FOLDER
    python eval/small_batch.py run two_languages FOLDER --epochs 3

FLICKR holds {train,dev,test}.parquet with five captions of each image. As in Multi30k (Elliott et
al. 2016, arXiv:1605.00459), the two captions of a pair describe the same image in two languages
without being translations. The second language spells every word with other letters and puts the
words in the opposite order, so that the two share no word, and what a word means has to be learned
from pairs. Two pairs of each image: the first caption finds the second, and the third the fourth.
FOLDER is in BEIR's form; all captions in the second language are its documents.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pandas as pd

from dualenc.errors import DualencError

PAIRS = ((0, 1), (2, 3))
"""Captions of an image: which finds which."""


class InventedLanguage:
    """Spells words with other letters, vowels as vowels, and puts them in the opposite order."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        vowels = "aeiou"
        consonants = "".join(letter for letter in string.ascii_lowercase if letter not in vowels)
        spelled = ["".join(draw.sample(letters, len(letters))) for letters in (vowels, consonants)]
        self.letters = str.maketrans(vowels + consonants, "".join(spelled))

    def say(self, caption: str) -> str:
        """The caption in this language."""
        return " ".join(reversed(caption.lower().translate(self.letters).split()))


def main(flickr: Path, folder: Path, seed: int = 0) -> None:
    """Write the pairs of all three parts as one BEIR folder.

    Args:
        flickr: the tables of images and captions.
        folder: what to write.
        seed: of the invented language.
    """
    language = InventedLanguage(seed)
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    queries, documents = [], []
    for part in ("train", "dev", "test"):
        table = flickr / f"{part}.parquet"
        if not table.is_file():
            raise DualencError(
                f"{table}: no such table; "
                "give the folder of train.parquet, dev.parquet, test.parquet"
            )
        judged = ["query-id\tcorpus-id\tscore"]
        for image, captions in enumerate(pd.read_parquet(table, columns=["captions"])["captions"]):
            for first, second in PAIRS:
                query, document = f"{part}-{image}-{first}", f"{part}-{image}-{second}"
                queries.append({"_id": query, "text": captions[first].lower()})
                documents.append({"_id": document, "text": language.say(captions[second])})
                judged.append(f"{query}\t{document}\t1")
        (folder / "qrels" / f"{part}.tsv").write_text("\n".join(judged) + "\n")
    for name, entries in (("queries", queries), ("corpus", documents)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(entry) + "\n" for entry in entries)
        )
    print(f"{len(queries)} pairs in {folder}")


if __name__ == "__main__":
    from jsonargparse import auto_cli

    try:
        auto_cli(main)
    except DualencError as error:
        raise SystemExit(f"error: {error}") from error
