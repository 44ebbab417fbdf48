"""What Prometheus is told."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("dualenc_requests", "Requests answered", ["path", "status"], registry=self.registry)
        self.seconds = Histogram(
            "dualenc_request_seconds",
            "From the head of a request to its answer",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.batch_size = Histogram(
            "dualenc_batch_size", "Texts and queries worked on together", buckets=SIZES, registry=self.registry
        )
        self.waiting = Gauge("dualenc_queue_length", "Texts and queries that wait", registry=self.registry)
        self.held_bytes = Gauge("dualenc_held_bytes", "Bytes of request bodies in memory", registry=self.registry)
        self.vectors = Gauge("dualenc_index_vectors", "Vectors in the index", registry=self.registry)
        self.reloads = Counter("dualenc_reloads", "Changes to a new index", ["result"], registry=self.registry)
