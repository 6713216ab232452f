"""Records that a caller's own verify hands in: as the reference writes them, and nowhere else."""

import pytest
import torch

from specstate.validation import DTYPES
from tests.kernels.harness import ROUNDOFF, Rig, Row, bytes_of, check_written, row_error, small_config

ROWS = [Row(5, 0, 4), Row(0, 0, 1), Row(query_len=2, kind="dummy"), Row(30, 0, 3)]


@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 33, 24), (3, 24, 100)], ids="H {0[0]}, K {0[1]}, V {0[2]}".format)
@pytest.mark.parametrize(("taps", "dtype"), [(None, "float32"), (4, "bfloat16"), (3, "float16")])
def test_against_the_reference(
    taps: int | None, dtype: str, shape: tuple[int, int, int], path: str, device: str
) -> None:
    heads, k_dim, v_dim = shape
    config = small_config(
        path=path, num_heads=heads, head_k_dim=k_dim, head_v_dim=v_dim, conv_kernel_size=taps, activation_dtype=dtype
    )
    k_dim, v_dim = config.layer.head_k_dim, config.layer.head_v_dim
    rig = Rig(config, ROWS, device)
    steps, before = rig.begin(1, 4), rig.snapshot()[0]
    tokens, generator = steps[1].num_tokens, torch.Generator().manual_seed(2)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    kind = DTYPES[dtype]
    # As projections make them: every second token of a wider tensor, heads behind features.
    u = normal(2 * tokens, heads, v_dim, dtype=torch.float32)[::2]
    key = normal(tokens, k_dim, heads, dtype=kind).mT
    gate = normal(tokens, heads, 2 * k_dim, dtype=kind)[:, :, k_dim:]
    inputs = None if taps is None else normal(tokens, config.layer.conv_channels + 5, dtype=kind)[:, 5:]
    moved = [None if x is None else x.to(device) for x in (u, key, gate, inputs)]
    rig.kernels.write_records(steps[0], 0, *moved)
    rig.exact.write_records(steps[1], 0, u.double(), key, gate, inputs)
    check_written(rig, 0, before, folds=False)
    for row in rig.live:
        ours, theirs = rig.records(row)
        for name in ("record_u", "record_key", "record_gate"):
            assert torch.equal(ours[name].double(), theirs[name].double()), name
        torch.testing.assert_close(ours["record_inv_norm"], theirs["record_inv_norm"], rtol=4 * 2.0**-24, atol=0.0)
    if inputs is not None:
        for row in rig.live:
            ring, given = rig.storage.layers[0].conv_ring[rig.record_row(row)].cpu(), inputs[rig.window(row)]
            for t, token in enumerate(given):
                entry = (rig.rows[row].committed_len + t + taps - 1) % len(ring)
                assert torch.equal(bytes_of(ring[entry]), bytes_of(token))


def test_written_records_fold_like_verified_ones(path: str, device: str) -> None:
    """What verify recorded, handed in again by ``write_records``, folds to the same bits if norms are added alike."""
    config, states = small_config(path=path, head_k_dim=24, activation_dtype="bfloat16", num_heads=2), []
    for way in ("verify", "write"):
        rig = Rig(config, [Row(5, 0, 4)], device)
        steps = rig.begin()
        rig.verify(steps, 0, rig.inputs(4)[0])
        if way == "write":
            ours = rig.records(0)[0]
            u, key, gate = (ours[n].movedim(0, 1).to(device) for n in ("record_u", "record_key", "record_gate"))
            for ring in (rig.storage.layers[0].record_u, rig.storage.layers[0].record_key_gate):
                ring.fill_(torch.nan)
            rig.kernels.write_records(steps[0], 0, u, key, gate, None)
        rig.kernels.end(steps[0], torch.tensor([3], device=device), True, None)
        states.append(rig.storage.layers[0].recurrent[rig.slot(0)].cpu())
    if path == "portable":
        assert torch.equal(*map(bytes_of, states))
    else:
        # Their norms were added up by another kernel, in another order.
        assert row_error(*states) <= 4 * ROUNDOFF["float32"]


def test_no_tokens(path: str, device: str) -> None:
    config = small_config(path=path)
    rig = Rig(config, [Row(3, 0, 1)], device)
    staged = torch.tensor([2, 1, 0, 0, 10, 1, 0, 0, 0, 0, 0], dtype=torch.int32)
    step, before = rig.begin_staged(staged, 1, 0, 0)[0], rig.snapshot()[0]
    u, key = (torch.zeros(0, 1, size, device=device) for size in (config.layer.head_v_dim, config.layer.head_k_dim))
    rig.kernels.write_records(step, 0, u, key, key, None)
    assert not any(rig.written(0, before).values())
