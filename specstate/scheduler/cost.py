"""What a step takes beside state management: the rest of the model, as one line whose figures anybody can change.

    ms of a step = step_ms + ms_per_token n + ms_per_context_token c + 1000 p / prefill_tokens_per_s + state management

n tokens are verified in windows, p tokens of prompts run beside them, and c tokens are what the windows' requests have
in the KV cache of the model's attention layers. ``host_ms`` is what the host takes to plan a step; the device waits for
it unless steps are planned ahead. States that move to the host and back go at ``host_bytes_per_s``, copies on the
device (a prefix that is restored or published) at ``copy_bytes_per_s``.

Defaults for the presets follow from public figures, by the same formulas; they are bounds of the hardware with a usual
efficiency, not measurements. Put your own into a file (``--cost``).

    step_ms              = bytes of all weights / (tp * bandwidth)           a busy step touches nearly every expert
    ms_per_token         = 2 * active parameters / (tp * peak * 0.4)         a multiply and an add a parameter
    ms_per_context_token = attention layers * 576 * 2 bytes / bandwidth      MLA's latent, which every rank reads whole
    prefill_tokens_per_s = tp * peak * 0.4 / (2 * active parameters)

with an H200's bandwidth of 4.8 TB/s, of which 4.3 are reached, and its peak of 989 TFLOP/s in dense bfloat16 (NVIDIA's
data sheet). 40 % of the peak is what large dense products usually reach.
"""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specstate.errors import SpecStateError, shown
from specstate.validation import first_fault

BANDWIDTH = 4.3e12
PEAK_FLOPS = 989e12
EFFICIENCY = 0.4
MLA_LATENT_BYTES = 576 * 2
"""A token's entry in one MLA layer: kv_lora_rank 512 and 64 more, in bfloat16."""


class CostLine(BaseModel):
    """The cost file. Raises pydantic's ``ValidationError`` that names the field and the limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    step_ms: float = Field(ge=0.0, le=1e6, allow_inf_nan=False)
    """Of every step, whatever is in it."""
    ms_per_token: float = Field(ge=0.0, le=1e6, allow_inf_nan=False)
    """Of every token that a window verifies."""
    ms_per_context_token: float = Field(ge=0.0, le=1e6, allow_inf_nan=False)
    """Of every token in the KV cache of a request that has a window."""
    prefill_tokens_per_s: float = Field(gt=0.0, le=1e12, allow_inf_nan=False)
    host_ms: float = Field(default=0.0, ge=0.0, le=1e6, allow_inf_nan=False)
    """To plan a step."""
    host_bytes_per_s: float = Field(default=50e9, gt=0.0, le=1e15, allow_inf_nan=False)
    """Between device and host: PCIe 5.0 x16, of whose 64 GB/s about 50 are reached."""
    copy_bytes_per_s: float = Field(default=BANDWIDTH / 2, gt=0.0, le=1e15, allow_inf_nan=False)
    """Of copies on the device: every byte is read and written."""
    source: str = Field(default="a cost file", min_length=1)
    """Where the figures come from, for the report."""

    def step_rest_ms(self, tokens: int, context_tokens: int, prompt_tokens: int) -> float:
        """The formula of the module, without state management."""
        return (
            self.step_ms
            + self.ms_per_token * tokens
            + self.ms_per_context_token * context_tokens
            + 1e3 * prompt_tokens / self.prefill_tokens_per_s
        )


class _Model(BaseModel):
    """Public figures of a model."""

    model_config = ConfigDict(frozen=True)

    active_parameters: float
    weight_bytes: float
    attention_layers: int
    source: str


_MODELS = {
    "kimi-linear-48b": _Model(
        active_parameters=3e9,
        weight_bytes=96e9,
        attention_layers=7,
        source="moonshotai/Kimi-Linear-48B-A3B-Instruct: 48B parameters in bfloat16, 3B of them active, 7 MLA layers",
    ),
    "kimi-k3": _Model(
        active_parameters=104e9,
        weight_bytes=1.42e12,
        attention_layers=24,
        source="moonshotai/Kimi-K3: 2.8T parameters, 104B of them active, 24 MLA layers, a checkpoint of 1.42 TB with "
        "MXFP4 experts; eight H200s hold 1.13 TB, so eight ranks stand for devices of that speed with more memory",
    ),
}
"""K3: NVIDIA NeMo AutoModel's model page and the published checkpoint's size. Kimi Linear: its model card."""


def preset_cost(name: str, tp: int) -> CostLine:
    """The default of a preset on ``tp`` ranks. Raises SpecStateError for a model whose figures are not known."""
    model = _MODELS.get(name)
    if model is None:
        raise SpecStateError(f"no public figures for model {shown(name)}: give a cost file (--cost)")
    flops = tp * PEAK_FLOPS * EFFICIENCY
    return CostLine(
        step_ms=1e3 * model.weight_bytes / (tp * BANDWIDTH),
        ms_per_token=1e3 * 2 * model.active_parameters / flops,
        ms_per_context_token=1e3 * model.attention_layers * MLA_LATENT_BYTES / BANDWIDTH,
        prefill_tokens_per_s=flops / (2 * model.active_parameters),
        source=f"derived for {tp} rank{'s' if tp > 1 else ''} at an H200's speed from {model.source}",
    )


def load_cost(path: str | os.PathLike[str]) -> CostLine:
    """Reads a cost file, a JSON object with the fields of ``CostLine``.

    Raises SpecStateError with the file, the field and its value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError, TypeError, ValueError) as error:
        raise SpecStateError(
            f"{os.fspath(path)}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    try:
        return CostLine.model_validate_json(text)
    except ValidationError as error:
        raise SpecStateError(f"{os.fspath(path)}: {first_fault(error)}") from None
