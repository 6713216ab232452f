"""What a scrape is served: names, numbers, labels; while another thread updates; without the client."""

import re
import sys
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from specstate import Metrics, SpecStateError
from specstate.prometheus import FAMILIES, PREFIX, PrometheusExporter
from tests.factories import make_folds, make_metrics

FULL = make_metrics(
    windows=40,
    drafts=30,
    draft_tokens=90,
    accepted_tokens=45,
    accepted_per_position=(25, 15, 5),
    folds=make_folds(at_end=1, when_full=2, by_mask=3, at_boundary=4, in_verify=5, by_flush=6),
    pending_rows=7,
    late_ends_dropped=8,
    clamps=9,
    wasted_windows=10,
    misplaced_rows=11,
    record_slots_in_use=12,
    checkpoint_slots_in_use=13,
    boundary_slots=14,
    published_slots=15,
    reserved_slots=16,
    prefix_hits=17,
    prefix_misses=18,
    prefix_evictions=19,
    preemptions=20,
)

#: Without HELP lines.
TEXT = """\
# TYPE specstate:decode_windows_total counter
specstate:decode_windows_total 40.0
# TYPE specstate:spec_decode_num_drafts_total counter
specstate:spec_decode_num_drafts_total 30.0
# TYPE specstate:spec_decode_num_draft_tokens_total counter
specstate:spec_decode_num_draft_tokens_total 90.0
# TYPE specstate:spec_decode_num_accepted_tokens_total counter
specstate:spec_decode_num_accepted_tokens_total 45.0
# TYPE specstate:spec_decode_num_accepted_tokens_per_pos_total counter
specstate:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 25.0
specstate:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 15.0
specstate:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 5.0
# TYPE specstate:folds_total counter
specstate:folds_total{reason="at_end"} 1.0
specstate:folds_total{reason="when_full"} 2.0
specstate:folds_total{reason="by_mask"} 3.0
specstate:folds_total{reason="at_boundary"} 4.0
specstate:folds_total{reason="in_verify"} 5.0
specstate:folds_total{reason="by_flush"} 6.0
# TYPE specstate:pending_rows gauge
specstate:pending_rows 7.0
# TYPE specstate:late_ends_dropped_total counter
specstate:late_ends_dropped_total 8.0
# TYPE specstate:clamps_total counter
specstate:clamps_total 9.0
# TYPE specstate:wasted_windows_total counter
specstate:wasted_windows_total 10.0
# TYPE specstate:misplaced_rows_total counter
specstate:misplaced_rows_total 11.0
# TYPE specstate:record_slots_in_use gauge
specstate:record_slots_in_use 12.0
# TYPE specstate:checkpoint_slots_in_use gauge
specstate:checkpoint_slots_in_use 13.0
# TYPE specstate:boundary_slots gauge
specstate:boundary_slots 14.0
# TYPE specstate:published_slots gauge
specstate:published_slots 15.0
# TYPE specstate:reserved_slots gauge
specstate:reserved_slots 16.0
# TYPE specstate:prefix_cache_queries_total counter
specstate:prefix_cache_queries_total 35.0
# TYPE specstate:prefix_cache_hits_total counter
specstate:prefix_cache_hits_total 17.0
# TYPE specstate:prefix_cache_evictions_total counter
specstate:prefix_cache_evictions_total 19.0
# TYPE specstate:num_preemptions_total counter
specstate:num_preemptions_total 20.0
"""


class FakeManager:
    """Whose metrics are set, and read by one thread only."""

    def __init__(self, metrics: Metrics) -> None:
        self.now = metrics
        self.thread = threading.get_ident()
        self.reads = 0

    def metrics(self) -> Metrics:
        assert threading.get_ident() == self.thread
        self.reads += 1
        return self.now


def scrape(registry: CollectorRegistry) -> str:
    """Without HELP lines."""
    return re.sub(r"^# HELP .*\n", "", generate_latest(registry).decode(), flags=re.MULTILINE)


def number(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, labels)


def test_a_scrape_has_every_number() -> None:
    registry = CollectorRegistry()
    PrometheusExporter(FakeManager(FULL), registry)
    assert scrape(registry) == TEXT


def test_every_family_has_a_help_and_another_name() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert all(family.help.endswith(".") for family in FAMILIES)
    registry = CollectorRegistry()
    PrometheusExporter(FakeManager(FULL), registry)
    assert generate_latest(registry).decode().count("# HELP specstate:") == len(FAMILIES)


def test_the_open_format_takes_the_names_too() -> None:
    registry = CollectorRegistry()
    PrometheusExporter(FakeManager(FULL), registry)
    # As Prometheus 3 asks.
    encode, _ = choose_encoder("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8")
    text = encode(registry).decode()
    assert "# TYPE specstate:spec_decode_num_drafts counter\nspecstate:spec_decode_num_drafts_total 30.0\n" in text
    assert text.endswith("# EOF\n")


def test_a_window_of_one_token_has_no_positions() -> None:
    registry = CollectorRegistry()
    PrometheusExporter(FakeManager(make_metrics(accepted_per_position=())), registry)
    assert "position=" not in scrape(registry)


def test_a_scrape_leaves_the_manager_alone_and_an_update_reads_it_once() -> None:
    manager, registry = FakeManager(make_metrics()), CollectorRegistry()
    exporter = PrometheusExporter(manager, registry)
    manager.now = FULL
    assert number(registry, "decode_windows_total") == 0
    assert scrape(registry) == scrape(registry)
    assert manager.reads == 1
    exporter.update()
    assert manager.reads == 2
    assert scrape(registry) == TEXT


def test_labels_stand_at_every_sample() -> None:
    registry = CollectorRegistry()
    PrometheusExporter(FakeManager(FULL), registry, {"model_name": "kimi", "engine": '0"'})
    samples = [line for line in scrape(registry).splitlines() if not line.startswith("#")]
    assert len(samples) == TEXT.count("\nspecstate:")
    assert all('model_name="kimi"' in line and 'engine="0\\""' in line for line in samples)
    assert number(registry, "folds_total", model_name="kimi", engine='0"', reason="in_verify") == 5


def test_a_second_manager_is_told_apart_by_its_labels() -> None:
    target, draft, registry = FakeManager(FULL), FakeManager(make_metrics(windows=3)), CollectorRegistry()
    exporter = PrometheusExporter(target, registry, {"model": "target", "rank": "0"})
    exporter.add(draft, {"rank": "0", "model": "draft"})
    assert number(registry, "decode_windows_total", model="draft", rank="0") is None
    exporter.update()
    assert number(registry, "decode_windows_total", model="target", rank="0") == 40
    assert number(registry, "decode_windows_total", model="draft", rank="0") == 3
    # One group of samples a family, as the format asks.
    assert [family.name for family in text_string_to_metric_families(generate_latest(registry).decode())] == [
        PREFIX + family.name for family in FAMILIES
    ]


def test_counters_never_fall_and_gauges_do() -> None:
    manager, registry = FakeManager(FULL), CollectorRegistry()
    exporter = PrometheusExporter(manager, registry)
    manager.now = make_metrics(windows=41, accepted_per_position=(24, 16, 5))
    exporter.update()
    assert number(registry, "decode_windows_total") == 41
    assert number(registry, "clamps_total") == 9
    assert number(registry, "folds_total", reason="by_flush") == 6
    assert number(registry, "prefix_cache_queries_total") == 35
    assert number(registry, "spec_decode_num_accepted_tokens_per_pos_total", position="0") == 25
    assert number(registry, "spec_decode_num_accepted_tokens_per_pos_total", position="1") == 16
    assert number(registry, "pending_rows") == 0
    exporter.update()
    assert number(registry, "clamps_total") == 9


def test_an_update_that_fails_leaves_the_last_snapshot() -> None:
    registry = CollectorRegistry()
    exporter = PrometheusExporter(FakeManager(FULL), registry, {"model": "target"})

    class Failing:
        def metrics(self) -> Metrics:
            raise RuntimeError("out of order")

    exporter.add(Failing(), {"model": "draft"})
    before = scrape(registry)
    with pytest.raises(RuntimeError, match="out of order"):
        exporter.update()
    assert scrape(registry) == before


def test_scrapes_during_updates_see_whole_snapshots() -> None:
    """In each, all numbers are the same, and no lower than in the one before."""

    def equal(n: int) -> Metrics:
        folds = make_folds(at_end=n, when_full=n, by_mask=n, at_boundary=n, in_verify=n, by_flush=n)
        names = {name: n for name in Metrics.__slots__ if name not in ("folds", "accepted_per_position")}
        return make_metrics(**{**names, "folds": folds, "accepted_per_position": (n, n, n), "prefix_misses": 0})

    manager, registry = FakeManager(equal(0)), CollectorRegistry()
    exporter = PrometheusExporter(manager, registry)
    stop, seen, faults = threading.Event(), [0.0], []

    def scrapes() -> None:
        while not stop.is_set():
            numbers = {sample.value for family in registry.collect() for sample in family.samples}
            if len(numbers) != 1 or min(numbers) < seen[-1]:
                faults.append(numbers)
            seen.append(max(numbers))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=scrapes)
    thread.start()
    try:
        n = 0
        while n < 500 or (len(seen) < 50 and n < 100_000):
            n += 1
            manager.now = equal(n)
            exporter.update()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert faults == []
    assert len(set(seen)) > 1


def test_a_second_exporter_in_a_registry_is_refused_until_the_first_leaves() -> None:
    manager, registry = FakeManager(FULL), CollectorRegistry()
    first = PrometheusExporter(manager, registry)
    with pytest.raises(SpecStateError, match="add the manager to its exporter"):
        PrometheusExporter(manager, registry, {"model": "draft"})
    registry.unregister(first)
    assert scrape(registry) == ""
    PrometheusExporter(manager, registry)
    assert scrape(registry) == TEXT


def test_metrics_of_others_stay_in_the_registry() -> None:
    registry = CollectorRegistry()
    Gauge("mine", "Of the caller.", registry=registry).set(3)
    PrometheusExporter(FakeManager(FULL), registry)
    assert scrape(registry) == "# TYPE mine gauge\nmine 3.0\n" + TEXT


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"position": "0"}, "labels: 'position' is no name for a label, or one of position, reason, which are taken"),
        ({"reason": "x"}, "labels: 'reason' is no name"),
        ({"a-b": "x"}, "labels: 'a-b' is no name"),
        ({"a:b": "x"}, "labels: 'a:b' is no name"),
        ({"__name": "x"}, "labels: '__name' is no name"),
        ({"9a": "x"}, "labels: '9a' is no name"),
        ({"": "x"}, "labels: '' is no name"),
        ({3: "x"}, "labels: 3 is no name"),
        ({"rank": 3}, r"labels\['rank'\] = 3 must be a string"),
        ([("a", "b")], "labels must be a mapping of names to values, not list"),
    ],
)
def test_bad_labels_are_refused(labels: Any, says: str) -> None:
    manager, registry = FakeManager(FULL), CollectorRegistry()
    with pytest.raises(SpecStateError, match=says):
        PrometheusExporter(manager, registry, labels)
    assert (manager.reads, scrape(registry)) == (0, "")


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"model": "target"}, "labels = {'model': 'target'} are another manager's"),
        ({"rank": "0"}, r"labels must be named \['model'\], got \['rank'\]"),
        ({}, r"labels must be named \['model'\], got \[\]"),
        (None, "labels must be a mapping of names to values, not NoneType"),
    ],
)
def test_labels_that_tell_no_managers_apart_are_refused(labels: Any, says: str) -> None:
    registry = CollectorRegistry()
    exporter = PrometheusExporter(FakeManager(FULL), registry, {"model": "target"})
    before = scrape(registry)
    with pytest.raises(SpecStateError, match=says):
        exporter.add(FakeManager(FULL), labels)
    exporter.update()
    assert scrape(registry) == before


def test_a_registry_of_another_kind_is_refused() -> None:
    with pytest.raises(SpecStateError, match="registry must be a CollectorRegistry, not dict"):
        PrometheusExporter(FakeManager(FULL), {})  # type: ignore[arg-type]


def test_without_the_client_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SpecStateError, match=r"pip install 'specstate\[prometheus\]'"):
        PrometheusExporter(FakeManager(FULL), registry)
