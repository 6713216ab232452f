"""Where tensors may lie: any slot stride, both conv layouts, slices of a projection; any address, any offset."""

import gc
import itertools
import math

import pytest
import torch

from specstate import SpecStateError, StateConfig, StateManager, StepMetadata
from specstate.kernels.table import address
from specstate.validation import DTYPES
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
from tests.kernels.harness import AIM, Rig, Row, bytes_of, check_verify, rounding_budget, row_error, small_config

TOLERANCE = 2 * AIM  # of a state after several windows, each of whose corrections is off by AIM at most


def paged_storage(config, device: str, conv_layout: str, offset: int = 0):
    """Layers behind one another in each page: one slot of all layers, then some elements that nobody owns.

    Kernels for Hopper GPUs take slot strides that are multiples of 16 bytes.
    """
    pad, conv_pad = (8, 4) if config.path == "hopper" else (7, 3)
    spec, slots = config.layer, config.num_checkpoints + 1
    state = (spec.num_heads, spec.head_v_dim, spec.head_k_dim)
    size, history = torch.Size(state).numel(), spec.conv_history_len
    stride = config.num_layers * size + pad
    pages = torch.full((slots * stride + offset,), torch.nan, device=device)
    conv_size = spec.conv_channels * history
    conv_pages = torch.full((slots, config.num_layers, conv_size + conv_pad), torch.nan, device=device)
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
def test_callers_paged_memory(policy: str, conv_layout: str, path: str, device: str) -> None:
    """Views with a slot stride that fits no tile, also from an address that no vector load of a tile may take."""
    for offset in (0, 4 if path == "hopper" else 1):
        config = small_config(path=path, fold_policy=policy, conv_kernel_size=4, num_layers=2, max_requests=2)
        views, pages, conv_pages = paged_storage(config, device, conv_layout, offset)
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


def interleaved_storage(
    config: StateConfig, device: str, conv_layout: str, separate: bool
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """Each slot's state and conv history of a layer behind one another, then at least 16 bytes that nobody owns.

    separate: every layer in an allocation of its own, else all layers of a slot behind one another. Returns the views,
    and the memory as bytes.
    """
    spec, slots = config.layer, config.num_checkpoints + 1
    state, history = (spec.num_heads, spec.head_v_dim, spec.head_k_dim), spec.conv_history_len
    dtypes = DTYPES[config.checkpoint_dtype], DTYPES[config.activation_dtype]
    state_bytes = math.prod(state) * dtypes[0].itemsize
    conv_bytes = spec.conv_channels * history * dtypes[1].itemsize
    page = (state_bytes + conv_bytes) // 16 * 16 + 32
    stride = page if separate else config.num_layers * page
    memory = [
        torch.full((slots * stride,), 0xFF, dtype=torch.uint8, device=device)
        for _ in range(config.num_layers if separate else 1)
    ]
    views = []
    for layer in range(config.num_layers):
        own, start = (memory[layer], 0) if separate else (memory[0], layer * page)
        as_state, as_conv = own.view(dtypes[0]), own.view(dtypes[1])
        recurrent = as_state.as_strided(
            (slots, *state),
            (stride // dtypes[0].itemsize, state[1] * state[2], state[2], 1),
            start // dtypes[0].itemsize,
        )
        conv = as_conv.as_strided(
            (slots, spec.conv_channels, history),
            (stride // dtypes[1].itemsize, *((history, 1) if conv_layout == "[C, W-1]" else (1, spec.conv_channels))),
            (start + state_bytes) // dtypes[1].itemsize,
        )
        views.append((recurrent, conv))
    return views, memory


@pytest.mark.parametrize(
    ("separate", "conv_layout", "checkpoint", "activation"),
    [
        (False, "[C, W-1]", "float32", "float32"),
        (True, "[W-1, C]", "bfloat16", "bfloat16"),
        (False, "[W-1, C]", "float32", "bfloat16"),
    ],
    ids=["one allocation, fp32", "separate, bf16", "one allocation, fp32 and bf16"],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_conv_histories_between_the_states(
    policy: str, separate: bool, conv_layout: str, checkpoint: str, activation: str, path: str, device: str
) -> None:
    """Slot strides of a multiple of 16 bytes and of nothing more; no byte between the views changes."""
    config = small_config(
        path=path,
        fold_policy=policy,
        conv_kernel_size=4,
        num_layers=3,
        max_requests=3,
        checkpoint_dtype=checkpoint,
        activation_dtype=activation,
    )
    views, memory = interleaved_storage(config, device, conv_layout, separate)
    marks, owned = interleaved_storage(config, device, conv_layout, separate)
    for tensor in owned:
        tensor.zero_()
    for pair in marks:
        for view in pair:
            view[1:].view({4: torch.int32, 2: torch.int16}[view.itemsize]).fill_(-1)
    manager = StateManager(config, make_params(config, device=device), device, backend="triton", storage=views)
    rows = [(manager.admit(name), make_twin(config)) for name in "abc"]
    # Outputs, conv outputs and states are rounded to bf16, a few of them after one another.
    tolerance = TOLERANCE if activation == "float32" else 8 * 2.0**-8
    for seed in range(4):
        windows = [(handle, twin, 4 - i, 3 - i) for i, (handle, twin) in enumerate(rows)]
        run_step(manager, windows, seed, tolerance, "commit" if seed == 3 else "defer")
    slots = manager.checkpoint_slots([handle for handle, _ in rows]).tolist()
    for layer, (recurrent, conv) in enumerate(views):
        for (_, twin), slot in zip(rows, slots, strict=True):
            assert row_error(recurrent[slot], twin.states[layer].recurrent) < tolerance
            assert row_error(conv[slot], twin.states[layer].conv) == 0.0
    for held, own in zip(memory, owned, strict=True):
        assert (held[own == 0] == 0xFF).all(), "the null slot, or between the views"


def placed(tensor: torch.Tensor, start: int, width: int) -> torch.Tensor:
    """``tensor`` [tokens, ..] inside lines of ``width`` elements of NaN, ``start`` elements in."""
    lines = torch.full((len(tensor), width), torch.nan, dtype=tensor.dtype, device=tensor.device)
    flat = tensor.flatten(1)
    lines[:, start : start + flat.shape[1]] = flat
    return lines[:, start : start + flat.shape[1]].unflatten(1, tensor.shape[1:])


@pytest.mark.parametrize("taps", [None, 4], ids=["no conv", "conv 4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_inputs_and_output_at_any_address(dtype: str, taps: int | None, path: str, device: str) -> None:
    """Bases and token strides that no vector load may take, or that only a short one may: as exact as aligned ones."""
    config = small_config(path=path, num_heads=2, conv_kernel_size=taps, activation_dtype=dtype)
    outputs = []
    for start, more in ((0, 0), (0, 1), (1, 16), (3, 8), (4, 12), (8, 8)):
        rig = Rig(config, [Row(5, 3, 4), Row(query_len=1, kind="dummy"), Row(2, 1, 3)], device)
        steps, inputs = rig.begin(1, 2), rig.inputs(10)[0]
        out = torch.full((10, 2, config.layer.head_v_dim), torch.nan, device=device)
        given = [
            placed(x, start, (x[0].numel() + 7) // 8 * 8 + more)
            for x in (inputs.qkv, inputs.raw_gate, inputs.raw_beta, out)
        ]
        pair = rig.verify(steps, 0, LayerInputs(*given[:3]), given[3])
        check_verify(rig, pair)
        outputs.append(pair[0])
    for output in outputs[1:]:
        if path == "portable":
            assert torch.equal(output, outputs[0])
        else:
            assert row_error(output, outputs[0]) <= 2 * rounding_budget(config)


def test_sliced_inputs_and_output(path: str, device: str) -> None:
    """qkv, gate and beta as slices of one fused projection, the output inside a wider buffer: the same bits.

    Kernels for Hopper GPUs may read what is not aligned in another way, which is as exact.
    """
    config = small_config(path=path, num_heads=2, conv_kernel_size=4, activation_dtype="bfloat16")
    k_dim, v_dim = config.layer.head_k_dim, config.layer.head_v_dim
    outputs, states = [], []
    for fused in (False, True):
        rig = Rig(config, [Row(5, 3, 4), Row(2, 1, 3)], device)
        steps, inputs = rig.begin(), rig.inputs(7)[0]
        out = torch.full((7, 2, v_dim), torch.nan, device=device)
        wide = torch.full((7, 3, 2, v_dim), torch.nan, device=device)
        if fused:
            parts = [inputs.qkv, inputs.raw_gate.flatten(1), inputs.raw_beta]
            columns = [0, *itertools.accumulate(part.shape[1] + 3 for part in parts)]
            projection = torch.full((7, columns[-1]), torch.nan, device=device, dtype=torch.bfloat16)
            for start, part in zip(columns, parts, strict=False):
                projection[:, start : start + part.shape[1]] = part
            qkv, gate, beta = (
                projection[:, start : start + part.shape[1]] for start, part in zip(columns, parts, strict=False)
            )
            inputs, out = LayerInputs(qkv, gate.unflatten(1, (2, k_dim)), beta), wide[:, 1]
            rig.kernels.check_layout("raw_gate", inputs.raw_gate, "")
        check_verify(rig, rig.verify(steps, 0, inputs, out))
        outputs.append(out.clone())
        states.append([bytes_of(tensor) for tensor in rig.snapshot()[0].values()])
        assert not fused or (wide[:, 0].isnan().all() and wide[:, 2].isnan().all())
    if path == "portable":
        assert torch.equal(*outputs)
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    else:
        assert row_error(*outputs) <= 2 * rounding_budget(config)


@pytest.mark.parametrize("name", ["qkv", "raw_gate", "raw_beta", "out"])
def test_other_strides_are_refused_and_nothing_changes(name: str, path: str, device: str) -> None:
    config = small_config(path=path, num_heads=2, num_layers=1)
    manager = StateManager(config, make_params(config, device=device), device, backend="triton", debug=True)
    step = manager.begin_step(StepMetadata(handles=(manager.admit("a"),), query_lens=(3,)))
    inputs = make_inputs(config, 3, 0, device)[0]
    given = {"qkv": inputs.qkv, "raw_gate": inputs.raw_gate, "raw_beta": inputs.raw_beta}
    given["out"] = torch.full((3, 2, config.layer.head_v_dim), 7.0, device=device)
    given[name] = torch.stack([given[name], given[name]], -1)[..., 0]
    before = fingerprint(manager, step)
    with pytest.raises(SpecStateError, match=rf"{name} must be contiguous behind its first dimension.*\(step 0\)"):
        step.verify(0, **given)
    assert fingerprint(manager, step) == before
    assert (given["out"] == 7.0).all()


def test_a_recurrent_view_with_other_inner_strides_is_refused(path: str, device: str) -> None:
    config = small_config(path=path, max_requests=2)
    turned = torch.zeros(3, 1, config.layer.head_k_dim, config.layer.head_v_dim, device=device).mT
    with pytest.raises(SpecStateError, match=r"storage\[0\]\.recurrent must be contiguous behind its first"):
        StateManager(config, make_params(config, device=device), device, backend="triton", storage=[(turned, None)])


def test_parameters_that_are_not_contiguous_are_refused_and_change_nothing(path: str, device: str) -> None:
    config = small_config(path=path, max_requests=2)
    manager = StateManager(config, make_params(config, device=device), device, backend="triton", debug=True)
    twin, handle = make_twin(config), manager.admit("a")
    [layer] = make_params(config, 1, device)
    turned = torch.stack([layer.dt_bias, layer.dt_bias], -1)[..., 0]
    before = fingerprint(manager)
    with pytest.raises(SpecStateError, match=r"params\[0\]\.dt_bias must be contiguous"):
        manager.set_params([type(layer)(layer.A_log, turned)])
    assert fingerprint(manager) == before
    run_step(manager, [(handle, twin, 4, 3)], 0, TOLERANCE, "commit")


def test_replaced_storage_is_refused(path: str, device: str) -> None:
    """A table points at memory that is another's by now; the next step or fork says so before anything is launched."""
    config = small_config(path=path, max_requests=2, conv_kernel_size=4, num_layers=2)
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
def test_more_than_65535_rows_heads_and_layers(path: str, device: str) -> None:
    """One launch of the fold: 1,100 rows x 64 heads x 2 layers, and a verify of 1,100 rows x 64 heads."""
    config = small_config(
        path=path, num_heads=64, num_layers=2, max_requests=1100, record_capacity=8, conv_kernel_size=4
    )
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
def test_slot_offsets_beyond_two_to_the_31(policy: str, path: str, device: str) -> None:
    """Recurrent and conv slots whose element offset does not fit int32; 5 GB of bf16 pages."""
    stride = 2**30 + 16
    config = small_config(
        path=path,
        checkpoint_dtype="bfloat16",
        activation_dtype="bfloat16",
        max_requests=2,
        conv_kernel_size=4,
        fold_policy=policy,
    )
    channels, k_dim, v_dim = config.layer.conv_channels, config.layer.head_k_dim, config.layer.head_v_dim
    pages = torch.zeros(2 * stride + 16384, dtype=torch.bfloat16, device=device)
    recurrent = pages.as_strided((3, 1, v_dim, k_dim), (stride, v_dim * k_dim, k_dim, 1))
    conv = pages.as_strided((3, channels, 3), (stride, 3, 1), v_dim * k_dim)
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
def test_record_offsets_beyond_two_to_the_31(path: str, device: str) -> None:
    """Record slots far out: 2^31 elements of keys and gates, with few checkpoints."""
    k_dim = 256 if path == "portable" else 128
    config = small_config(
        path=path, head_k_dim=k_dim, num_heads=2, max_query_len=16, record_capacity=64, activation_dtype="bfloat16"
    )
    rows = 2**31 // (2 * 64 * 2 * k_dim) + 2
    config = config.model_copy(update={"max_requests": rows, "num_checkpoints": rows})
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    # Slots are handed out in order, so only the last of them are wanted.
    manager._ledger.record_slots._free = [rows - 1]
    handle, twin = manager.admit("last"), make_twin(config)
    assert handle.record_slot * 2 * 64 * 2 * k_dim >= 2**31
    # Outputs come rounded to bf16, once.
    for seed, (query_len, accepted) in enumerate([(16, 12), (16, 16), (3, 3)]):
        run_step(manager, [(handle, twin, query_len, accepted)], seed, 2.0**-8, "commit" if seed == 2 else "defer")
    assert row_error(manager.read(handle, 0).recurrent, twin.states[0].recurrent) < TOLERANCE
