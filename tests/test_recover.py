"""Snapshots brought back: what fails on the way, what finds no room, and traces of it."""

import io
from pathlib import Path
from typing import Any

import pytest

from specstate import CapacityError, Handle, PrefixKey, SpecStateError, StateManager, StepMetadata, TraceRecorder
from specstate.backends.metadata import MetadataBackend
from specstate.limits import MAX_GENERATION
from specstate.replay import replay_file
from specstate.transfer import read_file, write_file
from tests.factories import fingerprint, make_config


def empty(**options: Any) -> StateManager:
    config = make_config(**{"max_requests": 4, "num_checkpoints": 8, "block_size": 4, **options})
    return StateManager(config, None, backend="metadata")


def window(manager: StateManager, handle: Handle, query_len: int) -> None:
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(query_len,)))
    step.replayed("verify")
    step.defer([query_len])


def snapshot_of(manager: StateManager) -> io.BytesIO:
    file = io.BytesIO()
    manager.snapshot(file)
    file.seek(0)
    return file


def shared(preempted: bool = True) -> io.BytesIO:
    """A live request, one restored from a prefix, and the prefix."""
    manager = empty()
    a = manager.admit("a")
    window(manager, a, 4)
    manager.publish(a, PrefixKey("used", 4))
    sharer = manager.restore(PrefixKey("used", 4), "s")
    if preempted:
        manager.preempt(sharer)
    return snapshot_of(manager)


@pytest.mark.parametrize("failing", ["standing_at", "import_image", "put_checkpoint"])
def test_what_fails_on_the_way_leaves_it_empty(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, manager = shared(), empty()
    before = fingerprint(manager)
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise MemoryError

        patch.setattr(MetadataBackend, failing, fails)
        with pytest.raises(MemoryError):
            manager.recover(file)
    assert fingerprint(manager) == before
    manager.check_integrity()
    file.seek(0)
    assert [*manager.recover(file)] == ["a"]
    manager.check_integrity()
    manager.resume("s")
    manager.fence("drop")


def test_what_is_used_finds_room_before_what_is_not() -> None:
    manager = empty()
    a = manager.admit("a")
    window(manager, a, 4)
    manager.publish(a, PrefixKey("used", 4))
    manager.restore(PrefixKey("used", 4), "s")
    for name, length in (("old", 8), ("new", 12)):
        window(manager, a, 4)
        manager.publish(a, PrefixKey(name, length))
    manager.release(a)
    other = empty(max_requests=2, num_checkpoints=3)
    other.recover(snapshot_of(manager))
    assert [key.digest for key in other.published()] == ["used", "new"]
    assert other.metrics().published_slots == 2
    other.check_integrity()


def test_a_generation_that_leaves_no_lives_is_refused() -> None:
    header, images = read_file(shared())
    last = io.BytesIO()
    write_file(last, header.model_copy(update={"generation": MAX_GENERATION}), images)
    last.seek(0)
    manager = empty()
    manager.recover(last)
    before = fingerprint(manager)
    with pytest.raises(CapacityError, match="there is no generation for another"):
        manager.admit("b")
    assert fingerprint(manager) == before
    manager.check_integrity()
    with pytest.raises(SpecStateError, match="generation"):
        write_file(io.BytesIO(), header.model_copy(update={"generation": MAX_GENERATION + 1}), images)


def test_a_snapshot_names_the_request_that_has_too_much_pending() -> None:
    source = empty(fold_policy="ring", block_size=None)
    a = source.admit("a")
    window(source, a, 4)
    window(source, a, 4)
    target = empty(max_query_len=2, fold_policy="eager", record_capacity=2, block_size=None)
    with pytest.raises(SpecStateError, match=r"request 'a': image\.pending_len = 8 exceeds record_capacity = 2"):
        target.recover(snapshot_of(source))


def test_a_trace_of_a_recover_replays(tmp_path: Path) -> None:
    """Prefixes took their slots in the order of the file, not in that of their use."""
    source = empty(block_size=None)
    a = source.admit("a")
    source.load(a, None, 2)
    keys = PrefixKey("p", 2), PrefixKey("q", 2)
    for key in keys:
        source.publish(a, key)
    source.release(a)
    x, _ = (source.restore(key, name) for key, name in zip(keys, "xy", strict=True))
    source.preempt(x)
    with TraceRecorder(tmp_path / "trace") as recorder:
        manager = StateManager(source.config, None, backend="metadata", recorder=recorder)
        manager.recover(snapshot_of(source))
        manager.digest()
    for backend in ("metadata", "reference"):
        assert replay_file(tmp_path / "trace", backend=backend).first_difference is None


def test_a_trace_replays_that_publishes_the_checkpoint_of_an_import(tmp_path: Path) -> None:
    source = empty(fold_policy="ring", block_size=None)
    a = source.admit("a")
    source.load(a, None, 2)
    window(source, a, 1)
    file = io.BytesIO()
    source.export(a, file, fold=False)
    file.seek(0)
    with TraceRecorder(tmp_path / "trace") as recorder:
        manager = StateManager(source.config, None, backend="metadata", recorder=recorder)
        manager.publish(manager.import_request(file), PrefixKey("p", 2))
    for backend in ("metadata", "reference"):
        assert replay_file(tmp_path / "trace", backend=backend).first_difference is None


def test_a_replay_does_not_recompute_a_vast_import(tmp_path: Path) -> None:
    source = empty(block_size=None)
    source.load(source.admit("a"), None, 5_000_000)
    file = snapshot_of(source)
    with TraceRecorder(tmp_path / "trace") as recorder:
        StateManager(source.config, None, backend="metadata", recorder=recorder).recover(file)
    assert replay_file(tmp_path / "trace", backend="metadata").ok
    with pytest.raises(SpecStateError, match="beyond the 4194304 that a replay recomputes"):
        replay_file(tmp_path / "trace")
