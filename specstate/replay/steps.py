"""A step of a trace while it is open: runs its layers over the windows and compares what they put out."""

from dataclasses import dataclass, field
from typing import Any

import torch

from specstate.metadata import StepMetadata
from specstate.replay.checks import Checks, Differs
from specstate.replay.inputs import TokenInputs, token_inputs
from specstate.replay.model import Expected, ExpectedToken, Life, Model
from specstate.step import Step
from specstate.validation import DTYPES


@dataclass(slots=True, eq=False)
class OpenStep:
    """A step that has begun and not ended."""

    step: Step
    metadata: StepMetadata
    rows: list[Life | None]
    """None: dummies, and from then on requests that were released."""
    lines: list[tuple[int, ...]] | None = None
    """By row, what the caller's block table says; None without one. A line that is not used is empty."""
    attempts: list[list[int]] | None = None
    """By row, from the first verify on: see ``Life.attempts``."""
    num_verified: int = 0
    num_written: int = 0
    num_released: int = 0
    prefixes: dict[int, list[list[Expected]]] = field(default_factory=dict)
    """By layer and row: the states after 0 .. query_len tokens of the window."""

    @property
    def lives(self) -> list[Life]:
        return [life for life in self.rows if life is not None]

    @property
    def slots(self) -> set[int]:
        return {life.checkpoint_slot for life in self.lives}

    def release(self, life: Life) -> None:
        self.rows[self.rows.index(life)] = None
        self.num_released += 1

    def least_accepted(self, row: int) -> int:
        """Below it a count is clamped: the stated minimum, else a prompt row's whole window, else its first token.

        In words of its own: what the manager clamps with must not say here what is right.
        """
        if self.metadata.min_accepted is not None:
            return self.metadata.min_accepted[row]
        return self.metadata.query_lens[row] if self.is_prompt(row) else 1

    def is_prompt(self, row: int) -> bool:
        """Whether the row feeds a prompt, which goes on whatever was sampled before."""
        return self.metadata.row_kinds is not None and self.metadata.row_kinds[row] == "prompt"

    def by_entry(self, values: tuple[Any, ...], poison: Any) -> torch.Tensor:
        """Counts or a mask as a caller gives them: entry batch_index[i] for row i, ``poison`` where none may look."""
        index = self.metadata.batch_index or range(len(values))
        live = [row for row, handle in enumerate(self.metadata.handles) if handle is not None]
        by_entry = [poison] * max([self.step.num_rows, *(index[row] + 1 for row in live)])
        for row in live:
            by_entry[index[row]] = values[row]
        return torch.tensor(by_entry, dtype=torch.bool if isinstance(poison, bool) else torch.int32)


class Verifier:
    """Brings the layers of open steps as far as the trace says. Raises Differs.

    ``recorded_layers``: of the recorded manager. A replay in fewer layers maps none to none, all to all, and anything
    else to one.
    """

    def __init__(self, model: Model, checks: Checks, recorded_layers: int, payloads: bool) -> None:
        self._model, self._checks, self._payloads = model, checks, payloads
        self._config = model.config
        self._recorded_layers = recorded_layers

    def catch_up(self, open_step: OpenStep, verified: int, written: int) -> None:
        """``verified`` of the recorded layers have verified, ``written`` of them by write_records."""
        layers = self._config.num_layers
        target = verified
        if layers != self._recorded_layers:
            target = 0 if verified == 0 else layers if verified == self._recorded_layers else 1
        if target < open_step.num_verified:
            raise Differs(f"step {open_step.step.index} has {verified} layers verified, it had more before")
        if target == open_step.num_verified:
            return
        if open_step.attempts is None:
            pairs = zip(open_step.rows, open_step.metadata.query_lens, strict=True)
            open_step.attempts = [[] if life is None else life.attempts(n) for life, n in pairs]
        written_target = target if written == verified else min(written, max(target - 1, 1))
        while open_step.num_verified < target:
            # Odd steps go from the last layer to the first: the order is the caller's.
            place = open_step.num_verified
            layer = layers - 1 - place if open_step.step.index % 2 else place
            self._run(open_step, layer, write=open_step.num_written < written_target)
            open_step.num_verified += 1

    def finish(self, open_step: OpenStep) -> None:
        """Verifies what layers are left."""
        self.catch_up(open_step, self._recorded_layers, open_step.num_written)

    def _run(self, open_step: OpenStep, layer: int, *, write: bool) -> None:
        step = open_step.step
        open_step.num_written += write
        if not self._payloads:
            self._checks.call(lambda: step.verify(layer))
            return
        tokens, inputs = self._window(open_step, layer)
        if write:
            self._write(step, layer, tokens, inputs)
        else:
            shape = (step.num_tokens, self._config.layer.num_heads, self._config.layer.head_v_dim)
            device = self._checks.device
            out = torch.full(shape, torch.nan, dtype=self._model.out_dtype, device=device)
            qkv, gate, beta = (column.to(device) for column in inputs)
            self._checks.call(lambda: step.verify(layer, qkv, gate, beta, out=out))
            self._checks.outputs(step.index, layer, out.cpu(), tokens)
        folds = self._config.folds_in_verify
        self._checks.only_slots_changed(open_step.slots if folds else set(), in_layer=layer)

    def _write(self, step: Step, layer: int, tokens: dict[int, ExpectedToken], inputs: TokenInputs) -> None:
        """Hands in the oracle's records, as an own kernel would."""
        spec, compute = self._config.layer, self._model.compute_dtype
        u = torch.full((step.num_tokens, spec.num_heads, spec.head_v_dim), torch.nan, dtype=compute)
        key = torch.full_like(inputs.raw_gate, torch.nan)
        for place, token in tokens.items():
            u[place], key[place] = token.u, token.key
        conv_input = None if spec.conv_kernel_size is None else inputs.qkv.to(self._checks.device)
        u, key, gate = (tensor.to(self._checks.device) for tensor in (u, key, inputs.raw_gate))
        self._checks.call(lambda: step.write_records(layer, u, key, gate, conv_input))

    def _window(self, open_step: OpenStep, layer: int) -> tuple[dict[int, ExpectedToken], TokenInputs]:
        """What every token of a request gives, by place in the step, and the step's inputs.

        Where no request has a token the inputs are NaN, which must not spread.
        """
        assert open_step.attempts is not None
        places: list[int] = []
        keys: list[int] = []
        positions: list[int] = []
        attempts: list[int] = []
        first, query_lens = 0, open_step.metadata.query_lens
        for life, row_attempts, n in zip(open_step.rows, open_step.attempts, query_lens, strict=True):
            if life is not None:
                places += range(first, first + n)
                keys += [life.key] * n
                positions += range(life.committed_len, life.committed_len + n)
                attempts += row_attempts
            first += n
        inputs = token_inputs(self._config, keys, positions, attempts, layer)

        tokens: dict[int, ExpectedToken] = {}
        prefixes: list[list[Expected]] = []
        for life, n in zip(open_step.rows, query_lens, strict=True):
            prefix = [] if life is None else [life.layers[layer]]
            for index in range(len(tokens), len(tokens) + (n if prefix else 0)):
                token = tokens[places[index]] = self._model.token(layer, prefix[-1], inputs, index)
                prefix.append(token.after)
            prefixes.append(prefix)
        open_step.prefixes[layer] = prefixes

        columns = []
        for column in inputs:
            shape = (open_step.step.num_tokens, *column.shape[1:])
            scattered = torch.full(shape, torch.nan, dtype=DTYPES[self._config.activation_dtype])
            scattered[places] = column.to(scattered.dtype)
            columns.append(scattered)
        return tokens, TokenInputs(*columns)
