"""Throughput and latency of `dualenc serve` under concurrent clients, with batches and one query at a time.

    dualenc index MODEL BEIR --out index
    python eval/bench/serving.py index BEIR --clients 50 --seconds 300

Two servers over the same index, one that batches and one with `--batch-size 1 --wait-ms 0`, are asked in turn by the
same clients, each of which sends its next query when it has its answer. Every answer must be HTTP 200.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from urllib.parse import quote

import numpy as np
from jsonargparse import auto_cli

KINDS = {"batches": ["--batch-size", "32"], "one at a time": ["--batch-size", "1", "--wait-ms", "0"]}


async def client(port: int, queries: list[str], k: int, until: float, seconds: list[float], wrong: list[str]) -> None:
    """Ask one query after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    place = 0
    while time.perf_counter() < until:
        begin = time.perf_counter()
        path = f"/search?k={k}&text={quote(queries[place % len(queries)])}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        body = await reader.readexactly(int(length[1]))
        seconds.append(time.perf_counter() - begin)
        if not head.startswith(b"HTTP/1.1 200"):
            wrong.append(body.decode(errors="replace")[:200])
        place += 1
    writer.close()


async def load(port: int, queries: list[str], clients: int, k: int, duration: float) -> tuple[list[float], list[str]]:
    """All clients at once, each from another query on."""
    seconds: list[float] = []
    wrong: list[str] = []
    until = time.perf_counter() + duration
    shifts = [queries[place * len(queries) // clients :] + queries for place in range(clients)]
    await asyncio.gather(*(client(port, own, k, until, seconds, wrong) for own in shifts))
    return seconds, wrong


def main(
    index: str,
    data: str,
    clients: int = 50,
    seconds: float = 60.0,
    rounds: int = 2,
    k: int = 10,
    queue: int = 1024,
) -> None:
    """Print queries per second, p50 and p99 of both, and the ratios.

    Args:
        index: folder that `dualenc index` wrote.
        data: BEIR folder with the queries.
        clients: that ask at the same time.
        seconds: of load for each server, over all rounds.
        rounds: into which the time is divided, the servers taking turns.
        k: results per query.
        queue: of both servers.
    """
    from dualenc.data.sources import open_corpus

    corpus = open_corpus(data, part="queries")
    queries = [corpus[row] for row in range(len(corpus))]
    processes: dict[str, subprocess.Popen[str]] = {}
    ports: dict[str, int] = {}
    taken: dict[str, list[float]] = {name: [] for name in KINDS}
    errors: dict[str, list[str]] = {name: [] for name in KINDS}
    try:
        for name, words in KINDS.items():
            command = [sys.executable, "-m", "dualenc", "serve", index, "--port", "0", "--queue", str(queue), *words]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            processes[name] = process
            assert process.stdout is not None
            found = re.search(r":(\d+)/$", process.stdout.readline().strip())
            if found is None:
                raise SystemExit(f"the server does not start; try dualenc serve {index}")
            ports[name] = int(found[1])
            asyncio.run(load(ports[name], queries, 1, k, 1.0))  # to warm up
        for _ in range(rounds):
            for name, port in ports.items():
                own, wrong = asyncio.run(load(port, queries, clients, k, seconds / rounds))
                taken[name] += own
                errors[name] += wrong
    finally:
        for process in processes.values():
            process.terminate()
            process.wait(30)
    rows = {}
    for name, own in taken.items():
        p50, p99 = np.percentile(own, [50, 99]) * 1000
        rows[name] = {"queries_per_s": len(own) / seconds, "p50_ms": p50, "p99_ms": p99}
        counted = f"{len(own) / seconds:7.1f} answers/s, p50 {p50:7.1f} ms, p99 {p99:7.1f} ms"
        print(f"{name:>14}: {counted}, {len(errors[name])} of {len(own)} errors {json.dumps(errors[name][:1])}")
    print(f"{clients} clients, {seconds:g} s each")
    mine, theirs = rows["batches"], rows["one at a time"]
    faster = mine["queries_per_s"] / theirs["queries_per_s"]
    print(f"throughput {faster:.2f} times, p99 {mine['p99_ms'] / theirs['p99_ms']:.2f} times that of one at a time")
    if any(errors.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    auto_cli(main)
