"""Where tensors may lie: any slot stride, both conv layouts, slices of a projection; any address, any offset."""

import gc
import itertools

import pytest
import torch

from specstate import SpecStateError, StateManager, StepMetadata
from specstate.kernels.table import address
from tests.factories import (
    POLICIES,
    LayerInputs,
    fingerprint,
    make_inputs,
    make_params,
    make_twin,
    run_step,
    verify_all,
)
from tests.kernels.harness import AIM, Rig, Row, bytes_of, row_error, small_config

TOLERANCE = 2 * AIM  # of a state after several windows, each of whose corrections is off by AIM at most


def paged_storage(config, device: str, conv_layout: str, pad: int = 7, offset: int = 0):
    """Layers behind one another in each page: one slot of all layers, then ``pad`` elements that nobody owns."""
    spec, slots = config.layer, config.num_checkpoints + 1
    state = (spec.num_heads, spec.head_v_dim, spec.head_k_dim)
    size, history = torch.Size(state).numel(), spec.conv_history_len
    stride = config.num_layers * size + pad
    pages = torch.full((slots * stride + offset,), torch.nan, device=device)
    conv_size = spec.conv_channels * history
    conv_pages = torch.full((slots, config.num_layers, conv_size + 3), torch.nan, device=device)
    views = []
    for layer in range(config.num_layers):
        strides = (stride, size // state[0], state[2], 1)
        recurrent = pages.as_strided((slots, *state), strides, offset + layer * size)
        conv = conv_pages[:, layer, :conv_size]
        if conv_layout == "[C, W-1]":
            conv = conv.unflatten(1, (spec.conv_channels, history))
        else:
            conv = conv.unflatten(1, (history, spec.conv_channels)).mT
        views.append((recurrent, conv))
    return views, pages, conv_pages


@pytest.mark.parametrize("conv_layout", ["[C, W-1]", "[W-1, C]"])
@pytest.mark.parametrize("policy", POLICIES)
def test_callers_paged_memory(policy: str, conv_layout: str, device: str) -> None:
    """Views with a slot stride that fits no tile, also from an address that no vector load may take."""
    for offset in (0, 1):
        config = small_config(fold_policy=policy, conv_kernel_size=4, num_layers=2, max_requests=2)
        views, pages, conv_pages = paged_storage(config, device, conv_layout, offset=offset)
        outside = torch.ones_like(pages, dtype=torch.bool)
        for recurrent, _ in views:
            outside.as_strided(recurrent.shape, recurrent.stride(), recurrent.storage_offset()).fill_(False)
        params = make_params(config, device=device)
        manager = StateManager(config, params, device, backend="triton", storage=views, debug=True)
        rows = [(manager.admit(name), make_twin(config)) for name in "ab"]
        for seed in range(4):
            windows = [(handle, twin, 4 - i, 3 - i) for i, (handle, twin) in enumerate(rows)]
            run_step(manager, windows, seed, TOLERANCE, "commit" if seed == 3 else "defer")
        for layer, (recurrent, conv) in enumerate(views):
            slots = manager.checkpoint_slots([handle for handle, _ in rows]).tolist()
            for (_, twin), slot in zip(rows, slots, strict=True):
                assert row_error(recurrent[slot], twin.states[layer].recurrent) < TOLERANCE
                assert row_error(conv[slot], twin.states[layer].conv) == 0.0
            assert recurrent[0].isnan().all() and conv[0].isnan().all(), "the null slot"
        assert pages[outside].isnan().all(), "between the pages"
        assert conv_pages[:, :, -3:].isnan().all()


def test_sliced_inputs_and_output(device: str) -> None:
    """qkv, gate and beta as slices of one fused projection, the output inside a wider buffer: the same bits."""
    config = small_config(num_heads=2, conv_kernel_size=4, activation_dtype="bfloat16")
    outputs, states = [], []
    for fused in (False, True):
        rig = Rig(config, [Row(5, 3, 4), Row(2, 1, 3)], device)
        steps, inputs = rig.begin(), rig.inputs(7)[0]
        out = torch.full((7, 2, 16), torch.nan, device=device)
        wide = torch.full((7, 3, 2, 16), torch.nan, device=device)
        if fused:
            parts = [inputs.qkv, inputs.raw_gate.flatten(1), inputs.raw_beta]
            columns = [0, *itertools.accumulate(part.shape[1] + 3 for part in parts)]
            projection = torch.full((7, columns[-1]), torch.nan, device=device, dtype=torch.bfloat16)
            for start, part in zip(columns, parts, strict=False):
                projection[:, start : start + part.shape[1]] = part
            qkv, gate, beta = (
                projection[:, start : start + part.shape[1]] for start, part in zip(columns, parts, strict=False)
            )
            inputs, out = LayerInputs(qkv, gate.unflatten(1, (2, 16)), beta), wide[:, 1]
            rig.kernels.check_layout("raw_gate", inputs.raw_gate, "")
        rig.kernels.verify(steps[0], 0, inputs.qkv, inputs.raw_gate, inputs.raw_beta, out)
        outputs.append(out.clone())
        states.append([bytes_of(tensor) for tensor in rig.snapshot()[0].values()])
        assert not fused or (wide[:, 0].isnan().all() and wide[:, 2].isnan().all())
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("name", ["qkv", "raw_gate", "raw_beta", "out"])
def test_other_strides_are_refused_and_nothing_changes(name: str, device: str) -> None:
    config = small_config(num_heads=2, num_layers=1)
    manager = StateManager(config, make_params(config, device=device), device, backend="triton", debug=True)
    step = manager.begin_step(StepMetadata(handles=(manager.admit("a"),), query_lens=(3,)))
    inputs = make_inputs(config, 3, 0, device)[0]
    given = {"qkv": inputs.qkv, "raw_gate": inputs.raw_gate, "raw_beta": inputs.raw_beta}
    given["out"] = torch.full((3, 2, 16), 7.0, device=device)
    given[name] = torch.stack([given[name], given[name]], -1)[..., 0]
    before = fingerprint(manager, step)
    with pytest.raises(SpecStateError, match=rf"{name} must be contiguous behind its first dimension.*\(step 0\)"):
        step.verify(0, **given)
    assert fingerprint(manager, step) == before
    assert (given["out"] == 7.0).all()


def test_a_recurrent_view_with_other_inner_strides_is_refused(device: str) -> None:
    config = small_config(max_requests=2)
    turned = torch.zeros(3, 1, 16, 16, device=device).mT
    with pytest.raises(SpecStateError, match=r"storage\[0\]\.recurrent must be contiguous behind its first"):
        StateManager(config, make_params(config, device=device), device, backend="triton", storage=[(turned, None)])


def test_parameters_that_are_not_contiguous_are_refused_and_change_nothing(device: str) -> None:
    config = small_config(max_requests=2)
    manager = StateManager(config, make_params(config, device=device), device, backend="triton", debug=True)
    twin, handle = make_twin(config), manager.admit("a")
    [layer] = make_params(config, 1, device)
    turned = torch.stack([layer.dt_bias, layer.dt_bias], -1)[..., 0]
    before = fingerprint(manager)
    with pytest.raises(SpecStateError, match=r"params\[0\]\.dt_bias must be contiguous"):
        manager.set_params([type(layer)(layer.A_log, turned)])
    assert fingerprint(manager) == before
    run_step(manager, [(handle, twin, 4, 3)], 0, TOLERANCE, "commit")


def test_replaced_storage_is_refused(device: str) -> None:
    """A table points at memory that is another's by now; the next step or fork says so before anything is launched."""
    config = small_config(max_requests=2, conv_kernel_size=4, num_layers=2)
    for kind in (0, 1):
        views, *_ = paged_storage(config, device, "[C, W-1]")
        params = make_params(config, device=device)
        manager = StateManager(config, params, device, backend="triton", storage=views, debug=False)
        handle = manager.admit("a")
        held = manager._backend.storage.layers[1][kind]
        other = torch.zeros_like(held)
        held.set_(other)
        with pytest.raises(SpecStateError, match=r"storage\[1\] was replaced: it lies at .*was built over"):
            manager.begin_step(StepMetadata(handles=(handle,), query_lens=(1,)))
        with pytest.raises(SpecStateError, match=r"storage\[1\] was replaced"):
            manager.fork(handle, ["b"])
        assert not other.any()
        assert manager.can_admit(1)


def test_addresses_are_twos_complement() -> None:
    wanted = {0: 0, 1: 1, 2**63 - 1: 2**63 - 1, 2**63: -(2**63), 2**63 + 8: -(2**63) + 8, 2**64 - 8: -8, 2**64 - 1: -1}
    for pointer, held in wanted.items():
        assert address(pointer) == held
        assert int(torch.tensor([address(pointer)], dtype=torch.int64)) % 2**64 == pointer
    for pointer in (-1, 2**64, 2**65):
        with pytest.raises(SpecStateError, match=f"address {pointer} is outside"):
            address(pointer)


@pytest.mark.gpu
def test_more_than_65535_rows_heads_and_layers(device: str) -> None:
    """One launch of the fold: 300 rows x 64 heads x 4 layers, and a verify of 1,100 rows x 64 heads."""
    config = small_config(num_heads=64, num_layers=4, max_requests=1100, record_capacity=8, conv_kernel_size=4)
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    handles = tuple(manager.admit(str(i)) for i in range(1100))
    twins = {row: make_twin(config) for row in (0, 299, 1099)}
    for seed, verb in ((0, "defer"), (1, "commit")):
        inputs = make_inputs(config, 2 * 1100, seed, device)
        step = manager.begin_step(StepMetadata(handles=handles, query_lens=(2,) * 1100))
        verify_all(step, inputs)
        counts = torch.full((1100,), 2, device=device)
        step.defer(counts) if verb == "defer" else step.commit(counts)
        for row, twin in twins.items():
            twin.commit([tensors[2 * row : 2 * row + 2] for tensors in inputs], 2)
    slots = manager.checkpoint_slots(handles).tolist()
    for row, twin in twins.items():
        for layer, state in enumerate(twin.states):
            assert row_error(manager.checkpoints(layer)[0][slots[row]], state.recurrent) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_slot_offsets_beyond_two_to_the_31(policy: str, device: str) -> None:
    """Recurrent and conv slots whose element offset does not fit int32; 5 GB of bf16 pages."""
    stride = 2**30 + 16
    config = small_config(
        checkpoint_dtype="bfloat16", activation_dtype="bfloat16", max_requests=2, conv_kernel_size=4, fold_policy=policy
    )
    channels = config.layer.conv_channels
    pages = torch.zeros(2 * stride + 4096, dtype=torch.bfloat16, device=device)
    recurrent = pages.as_strided((3, 1, 16, 16), (stride, 256, 16, 1))
    conv = pages.as_strided((3, channels, 3), (stride, 3, 1), 512)
    manager = StateManager(
        config, make_params(config, device=device), device, backend="triton", storage=[(recurrent, conv)]
    )
    twin = make_twin(config)
    manager.admit("low")
    handle = manager.admit("high")
    assert int(manager.checkpoint_slots([handle])[0]) * stride >= 2**31
    for seed in range(3):
        inputs = make_inputs(config, 4, seed, device)
        step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(4,)))
        verify_all(step, inputs)
        counts = torch.tensor([4], device=device)
        step.commit(counts) if seed == 2 else step.defer(counts)
        twin.commit(inputs, 4)
    # Three windows rounded to bf16: keys and values behind the conv, and the state at each fold.
    assert row_error(recurrent[2], twin.states[0].recurrent) < 6 * 2.0**-8
    assert row_error(conv[2], twin.states[0].conv) == 0.0
    assert not recurrent[1].any()
    del pages, recurrent, conv, manager
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_record_offsets_beyond_two_to_the_31(device: str) -> None:
    """Record slots far out: 2^31 elements of keys and gates, with few checkpoints."""
    config = small_config(
        head_k_dim=256, num_heads=2, max_query_len=16, record_capacity=64, activation_dtype="bfloat16"
    )
    rows = 2**31 // (2 * 64 * 2 * 256) + 2
    config = config.model_copy(update={"max_requests": rows, "num_checkpoints": rows})
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    # Slots are handed out in order, so only the last of them are wanted.
    manager._ledger.record_slots._free = [rows - 1]
    handle, twin = manager.admit("last"), make_twin(config)
    assert handle.record_slot * 2 * 64 * 2 * 256 >= 2**31
    # Outputs come rounded to bf16, once.
    for seed, (query_len, accepted) in enumerate([(16, 12), (16, 16), (3, 3)]):
        run_step(manager, [(handle, twin, query_len, accepted)], seed, 2.0**-8, "commit" if seed == 2 else "defer")
    assert row_error(manager.read(handle, 0).recurrent, twin.states[0].recurrent) < TOLERANCE
