"""Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter("dualenc_requests", "Requests answered", ["path", "status"], registry=own)
        self.seconds = Histogram(
            "dualenc_request_seconds", "From a request's head to its answer", ["path"], registry=own, buckets=SECONDS
        )
        self.batch_size = Histogram("dualenc_batch_size", "Texts and queries in a batch", registry=own, buckets=SIZES)
        self.waiting = Gauge("dualenc_queue_length", "Texts and queries that wait", registry=own)
        self.held_bytes = Gauge("dualenc_held_bytes", "Bytes of request bodies in memory", registry=own)
        self.vectors = Gauge("dualenc_index_vectors", "Vectors in the index", registry=own)
        self.reloads = Counter("dualenc_reloads", "Reloads of the index", ["result"], registry=own)
