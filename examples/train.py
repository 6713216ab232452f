"""Trains the byte-level model of `model.py` on the sources of CPython's standard library, and its draft model.

    python examples/train.py --corpus DIR                               # needs a CUDA GPU and fla-core
    python examples/train.py --corpus DIR --drafter                     # then the draft model, from those weights
    python examples/train.py --corpus DIR --prompts examples/prompts.json       # cuts the held-out prompts only

The corpus is every .py file below `--corpus` but those in `SKIPPED_DIRS`; a stable hash of the relative path holds out
about 4 % of the files whole. Held-out loss is measured with weights rounded to bf16, as they are shipped. More steps
than the default fit the training text better and the held-out text worse: 4,540 steps, with a weaker weight decay,
ended at 0.91 bits per byte held out (0.53 on training text) where the defaults end at 0.80 (0.62).

The draft model learns the target's next-byte distribution in place of the next byte. Half of its text is the corpus,
the other half passages of it that the target continued greedily: drafts are made for the target's own text, which
repeats itself more than people do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Mixer, Model, ModelConfig, load_model, save_model
from recurrence import SerialMixer

# Generated code tables and documentation text are not code; counting them would flatter the held-out loss.
SKIPPED_DIRS = {"site-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3"}
END_OF_FILE = b"\0"
HELD_OUT_PERMILLE = 40
WARMUP_STEPS = 150
DECAY_FROM = 0.2
MUON_LR, MUON_DECAY, ADAM_LR = 0.02, 0.1, 4e-3

WEIGHTS = Path(__file__).parent / "weights"
# One layer of the target's sizes, whose kernels need no second tuning then.
DRAFTER = ModelConfig(num_layers=1)
# Bytes of a passage that the target continues for the drafter, and how many of them come from the corpus.
PASSAGE_LEN, PASSAGE_PROMPT_LEN = 512, 192

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss in nats of logits [batch x length, vocab] over the window [batch, length + 1] that they were made from."""


def corpus_files(root: Path) -> list[Path]:
    """Relative paths of the corpus, sorted."""
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path for path in files if not SKIPPED_DIRS.intersection(path.parts))


def is_held_out(path: Path) -> bool:
    """Whether a file belongs to the held-out part: a function of its relative path alone."""
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PERMILLE


def read_corpus(root: Path, seed: int) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes, each one uint8 tensor of whole files in shuffled order, a zero byte after each."""
    files = corpus_files(root)
    random.Random(seed).shuffle(files)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in files:
        parts[is_held_out(path)].append((root / path).read_bytes() + END_OF_FILE)
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def cut_prompts(root: Path, seed: int, count: int = 24, length: int = 448) -> list[dict[str, object]]:
    """Prompts of `length` bytes from different held-out files, beginning at a line somewhere inside the file."""
    rng = random.Random(seed)
    files = [path for path in corpus_files(root) if is_held_out(path) and (root / path).stat().st_size > 8 * length]
    prompts: list[dict[str, object]] = []
    for path in rng.sample(files, count):
        data = (root / path).read_bytes()
        start = data.index(b"\n", rng.randrange(len(data) // 4, len(data) // 2)) + 1
        prompts.append({"file": path.as_posix(), "offset": start, "text": data[start : start + length].decode("ascii")})
    return prompts


def initialise(model: Model) -> None:
    """Random weights: usual scales, zero output projections, decay rates spread as in Mamba-2's and KDA's layers."""
    nn.init.normal_(model.embedding, std=0.02)
    for block in model.blocks:
        for name, parameter in block.named_parameters():
            if name.endswith("proj.weight") or name.startswith(("gate_", "output_gate_", "mlp_in")):
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        nn.init.zeros_(block.o_proj.weight)
        nn.init.zeros_(block.mlp_out.weight)
        nn.init.uniform_(block.conv_weight, *(sign * block.conv_weight.shape[1] ** -0.5 for sign in (-1, 1)))
        nn.init.uniform_(block.A_log, 1.0, 16.0).data.log_()
        step_size = torch.exp(torch.empty_like(block.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)))
        block.dt_bias.data = step_size + torch.log(-torch.expm1(-step_size))  # softplus of it gives step_size


def causal_conv(qkv: Tensor, weight: Tensor, heads: int, head_k_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Depthwise causal convolution with SiLU over qkv [B, T, C]; returns q, k [B, T, H, K] and v [B, T, H, V]."""
    length, width = qkv.shape[1], weight.shape[1]
    padded = F.pad(qkv, (0, 0, width - 1, 0))
    mixed = F.silu(sum(padded[:, i : i + length].float() * weight[:, i] for i in range(width))).to(qkv.dtype)
    keys = heads * head_k_dim
    q, k, v = mixed.split([keys, keys, qkv.shape[-1] - 2 * keys], dim=-1)
    return tuple(x.unflatten(-1, (heads, -1)).contiguous() for x in (q, k, v))


BuildMixer = Callable[[Model, int], Mixer]
"""Makes the mixer of a model for so many equally long sequences."""


def chunk_mixer(model: Model, batch: int) -> Mixer:
    """The training mixer: convolution, then fla-core's `chunk_kda`, over `batch` equally long sequences."""
    from fla.ops.kda import chunk_kda

    heads, head_k_dim = model.config.num_heads, model.config.head_k_dim
    conv = torch.compile(causal_conv)

    def mix(layer: int, qkv: Tensor, raw_gate: Tensor, raw_beta: Tensor) -> Tensor:
        block = model.blocks[layer]
        q, k, v = conv(qkv.view(batch, -1, qkv.shape[-1]), block.conv_weight, heads, head_k_dim)
        o, _ = chunk_kda(
            q,
            k,
            v,
            g=raw_gate.view(q.shape),
            beta=raw_beta.view(q.shape[:3]),
            A_log=block.A_log,
            dt_bias=block.dt_bias.flatten(),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            disable_recompute=True,
        )
        return o.flatten(0, 1)

    return mix


def serial_mixer(model: Model, batch: int) -> Mixer:
    """The same function as a loop over tokens, with gradients: for machines without a GPU, and as the check."""
    params = [(b.A_log, b.dt_bias, b.conv_weight, None) for b in model.blocks]
    return SerialMixer(params, batch)


def check_mixer(config: ModelConfig, device: torch.device) -> None:
    """Compares loss gradients and logits of the chunked bf16 mixer with the serial fp32 one on a random model.

    Raises RuntimeError where they differ by more than bf16 explains (3 % of the norm for logits, 15 % for a parameter's
    gradient) or are not finite.
    """
    torch.manual_seed(0)
    model = Model(config).to(device)
    initialise(model)
    for block in model.blocks:
        nn.init.normal_(block.o_proj.weight, std=0.05)
        nn.init.normal_(block.mlp_out.weight, std=0.05)
    tokens = torch.randint(0, 256, (2, 193), device=device)
    results = []
    for build, autocast in ((serial_mixer, False), (chunk_mixer, True)):
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = model(tokens[:, :-1].flatten(), build(model, 2)).float()
        F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        results.append({"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters()})
    errors = {name: ((results[1][name] - x).norm() / x.norm()).item() for name, x in results[0].items()}
    worst = max(errors, key=lambda name: errors[name])
    print(f"check: logits differ by {errors['logits']:.1e}, worst gradient {worst} by {errors[worst]:.1e}", flush=True)
    # Gradients of the gate's own parameters are sums of cancelling terms, so bf16 shows there first.
    if not (errors["logits"] < 0.03 and all(error < 0.15 for error in errors.values())):
        raise RuntimeError(f"the training mixer differs from the serial recurrence: {errors}")


class Muon:
    """Momentum whose update is orthogonalised (Jordan et al., 2024, "Muon"), for the weight matrices of the blocks.

    Packed matrices are split into their parts first; parts of one shape are orthogonalised in one batch.
    """

    def __init__(self, model: Model, momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, ...], list[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]] = {}
        self.parameters: list[Tensor] = []
        self.orthogonalise = torch.compile(orthogonalise, dynamic=False) if model.embedding.is_cuda else orthogonalise
        for name, parameter in model.blocks.named_parameters():
            if name.endswith(".weight") and "beta" not in name:
                parts = 3 if "qkv" in name else 2 if "mlp_in" in name else 1
                tall = parameter.shape[0] // parts >= parameter.shape[1]
                split = _splitter(parts, tall)
                group = self.groups.setdefault(tuple(split(parameter).shape[1:]), [])
                group.append((parameter, torch.zeros_like(parameter), split))
                self.parameters.append(parameter)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every matrix; `lr` is the spectral norm of a square matrix's step."""
        for group in self.groups.values():
            updates = []
            for parameter, velocity, split in group:
                velocity.lerp_(parameter.grad, 1 - self.momentum)
                updates.append(split(parameter.grad.lerp(velocity, self.momentum)))
            stacked = self.orthogonalise(torch.cat(updates)).split([len(u) for u in updates])
            for (parameter, _, split), update in zip(group, stacked, strict=True):
                target = split(parameter.data)
                target.mul_(1 - lr * MUON_DECAY)
                # A wide matrix (the transposed ones here) keeps its step; a tall one is scaled to move outputs alike.
                is_transposed = target.stride(-1) != 1
                scale = 1.0 if is_transposed else math.sqrt(target.shape[-2] / target.shape[-1])
                target.add_(update.to(target.dtype), alpha=-lr * scale)


def _splitter(parts: int, tall: bool) -> Callable[[Tensor], Tensor]:
    def split(matrix: Tensor) -> Tensor:
        pieces = matrix.view(parts, -1, matrix.shape[1])
        return pieces if tall else pieces.transpose(1, 2)

    return split


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly, by five Newton-Schulz steps in bf16; [n, rows >= cols, cols]."""
    x = matrices.bfloat16().transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.transpose(1, 2)


def batches(texts: Sequence[Tensor], batch: int, length: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Endless batches [batch, length + 1] int64 of windows at random offsets, as many of one text as of another."""
    generator = torch.Generator(device).manual_seed(seed)
    texts = [text.to(device) for text in texts]
    offsets = torch.arange(length + 1, device=device)
    while True:
        windows = []
        for text in texts:
            starts = torch.randint(len(text) - length, (batch // len(texts), 1), generator=generator, device=device)
            windows.append(text[starts + offsets].long())
        yield torch.cat(windows)


@torch.no_grad()
def continued_passages(target: Model, text: Tensor, count: int, seed: int) -> Tensor:
    """[count, PASSAGE_LEN] uint8: random passages of `text`, continued greedily by the target behind their prompt."""
    passages = next(batches([text], count, PASSAGE_LEN - 1, seed, target.embedding.device))
    mix = SerialMixer(target.layer_params(), count)
    for place in range(1, PASSAGE_LEN):
        logits = target(passages[:, place - 1], mix)
        if place >= PASSAGE_PROMPT_LEN:
            passages[:, place] = logits.argmax(-1)
    return passages.byte()


def next_byte_loss(logits: Tensor, window: Tensor) -> Tensor:
    """Cross entropy of the bytes that follow."""
    return F.cross_entropy(logits.float(), window[:, 1:].flatten())


def distillation_loss(target: Model, mix: Mixer) -> Loss:
    """Cross entropy of the target's next-byte distribution: KL(target || model) plus the target's own entropy."""

    def loss(logits: Tensor, window: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target(window[:, :-1].flatten(), mix).float().softmax(-1)
        return F.cross_entropy(logits.float(), wanted)

    return loss


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # other shapes than in training: compiling would cost more than it saves
def predict(model: Model, build: BuildMixer, tokens: Tensor) -> Tensor:
    """Logits [batch x length, vocab] float32 of sequences [batch, length] from zero states, in bf16 autocast."""
    device = model.embedding.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return model(tokens.flatten(), build(model, len(tokens))).float()


def sequences(data: Tensor, length: int, batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """All of `data` as sequences of `length` bytes, `batch` at a time: [n, length] int64, and the bytes that follow."""
    count = (len(data) - 1) // length
    inputs, targets = (data[i : i + count * length].view(count, length) for i in (0, 1))
    for i in range(0, count, batch):
        yield tuple(part[i : i + batch].to(device).long() for part in (inputs, targets))


def bits_per_byte(model: Model, build: BuildMixer, data: Tensor, length: int, batch: int) -> float:
    """Mean loss in bits over `data`, read as sequences of `length` bytes."""
    total = count = 0.0
    for tokens, following in sequences(data, length, batch, model.embedding.device):
        total += F.cross_entropy(predict(model, build, tokens), following.flatten(), reduction="sum").item()
        count += following.numel()
    return total / count / math.log(2)


def agreement(model: Model, target: Model, build: BuildMixer, data: Tensor, length: int, batch: int) -> float:
    """Share of places of `data`, read as sequences of `length` bytes, at which both models' best next byte is one."""
    same = count = 0
    for tokens, _ in sequences(data, length, batch, model.embedding.device):
        best, wanted = (predict(each, build, tokens).argmax(-1) for each in (model, target))
        same += int((best == wanted).sum())
        count += len(best)
    return same / count


def learning_rate(step: int, steps: int) -> float:
    """Share of the full rate at step 1..steps: linear warm-up, a plateau, then linearly to zero."""
    return min(1.0, step / WARMUP_STEPS) * min(1.0, (1 - (step - 1) / steps) / (1 - DECAY_FROM))


def mixer_builder(device: torch.device) -> BuildMixer:
    """What mixes in training on this device."""
    return chunk_mixer if device.type == "cuda" else serial_mixer


def train_target(options: argparse.Namespace) -> None:
    """Trains the model on the corpus; writes weights and a log into `options.out`, prints losses of what it wrote."""
    device, began = torch.device(options.device), time.monotonic()
    data, held_out = read_corpus(options.corpus, options.seed)
    model, log = fit(ModelConfig(), [data], next_byte_loss, held_out, options)
    summary = held_out_losses(model, held_out, options)
    summary["train_bits_per_byte"] = bits_per_byte(
        model, mixer_builder(device), data[: len(held_out)], options.length, 8
    )
    write_log(options.out, {"seconds": time.monotonic() - began} | summary, log)


def train_drafter(options: argparse.Namespace) -> None:
    """Trains the draft model of the model in `options.target`; writes and prints as `train_target` does.

    Printed, too: how often its best byte is the target's, over held-out text, and over the target's own continuations
    of held-out passages, which is what drafts are made for.
    """
    device, began = torch.device(options.device), time.monotonic()
    data, held_out = read_corpus(options.corpus, options.seed)
    target, build = load_model(options.target, device=device), mixer_builder(device)
    greedy = continued_passages(target, data, options.passages, options.seed)
    print(f"the target has continued {len(greedy):,} passages, {time.monotonic() - began:.0f} s", flush=True)
    loss = distillation_loss(target, build(target, options.batch))
    model, log = fit(DRAFTER, [data, greedy.flatten()], loss, held_out, options)

    summary = held_out_losses(model, held_out, options)
    summary["held_out_agreement"] = agreement(model, target, build, held_out, options.length, 8)
    unseen = continued_passages(target, held_out, min(options.passages, 512), options.seed).long()
    best = predict(model, build, unseen).argmax(-1).view(unseen.shape)
    hits = best[:, PASSAGE_PROMPT_LEN - 1 : -1] == unseen[:, PASSAGE_PROMPT_LEN:]
    summary["continuation_agreement"] = hits.float().mean().item()
    write_log(options.out, {"seconds": time.monotonic() - began} | summary, log)


def fit(
    config: ModelConfig, texts: Sequence[Tensor], loss_of: Loss, held_out: Tensor, options: argparse.Namespace
) -> tuple[Model, list[dict[str, float]]]:
    """Trains a new model and saves it to `options.out`; returns it, rounded as it was saved, and the log."""
    began = time.monotonic()
    device = torch.device(options.device)
    on_gpu, build = device.type == "cuda", mixer_builder(device)
    if on_gpu:
        torch._dynamo.config.recompile_limit = 32  # one entry a layer: `project` and `finish` are bound methods
        with torch.compiler.set_stance("force_eager"):
            check_mixer(config, device)
    torch.manual_seed(options.seed)
    model = Model(config).to(device)
    initialise(model)
    sizes = f"{sum(map(len, texts)):,} bytes to train on, {len(held_out):,} held out"
    print(f"{model.num_parameters():,} parameters, {sizes}", flush=True)

    muon = Muon(model)
    in_muon = {id(p) for p in muon.parameters}
    adam = torch.optim.Adam([p for p in model.parameters() if id(p) not in in_muon], betas=(0.9, 0.95), fused=on_gpu)
    if on_gpu:
        for block in model.blocks:
            block.project, block.finish = torch.compile(block.project), torch.compile(block.finish)
    mix = build(model, options.batch) if on_gpu else None
    log: list[dict[str, float]] = []
    stream = batches(texts, options.batch, options.length, options.seed, device)
    losses, marked = [], time.monotonic()
    for step in range(1, options.steps + 1):
        rate = learning_rate(step, options.steps)
        window = next(stream)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of(model(window[:, :-1].flatten(), mix or build(model, options.batch)), window)
        loss.backward()
        muon.step(MUON_LR * rate)
        adam.param_groups[0]["lr"] = ADAM_LR * rate
        adam.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step in (1, 20, 50) or step % options.log_every == 0 or step == options.steps:
            elapsed = time.monotonic() - began
            bits = torch.stack(losses).mean().item() / math.log(2)
            speed = len(losses) * options.batch * options.length / (time.monotonic() - marked)
            entry = {"step": step, "seconds": round(elapsed, 1), "bits_per_byte": round(bits, 4), "bytes_per_s": speed}
            print(f"step {step} {elapsed:.0f} s: {bits:.4f} bits/byte, {speed / 1e6:.2f} MB/s", flush=True)
            if not math.isfinite(bits):
                raise RuntimeError(f"the loss is not finite at step {step}")
            if step % (5 * options.log_every) == 0:
                entry["held_out_sample"] = bits_per_byte(model, build, held_out[:262145], options.length, 16)
                print(f"  held-out sample: {entry['held_out_sample']:.4f}", flush=True)
                save_model(model, options.out)
            log.append(entry)
            losses, marked = [], time.monotonic()

    save_model(model, options.out)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model, log


def held_out_losses(model: Model, held_out: Tensor, options: argparse.Namespace) -> dict[str, float]:
    """Of a trained model: what it was trained on, and bits per byte in sequences as in training and four times that."""
    build = mixer_builder(model.embedding.device)
    summary = {"steps": options.steps, "trained_bytes": options.steps * options.batch * options.length}
    for length in (options.length, 4 * options.length):
        if length < len(held_out):
            summary[f"held_out_bits_per_byte_{length}"] = bits_per_byte(model, build, held_out, length, 8)
    return summary


def write_log(directory: Path, summary: dict[str, float], log: list[dict[str, float]]) -> None:
    """Prints the summary, and writes it beside the weights with the log."""
    print(json.dumps(summary), flush=True)
    (directory / "log.json").write_text(json.dumps({"summary": summary, "log": log}) + "\n")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--drafter", action="store_true", help="train the draft model of the model in --target")
    parser.add_argument("--target", type=Path, default=WEIGHTS, help="weights that the drafter learns from")
    parser.add_argument("--out", type=Path, help="folder of the weights (default: the shipped ones)")
    parser.add_argument("--prompts", type=Path, help="write held-out prompts to this file and train nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=48, help="sequences a step")
    parser.add_argument("--length", type=int, default=2048, help="bytes a sequence")
    parser.add_argument("--passages", type=int, default=16384, help="that the target continues for its drafter")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out = options.out or (WEIGHTS / "drafter" if options.drafter else WEIGHTS)
    if options.prompts:
        options.prompts.write_text(json.dumps(cut_prompts(options.corpus, options.seed), indent=1) + "\n")
    elif options.drafter:
        train_drafter(options)
    else:
        train_target(options)


if __name__ == "__main__":
    main()
