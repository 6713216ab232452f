"""Transfers as a replay needs them: made from the oracle, since a trace holds no payload."""

import io
from collections.abc import Sequence
from typing import BinaryIO, Literal

import torch

from specstate.config import StateConfig
from specstate.image import ImagePayload, RequestImage
from specstate.kernels.reference import inverse_norm
from specstate.metadata import Handle
from specstate.prefixes import PrefixKey
from specstate.replay.inputs import token_inputs
from specstate.replay.model import Expected, Life, Model, check_loaded_len
from specstate.trace.schema import Recover
from specstate.transfer import ImageEntry, PublishedEntry, RequestEntry, TransferHeader, write_file
from specstate.validation import DTYPES


class OracleFiles:
    """Files whose requests have committed the first tokens that ``inputs`` derives for their life."""

    def __init__(self, config: StateConfig, model: Model, payloads: bool) -> None:
        self._config, self._model, self._payloads = config, model, payloads

    def request(self, life: Life, entry: RequestEntry) -> BinaryIO:
        """One request; brings ``life`` to where it stands."""
        return self._file("request", [self._bring(life, entry.image)], (entry,))

    def snapshot(self, event: Recover, lives: Sequence[Life], states: dict[PrefixKey, list[Expected]]) -> BinaryIO:
        """A snapshot; brings ``lives``, one for each of its requests, to where they stand, and fills ``states``."""
        brought = {state.key for state in event.published}
        requests = [
            entry.model_copy(
                update={
                    "image": entry.image.model_copy(update={"has_payload": self._payloads}),
                    # A prefix that found no slot in the manager is not in this file.
                    "restored_from": entry.restored_from if entry.restored_from in brought else None,
                }
            )
            for entry in event.requests
        ]
        images = [self._bring(life, entry.image) for life, entry in zip(lives, requests, strict=True)]
        published = []
        for state in event.published:
            entry = ImageEntry(
                checkpoint_len=state.key.num_tokens, pending_len=0, finished=False, has_payload=self._payloads
            )
            # Whose tokens they were is not in a trace: those of a request of that name stand for them.
            life = self._model.life(Handle(state.key.digest, 0, 0), state.checkpoint_slot)
            images.append(self._bring(life, entry))
            states[state.key] = life.layers
            published.append(PublishedEntry(key=state.key, image=entry))
        return self._file("snapshot", images, tuple(requests), tuple(published), event.generation)

    def _file(
        self,
        kind: Literal["request", "snapshot"],
        images: list[RequestImage],
        requests: tuple[RequestEntry, ...],
        published: tuple[PublishedEntry, ...] = (),
        generation: int | None = None,
    ) -> BinaryIO:
        file = io.BytesIO()
        header = TransferHeader(
            specstate_version="",
            config=self._config,
            kind=kind,
            requests=requests,
            published=published,
            generation=generation,
        )
        write_file(file, header, images)
        file.seek(0)
        return file

    def _bring(self, life: Life, entry: ImageEntry) -> RequestImage:
        committed_len = entry.checkpoint_len + entry.pending_len
        if self._payloads:
            check_loaded_len("a request", committed_len)
        life.finished = entry.finished
        life.stood.clear()
        life.stood[entry.checkpoint_len] = life.layers
        payload = self._payload(life, entry) if self._payloads else None
        life.stand_at(committed_len, self._config.record_capacity)
        return RequestImage(entry.checkpoint_len, entry.pending_len, entry.finished, payload)

    def _payload(self, life: Life, entry: ImageEntry) -> ImagePayload:
        """The state at checkpoint_len and what comes behind it, token by token; ``life`` then stands behind it."""
        config, compute = self._config, self._model.compute_dtype
        activation, checkpoint = DTYPES[config.activation_dtype], DTYPES[config.checkpoint_dtype]
        positions = range(entry.checkpoint_len, entry.checkpoint_len + entry.pending_len)
        before = self._model.loaded(life, entry.checkpoint_len)
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in ("u", "key_gate", "inv_norm")}
        life.stood[entry.checkpoint_len] = before
        life.layers = []
        for layer, state in enumerate(before):
            inputs = token_inputs(config, [life.key] * len(positions), positions, [0] * len(positions), layer)
            tokens = []
            for index in range(len(positions)):
                tokens.append(self._model.token(layer, state, inputs, index))
                state = tokens[-1].after
            life.layers.append(state)
            if tokens:
                key = torch.stack([token.key for token in tokens], 1).to(activation)  # [H, m, K]
                columns["u"].append(torch.stack([token.u for token in tokens], 1).to(compute))
                columns["key_gate"].append(torch.stack([key, inputs.raw_gate.transpose(0, 1).to(activation)], 2))
                columns["inv_norm"].append(inverse_norm(key.to(compute)).float())
        convs = None
        if config.layer.conv_kernel_size is not None:
            convs = [torch.stack([s.state.conv for s in states]).to(activation) for states in (before, life.layers)]
        return ImagePayload(
            torch.stack([state.state.recurrent for state in before]).to(checkpoint),
            None if convs is None else convs[0],
            **{name: torch.stack(parts) for name, parts in columns.items() if parts},
            conv_history=convs[1] if convs is not None and entry.pending_len else None,
        )
