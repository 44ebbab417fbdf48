"""Embed documents with Ray actors, one per GPU of the cluster, or per core without GPUs.

    python recipes/launch/embed_ray.py runs/mine/model documents.jsonl /shared/emb

MODEL, DATA and OUT are on a file system that all nodes share. The actors share the work through
file locks in OUT. Ray restarts an actor whose node dies; only its current shard is embedded again.
"""

import sys

import ray
import torch

from dualenc.data import open_corpus
from dualenc.encoders import load_model
from dualenc.search.embed import embed


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    def embed(self, model, data, out):
        """Embed shards until none is left; returns the number of documents."""
        tower = load_model(model, device="cuda" if torch.cuda.is_available() else "cpu").right
        embeddings = embed(
            tower, open_corpus(data), out, identity={"side": "right"}, notes={"model": model}
        )
        return len(embeddings)


def main(model, data, out):
    ray.init()
    resources = ray.cluster_resources()
    kind, option = ("GPU", "num_gpus") if "GPU" in resources else ("CPU", "num_cpus")
    workers = [Worker.options(**{option: 1}).remote() for _ in range(int(resources[kind]))]
    counts = ray.get([worker.embed.remote(model, data, out) for worker in workers])
    print(f"{counts[0]:,} embeddings by {len(workers)} actors in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
