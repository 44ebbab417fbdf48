#!/usr/bin/env python
# sbatch reads no directive with a blank behind its #.
# fmt: off
#SBATCH --job-name=embed
#SBATCH --array=0-7
#SBATCH --gpus=1
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --requeue
# fmt: on
"""Documents embedded by a SLURM array, whose tasks start, end and are requeued whenever the cluster
likes.

    sbatch recipes/launch/embed_slurm.py runs/mine/model documents.jsonl /shared/emb

MODEL, DATA and OUT lie on a file system that all nodes share. The tasks divide the work by the
locks of OUT, not by their numbers: with fewer tasks than planned, or more, every shard is embedded.
"""

import os
import sys

import torch

from dualenc.data import open_corpus
from dualenc.encoders import load_model
from dualenc.search.embed import embed


def main(model, data, out):
    tower = load_model(model, device="cuda" if torch.cuda.is_available() else "cpu").right
    embeddings = embed(
        tower, open_corpus(data), out, identity={"side": "right"}, notes={"model": model}
    )
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
    print(f"task {task}: {len(embeddings):,} embeddings in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
