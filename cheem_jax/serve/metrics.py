"""What the server counts, in Prometheus' words and in a registry of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cheem_jax.engine.compilation import compilations
from cheem_jax.memory.prediction import Prediction

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)
NO_TASK = "(none)"
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
        self._paths = frozenset(paths)
        self._requests = Counter("cheem_requests", "Requests answered", ["path", "status"], registry=to)
        self._seconds = Histogram(
            "cheem_request_seconds", "From a request's head to its answer", ["path"], buckets=SECONDS, registry=to
        )
        self._refused = Counter("cheem_refused", "Requests that got a sentence, no prediction", ["reason"], registry=to)
        self._batches = Histogram("cheem_batch_images", "Pictures in one call", buckets=BATCH_SIZES, registry=to)
        self._images = Counter("cheem_images", "Pictures answered, by the task that answered", ["task"], registry=to)
        Gauge("cheem_queue_images", "Pictures in the server that are not answered yet", registry=to).set_function(
            queue_length
        )
        self._warm = compilations()
        Gauge(
            "cheem_programs_since_warm_up",
            "Programs compiled, or read from the cache of programs, since warm-up",
            registry=to,
        ).set_function(self.programs)
        self._networks = networks
        to.register(self)
        ProcessCollector(registry=to)

    def collect(self) -> Iterator[Metric]:
        """What the predictor counts by itself."""
        found = self._networks()
        for name, text in NETWORKS.items():
            yield CounterMetricFamily(f"cheem_network_{name}", text, value=found[name])
        yield GaugeMetricFamily("cheem_network_bytes", "Bytes of merged experts that are kept", value=found["bytes"])

    def warmed_up(self) -> None:
        """From here on no program should be compiled."""
        self._warm = compilations()

    def programs(self) -> int:
        """Programs compiled or read from disk since warm-up."""
        since = compilations().since(self._warm)
        return since.programs + since.cached

    def answered(self, path: str, status: int, seconds: float) -> None:
        """One request, whatever came of it."""
        path = path if path in self._paths else "other"
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def batch(self, num_images: int) -> None:
        self._batches.observe(num_images)

    def predicted(self, predictions: Sequence[Prediction]) -> None:
        for prediction in predictions:
            self._images.labels(NO_TASK if prediction.task is None else prediction.task).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
