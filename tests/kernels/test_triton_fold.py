"""The fold kernel against the reference in float64: in place, elsewhere, to a boundary, all layers in one launch."""

from collections.abc import Collection

import pytest
import torch

from specstate.kernels import reference
from specstate.kernels import rows as at
from tests.kernels.harness import AIM, ROUNDOFF, Rig, Row, bytes_of, row_error, small_config
from tests.kernels.test_triton_verify import SHAPES, shape_id

GATES = [pytest.param(None, id="softplus gate"), pytest.param(-5.0, id="bounded gate")]


def fold(
    rig: Rig,
    plan: list[list[int]],
    rewritten: Collection[tuple[int, int]] = (),
    first_layer: int = 0,
    num_layers: int | None = None,
) -> None:
    """Folds ``plan`` in both, and compares every destination: states within the budget, conv histories to the bit.

    ``rewritten``: places that get the state they have.
    """
    num_layers = rig.config.num_layers if num_layers is None else num_layers
    rows = torch.tensor(plan, dtype=torch.int32)
    before = rig.snapshot()
    rig.kernels._fold(rows.to(rig.device), first_layer, num_layers)
    layers = range(first_layer, first_layer + num_layers)
    for layer in layers:
        bound = rig.config.layer.gate_lower_bound
        reference.fold(rows, rig.exact_storage.layers[layer], rig.exact.params[layer], bound)
    limit = AIM + (ROUNDOFF["bfloat16"] if rig.config.checkpoint_dtype == "bfloat16" else 0.0)
    written = {(row[at.PLAN_DESTINATION], -1) for row in plan if row[at.PLAN_COUNT] and row[at.PLAN_SOURCE]}
    written |= {(row[at.PLAN_BOUNDARY_SLOT], -1) for row in plan if row[at.PLAN_BOUNDARY_SLOT] and row[at.PLAN_SOURCE]}
    for layer in range(rig.config.num_layers):
        changed = rig.written(layer, before[layer])
        expected = written if layer in layers else set()
        assert changed.pop("recurrent") == expected - {*rewritten}
        if (conv := changed.pop("conv", None)) is not None:
            assert conv == expected
        assert not any(changed.values()), "a fold writes no record"
        ours, theirs = rig.storage.layers[layer], rig.exact_storage.layers[layer]
        for slot, _ in expected:
            assert row_error(ours.recurrent[slot], theirs.recurrent[slot]) <= limit, f"slot {slot} of layer {layer}"
            if ours.conv is not None and theirs.conv is not None:
                assert torch.equal(ours.conv[slot].cpu(), theirs.conv[slot])


def in_place(rig: Rig, row: int, count: int | None = None) -> list[int]:
    held = rig.rows[row]
    slot, count = rig.slot(row), held.pending_len if count is None else count
    return [slot, slot, rig.record_row(row), held.checkpoint_len, count, 0, 0]


@pytest.mark.parametrize("bound", GATES)
@pytest.mark.parametrize("capacity", [8, 23, 40])
def test_every_count(capacity: int, bound: float | None, path: str, device: str) -> None:
    """0 to R records, beyond one tile of 16, at places that run over the ring's end; count 0 is left alone."""
    config = small_config(path=path, max_query_len=2, record_capacity=capacity, gate_lower_bound=bound, head_k_dim=24)
    rig = Rig(config, [Row(5 * m + 1, m) for m in range(capacity + 1)], device)
    fold(rig, [in_place(rig, row) for row in range(capacity + 1)])


@pytest.mark.parametrize(("path", "shape"), SHAPES, ids=shape_id)
def test_shapes(path: str, shape: tuple[int, int, int], device: str) -> None:
    heads, k_dim, v_dim = shape
    config = small_config(
        path=path, num_heads=heads, head_k_dim=k_dim, head_v_dim=v_dim, conv_kernel_size=4, num_layers=2
    )
    rig = Rig(config, [Row(3, 9), Row(11, 16)], device)
    fold(rig, [in_place(rig, 1), in_place(rig, 0)])


@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype: str, checkpoint: str, path: str, device: str) -> None:
    config = small_config(
        path=path, checkpoint_dtype=checkpoint, activation_dtype=dtype, conv_kernel_size=2, num_layers=2
    )
    rig = Rig(config, [Row(3, 9), Row(11, 16)], device)
    fold(rig, [in_place(rig, 1), in_place(rig, 0)])


@pytest.mark.parametrize("taps", [None, 2, 3, 4])
def test_source_destination_and_boundary(taps: int | None, path: str, device: str) -> None:
    """A copy-fold leaves its source alone; a boundary gets its own count, less, equal or more; null rows do nothing."""
    config = small_config(path=path, conv_kernel_size=taps, record_capacity=16, num_layers=2, num_heads=2)
    # Rows 3 and up own the slots that the plan writes to.
    rig = Rig(config, [Row(3, 9), Row(12, 8), Row(1, 5), *[Row()] * 4], device)
    spare = [rig.slot(row) for row in range(3, 7)]
    conv_of_all = rig.storage.layers[0].conv_ring
    if conv_of_all is not None:  # conv histories of earlier positions are asked for, so the whole ring is real
        for layer in rig.storage.layers:
            layer.conv_ring.copy_(torch.randn(conv_of_all.shape, generator=torch.Generator().manual_seed(5)))
        rig.copy_to_exact()
    plan = [
        [rig.slot(0), spare[0], 1, 3, 9, spare[1], 4],
        [rig.slot(1), rig.slot(1), 2, 12, 8, spare[2], 8],
        [rig.slot(2), spare[3], 3, 1, 0, 0, 0],
        [0, 0, -1, 0, 0, 0, 0],
    ]
    source = bytes_of(rig.storage.layers[1].recurrent[rig.slot(0)].cpu())
    fold(rig, plan)
    assert torch.equal(bytes_of(rig.storage.layers[1].recurrent[rig.slot(0)].cpu()), source)


@pytest.mark.parametrize("taps", [None, 4])
@pytest.mark.parametrize("counts", [(9, 4), (9, 0), (0, 4)], ids="{0[0]} and {0[1]} at the boundary".format)
def test_a_boundary_in_the_source_itself(counts: tuple[int, int], taps: int | None, path: str, device: str) -> None:
    """The running checkpoint moves on and leaves the boundary's behind where it lay, as a block table has it."""
    config = small_config(
        path=path, conv_kernel_size=taps, record_capacity=16, num_layers=2, num_heads=2, head_v_dim=80
    )
    rig = Rig(config, [Row(3, 9), Row(12, 9), Row(), Row()], device)
    for layer in rig.storage.layers:
        if layer.conv_ring is not None:  # earlier positions' histories are asked for, so the whole ring is real
            layer.conv_ring.copy_(torch.randn(layer.conv_ring.shape, generator=torch.Generator().manual_seed(5)))
    rig.copy_to_exact()
    count, boundary = counts
    plan = [[rig.slot(row), rig.slot(row + 2), row + 1, 3 + 9 * row, count, rig.slot(row), boundary] for row in (0, 1)]
    fold(rig, plan, {(rig.slot(row), -1) for row in (0, 1) if not boundary})


@pytest.mark.parametrize("taps", [None, 4])
def test_one_slot_for_source_destination_and_boundary(taps: int | None, path: str, device: str) -> None:
    """A window that ends on a boundary behind which a block table has no block: folded once."""
    config = small_config(path=path, conv_kernel_size=taps, record_capacity=16, num_layers=2, num_heads=2)
    rig = Rig(config, [Row(3, 9), Row(12, 9)], device)
    plan = [[rig.slot(row), rig.slot(row), row + 1, 3 + 9 * row, 9, rig.slot(row), 9] for row in (0, 1)]
    fold(rig, plan)


def test_boundary_alone(path: str, device: str) -> None:
    """Count 0 with a boundary: the boundary is written, the destination is left alone; boundary count 0 is a copy."""
    config = small_config(path=path, conv_kernel_size=4, num_layers=2)
    rig = Rig(config, [Row(3, 9), Row(), Row(4, 0), Row()], device)
    fold(
        rig, [[rig.slot(0), rig.slot(0), 1, 3, 0, rig.slot(1), 9], [rig.slot(2), rig.slot(2), 3, 4, 0, rig.slot(3), 0]]
    )
    for layer in rig.storage.layers:
        assert torch.equal(layer.recurrent[rig.slot(3)], layer.recurrent[rig.slot(2)])


def test_some_layers_alone(path: str, device: str) -> None:
    """A cancelled step folds the layers that did not verify."""
    rig = Rig(small_config(path=path, num_layers=3, conv_kernel_size=4), [Row(3, 9)], device)
    fold(rig, [in_place(rig, 0)], first_layer=1, num_layers=1)
    fold(rig, [in_place(rig, 0)], first_layer=2, num_layers=1)


def test_rows_fold_alike_in_any_company(path: str, device: str) -> None:
    """The same records give the same bits alone, among others and in another order."""
    config = small_config(path=path, record_capacity=24, num_heads=2, head_k_dim=24, conv_kernel_size=4)
    rows, states = [Row(7 * m, 3 * m) for m in range(8)], []
    for plan_rows in ([5], [5, 2], [0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5]):
        rig = Rig(config, rows, device)
        rig.kernels._fold(torch.tensor([in_place(rig, row) for row in plan_rows], dtype=torch.int32).to(device), 0, 1)
        layer = rig.storage.layers[0]
        states.append((bytes_of(layer.recurrent[rig.slot(5)].cpu()), bytes_of(layer.conv[rig.slot(5)].cpu())))
    for state, history in states[1:]:
        assert torch.equal(state, states[0][0])
        assert torch.equal(history, states[0][1])


def test_conv_channels_beyond_one_block(path: str, device: str) -> None:
    config = small_config(path=path, num_heads=2, head_k_dim=96, head_v_dim=80, conv_kernel_size=4)
    assert config.layer.conv_channels > 256
    rig = Rig(config, [Row(3, 4), Row(11, 2)], device)
    fold(rig, [in_place(rig, 0), in_place(rig, 1)])


def test_no_rows(path: str, device: str) -> None:
    rig = Rig(small_config(path=path), [Row(3, 4)], device)
    before = rig.snapshot()[0]
    rig.kernels._fold(torch.empty(0, at.PLAN_COLUMNS, dtype=torch.int32, device=device), 0, 1)
    assert not any(rig.written(0, before).values())
