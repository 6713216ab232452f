"""A manager's metrics for Prometheus. Needs ``pip install 'specstate[prometheus]'``.

The thread that uses the manager calls ``update`` every so often; a scrape comes from another thread, is served what the
last update read, and never touches the manager.

Names are vLLM's where it has the same metric (vllm/v1/spec_decode/metrics.py, vllm/v1/metrics/loggers.py), with another
prefix. In PromQL, the share of drafts that hold, and the mean acceptance length:

    rate(specstate:spec_decode_num_accepted_tokens_total[1m]) / rate(specstate:spec_decode_num_draft_tokens_total[1m])
    1 + rate(specstate:spec_decode_num_accepted_tokens_total[1m]) / rate(specstate:spec_decode_num_drafts_total[1m])

A server that asks for OpenMetrics and not for UTF-8 names, as Prometheus 2 does, gets samples named ``specstate_...``
from prometheus-client 0.23 to 0.26 (its issue 1177, which vLLM's names share).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple, Protocol

from specstate.errors import SpecStateError, shown
from specstate.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PREFIX = "specstate:"


class MetricsSource(Protocol):
    """A StateManager, as far as this module goes."""

    def metrics(self) -> Metrics: ...


class PrometheusExporter:
    """Serves the metrics of a manager to the scrapes of a ``prometheus_client.CollectorRegistry``.

    labels: names and values that every sample gets. Reads the manager once and registers itself;
    ``registry.unregister(exporter)`` takes it out again. Raises SpecStateError without prometheus-client, for bad
    labels, and for a registry that has an exporter already: ``add`` the manager to that one.
    """

    def __init__(
        self, manager: MetricsSource, registry: "CollectorRegistry", labels: Mapping[str, str] | None = None
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise SpecStateError(
                "PrometheusExporter needs prometheus-client: pip install 'specstate[prometheus]'"
            ) from error
        if not isinstance(registry, prometheus_client.CollectorRegistry):
            raise SpecStateError(f"registry must be a CollectorRegistry, not {type(registry).__name__}")
        labels = _checked_labels({} if labels is None else labels)
        self._label_names = tuple(labels)
        self._managers = {tuple(labels.values()): manager}
        self._served: dict[tuple[str, ...], list[dict[str, int]]] = {}
        self.update()
        try:
            registry.register(self)
        except ValueError as error:
            raise SpecStateError(
                f"registry serves {PREFIX} metrics already: add the manager to its exporter"
            ) from error

    def add(self, manager: MetricsSource, labels: Mapping[str, str]) -> None:
        """Serves another manager too, a draft model's say, from the next update on.

        labels: of the same names as the first manager's. Raises SpecStateError for others, and for values that a
        manager has already.
        """
        labels = _checked_labels(labels)
        if set(labels) != set(self._label_names):
            raise SpecStateError(f"labels must be named {sorted(self._label_names)}, got {sorted(labels)}")
        values = tuple(labels[name] for name in self._label_names)
        if values in self._managers:
            raise SpecStateError(f"labels = {shown(labels)} are another manager's")
        self._managers[values] = manager

    def update(self) -> None:
        """Reads the managers, for the scrapes to come; waits for the device. Call it where the managers are used."""
        # Scrapes see the old snapshot or the new one, whole: there is one reference, and what it leads to stays as is.
        self._served = {
            values: _read(manager.metrics(), self._served.get(values)) for values, manager in self._managers.items()
        }

    def describe(self) -> "Iterator[Metric]":
        """For the registry: the families, without samples."""
        return self._families({})

    def collect(self) -> "Iterator[Metric]":
        """For a scrape, from any thread: what the last update read."""
        return self._families(self._served)

    def _families(self, served: dict[tuple[str, ...], list[dict[str, int]]]) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for index, family in enumerate(FAMILIES):
            make = CounterMetricFamily if family.counts else GaugeMetricFamily
            own = [family.label] if family.label else []
            made = make(PREFIX + family.name, family.help, labels=[*self._label_names, *own])
            for values, samples in served.items():
                for key, number in samples[index].items():
                    made.add_metric([*values, key] if own else values, number)
            yield made


class Family(NamedTuple):
    """A metric that is served, and where its numbers stand."""

    counts: bool
    """A counter, whose name in a scrape ends with _total; otherwise a gauge."""
    name: str
    """Without the prefix."""
    help: str
    read: Callable[[Metrics], dict[str, int]]
    """The numbers, by value of ``label``."""
    label: str = ""
    """What tells the numbers apart; empty for a single one."""


def _counter(name: str, help: str, read: Callable[[Metrics], int]) -> Family:
    return Family(True, name, help, lambda metrics: {"": read(metrics)})


def _gauge(name: str, help: str, read: Callable[[Metrics], int]) -> Family:
    return Family(False, name, help, lambda metrics: {"": read(metrics)})


FAMILIES = (
    _counter("decode_windows", "Windows of decode rows that ended.", lambda m: m.windows),
    _counter("spec_decode_num_drafts", "Windows with at least one draft.", lambda m: m.drafts),
    _counter("spec_decode_num_draft_tokens", "Drafts.", lambda m: m.draft_tokens),
    _counter("spec_decode_num_accepted_tokens", "Drafts that were accepted.", lambda m: m.accepted_tokens),
    Family(
        True,
        "spec_decode_num_accepted_tokens_per_pos",
        "Windows in which the draft at the position, from 0, was accepted.",
        lambda m: {str(position): count for position, count in enumerate(m.accepted_per_position)},
        "position",
    ),
    Family(True, "folds", "Requests whose pending records were folded.", lambda m: asdict(m.folds), "reason"),
    _gauge("pending_rows", "Requests with pending records.", lambda m: m.pending_rows),
    _counter("late_ends_dropped", "Row ends that came after their request had left.", lambda m: m.late_ends_dropped),
    _counter("clamps", "Accepted counts that were clamped.", lambda m: m.clamps),
    _counter("wasted_windows", "Windows of requests that had finished.", lambda m: m.wasted_windows),
    _counter("misplaced_rows", "Rows whose position beside a block table was wrong.", lambda m: m.misplaced_rows),
    _gauge("record_slots_in_use", "Record slots taken.", lambda m: m.record_slots_in_use),
    _gauge("checkpoint_slots_in_use", "Checkpoint slots taken.", lambda m: m.checkpoint_slots_in_use),
    _gauge("boundary_slots", "Checkpoint slots of boundaries.", lambda m: m.boundary_slots),
    _gauge("published_slots", "Checkpoint slots of the prefix cache.", lambda m: m.published_slots),
    _gauge("reserved_slots", "Checkpoint slots set aside.", lambda m: m.reserved_slots),
    # vLLM counts the tokens of its look-ups.
    _counter("prefix_cache_queries", "Look-ups in the prefix cache.", lambda m: m.prefix_hits + m.prefix_misses),
    _counter("prefix_cache_hits", "Look-ups in the prefix cache that found a state.", lambda m: m.prefix_hits),
    _counter("prefix_cache_evictions", "Published states given up for their slot.", lambda m: m.prefix_evictions),
    _counter("num_preemptions", "Requests preempted or retracted.", lambda m: m.preemptions),
)


def _read(metrics: Metrics, before: list[dict[str, int]] | None) -> list[dict[str, int]]:
    """The numbers of each family. No counter is below ``before``."""
    numbers = [family.read(metrics) for family in FAMILIES]
    if before is not None:
        for family, now, then in zip(FAMILIES, numbers, before, strict=True):
            if family.counts:
                # Prometheus takes a counter that falls for one that began anew, and adds all of it to the rate.
                now.update({key: max(number, then.get(key, 0)) for key, number in now.items()})
    return numbers


def _checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Raises SpecStateError for what Prometheus would not take as labels, or what families use for their own."""
    if not isinstance(labels, Mapping):
        raise SpecStateError(f"labels must be a mapping of names to values, not {type(labels).__name__}")
    own = {family.label for family in FAMILIES if family.label}
    for name, value in labels.items():
        if not isinstance(name, str) or not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name in own:
            raise SpecStateError(
                f"labels: {shown(name)} is no name for a label, or one of {', '.join(sorted(own))}, which are taken"
            )
        if not isinstance(value, str):
            raise SpecStateError(f"labels[{name!r}] = {shown(value)} must be a string")
    return dict(labels)
