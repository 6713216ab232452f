"""A request's committed state outside of a manager, on the CPU: what an export makes and an import takes."""

from dataclasses import dataclass, fields

import torch

from specstate.config import StateConfig
from specstate.errors import SpecStateError, shown
from specstate.limits import MAX_POSITION
from specstate.validation import DTYPES, check_flag, check_tensor


@dataclass(frozen=True, slots=True, eq=False)
class ImagePayload:
    """The tensors of an image, all layers in one. L layers, m pending records, oldest first.

    Nothing here depends on the rings of the manager that it came from: records and inputs lie in order of position.
    """

    recurrent: torch.Tensor
    """[L, H, V, K] in the checkpoint dtype, at checkpoint_len."""
    conv: torch.Tensor | None
    """[L, C, W-1] in the activation dtype, oldest input first, at checkpoint_len; None when the model convolves itself.
    """
    u: torch.Tensor | None = None
    """[L, H, m, V] float32, or float64 with float64 checkpoints; None, as the others below, when nothing is pending."""
    key_gate: torch.Tensor | None = None
    """[L, H, m, 2, K] in the activation dtype: keys after conv and SiLU, raw gates."""
    inv_norm: torch.Tensor | None = None
    """[L, H, m] float32, 1/|k|."""
    conv_history: torch.Tensor | None = None
    """As ``conv``, at committed_len; None without a conv, and when nothing is pending, for then it is ``conv``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, slots=True, eq=False)
class RequestImage:
    """Where a request stands, and with which state. Its sampling parameters go beside it."""

    checkpoint_len: int
    pending_len: int
    """m, records in the payload that are not in its checkpoint."""
    finished: bool
    payload: ImagePayload | None
    """None from backend "metadata"."""

    @property
    def committed_len(self) -> int:
        return self.checkpoint_len + self.pending_len


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """What one tensor of a payload must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def payload_tensors(config: StateConfig, pending_len: int) -> dict[str, ImageTensor]:
    """The tensors that a payload with ``pending_len`` records has under ``config``, by name; allocates nothing."""
    layer, layers = config.layer, config.num_layers
    heads, k_dim, v_dim = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    checkpoint, activation = DTYPES[config.checkpoint_dtype], DTYPES[config.activation_dtype]
    record = torch.float64 if config.checkpoint_dtype == "float64" else torch.float32
    conv = ImageTensor((layers, layer.conv_channels, layer.conv_history_len), activation)

    tensors = {"recurrent": ImageTensor((layers, heads, v_dim, k_dim), checkpoint)}
    if layer.conv_history_len:
        tensors["conv"] = conv
    if pending_len:
        tensors["u"] = ImageTensor((layers, heads, pending_len, v_dim), record)
        tensors["key_gate"] = ImageTensor((layers, heads, pending_len, 2, k_dim), activation)
        tensors["inv_norm"] = ImageTensor((layers, heads, pending_len), torch.float32)
        if layer.conv_history_len:
            tensors["conv_history"] = conv
    return tensors


def check_image(image: RequestImage, config: StateConfig) -> None:
    """Raises SpecStateError when lengths or tensors are none that a request of ``config``'s layers can have.

    How many records a config holds is not looked at: an image may come from another.
    """
    for name, value in (("checkpoint_len", image.checkpoint_len), ("pending_len", image.pending_len)):
        if type(value) is not int or not 0 <= value <= MAX_POSITION:
            raise SpecStateError(f"image.{name} = {shown(value)} is outside 0..{MAX_POSITION}")
    if image.committed_len > MAX_POSITION:
        raise SpecStateError(f"image.committed_len = {image.committed_len} exceeds {MAX_POSITION}")
    check_flag("image.finished", image.finished)
    if image.payload is None:
        return
    tensors, wanted = image.payload.tensors(), payload_tensors(config, image.pending_len)
    for name in (*wanted, *tensors):
        if name not in wanted:
            reason = "without a convolution" if image.pending_len or name == "conv" else "when nothing is pending"
            raise SpecStateError(f"image.{name} must be None {reason}")
        shape, dtype = wanted[name].shape, wanted[name].dtype
        check_tensor(f"image.{name}", tensors.get(name), shape, [dtype], torch.device("cpu"))


def check_room(pending_len: int, config: StateConfig) -> None:
    """Raises SpecStateError when an image has more pending records than a request of ``config`` can hold."""
    if pending_len > config.record_capacity:
        raise SpecStateError(
            f"image.pending_len = {pending_len} exceeds record_capacity = {config.record_capacity}: export it folded"
        )
