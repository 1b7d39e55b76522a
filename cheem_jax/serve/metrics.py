"""What the server counts, in Prometheus' words and in a separate registry."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cheem_jax.engine.compilation import compilations

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)
NETWORKS = {
    "hits": "Networks of tasks that were there when images came",
    "misses": "Networks of tasks for which something had to be merged",
    "evictions": "Merged experts dropped to stay within the limit",
}


class Metrics:
    """Counters whose labels take few values, whatever clients send."""

    def __init__(
        self, paths: Sequence[str], queue_length: Callable[[], int], networks: Callable[[], Mapping[str, int]]
    ):
        self.registry = to = CollectorRegistry()
        self._paths, self._networks, self._warm = frozenset(paths), networks, compilations()
        self._requests = Counter("cheem_requests", "Requests answered", ["path", "status"], registry=to)
        self._seconds = Histogram(
            "cheem_request_seconds", "From a request's head to its answer", ["path"], buckets=SECONDS, registry=to
        )
        self.refused = Counter("cheem_refused", "Requests that got a sentence, no prediction", ["reason"], registry=to)
        self.batches = Histogram("cheem_batch_images", "Images in one call", buckets=BATCH_SIZES, registry=to)
        self.images = Counter("cheem_images", "Images answered, by the task that answered", ["task"], registry=to)
        queue = Gauge("cheem_queue_images", "Images in the server that are not answered yet", registry=to)
        queue.set_function(queue_length)
        text = "Functions compiled, or read from the cache of compiled functions, since warm-up"
        Gauge("cheem_programs_since_warm_up", text, registry=to).set_function(self._compiled)
        to.register(self)
        ProcessCollector(registry=to)

    def collect(self) -> Iterator[Metric]:
        """What the predictor counts by itself."""
        found = self._networks()
        for name, text in NETWORKS.items():
            yield CounterMetricFamily(f"cheem_network_{name}", text, value=found[name])
        yield GaugeMetricFamily("cheem_network_bytes", "Bytes of merged experts that are kept", value=found["bytes"])

    def warmed_up(self) -> None:
        """From here on nothing should be compiled."""
        self._warm = compilations()

    def _compiled(self) -> int:
        since = compilations().since(self._warm)
        return since.programs + since.cached

    def answered(self, path: str, status: int, seconds: float) -> None:
        """One request, whatever came of it."""
        path = path if path in self._paths else "other"
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)
