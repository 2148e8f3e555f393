"""A Llama-shaped model of 8 billion parameters, all of them trained, on a small GPU and in limited RAM.

    python benchmarks/llama.py --device-memory 16 --folder /tmp/llama [--layers 32 --tokens 2048 --steps 4]

Float32 masters, AdamW, bf16 autocast, through the Trainer. The GPU is limited to `--device-memory` gigabytes. After
some steps the model is saved, loaded into a new Trainer and trained on. Prints one JSON object: seconds and tokens per
second, peak memory of GPU and host, losses before and after resuming.

With `--full` the checkpoint holds the optimizer's state too (12 bytes per parameter), and the resumed run's losses are
those of a run that was not interrupted; without, it holds the weights (4 bytes per parameter).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ramtorch_lightning import OffloadStrategy

HEAD_WIDTH = 128


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * HEAD_WIDTH, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, HEAD_WIDTH).transpose(1, 2)

        query, key, value = rotate(heads(self.query(x))), rotate(heads(self.key(x))), heads(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: pairs of channels turn by an angle that grows with the position (Su et al., 2021)."""
    half = x.shape[-1] // 2
    speed = 500000 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, groups: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, groups)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(L.LightningModule):
    """Embedding, layers, head; each is built on the GPU, if there is one, and moved to the host."""

    def __init__(self, layers: int, width: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        groups = max(1, width // HEAD_WIDTH // 4)

        def build(index: int, make: Any, *arguments: Any, **options: Any) -> nn.Module:
            torch.manual_seed(index)
            with torch.device(device):
                return make(*arguments, **options).cpu()

        self.embedding = build(0, nn.Embedding, vocabulary, width)
        self.layers = nn.ModuleList(build(1 + i, Layer, width, inner, groups) for i in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = build(1 + layers, nn.Linear, width, vocabulary, bias=False)
        self.losses: list[Tensor] = []
        self.began: list[float] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, ids: Tensor, _index: int) -> Tensor:
        self.began.append(time.perf_counter())
        logits = self(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


class Tokens(IterableDataset):  # type: ignore[type-arg]
    """Random batches, other ones for each step, the same in every run."""

    def __init__(self, first: int, steps: int, rows: int, length: int, vocabulary: int) -> None:
        self.steps = range(first, first + steps)
        self.size, self.vocabulary = (rows, length + 1), vocabulary

    def __iter__(self) -> Iterator[Tensor]:
        for step in self.steps:
            yield torch.randint(self.vocabulary, self.size, generator=torch.Generator().manual_seed(step))


def main() -> None:
    a = parse()
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(a.device_memory * 1e9 / total)
        # Building on the device leaves nothing behind: what is measured begins here.
    path, report = Path(a.folder) / "model.ckpt", {"arguments": vars(a)}
    began = time.perf_counter()
    module = Llama(a.layers, a.width, a.inner, a.vocabulary)
    report["parameters"] = sum(parameter.numel() for parameter in module.parameters())
    report["seconds_building"] = time.perf_counter() - began
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = fit(a, module, 0, None)
    report |= figures(module, a)
    if a.save:
        began = time.perf_counter()
        trainer.save_checkpoint(path, weights_only=not a.full)
        report |= {"seconds_saving": time.perf_counter() - began, "checkpoint_gb": path.stat().st_size / 1e9}
        module.losses, module.began = [], []
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        trainer.strategy.optimizers = []
        del trainer
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        began = time.perf_counter()
        if a.full:
            fit(a, module, a.steps, path)
        else:
            state = torch.load(path, mmap=True, weights_only=True)["state_dict"]
            module.load_state_dict(state)
            del state
            fit(a, module, a.steps, None)
        report |= {"resumed_losses": [float(loss) for loss in module.losses]}
        report["seconds_resuming_and_training"] = time.perf_counter() - began
        path.unlink()
    print(json.dumps(report))


def fit(a: argparse.Namespace, module: Llama, first: int, path: Path | None) -> L.Trainer:
    """Train `a.steps` steps on batches `first`, `first + 1`, ..."""
    options = {"host_memory": a.host_memory} if a.host_memory else {}
    trainer = L.Trainer(
        accelerator="auto", devices=1, strategy=OffloadStrategy(window=a.window, **options), precision="bf16-mixed",
        max_steps=first + a.steps if path else a.steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Tokens(first, a.steps, a.rows, a.tokens // a.rows, a.vocabulary), batch_size=None),
                ckpt_path=path)  # fmt: skip
    return trainer


def figures(module: Llama, a: argparse.Namespace) -> dict[str, Any]:
    laps = [end - start for start, end in zip(module.began[1:], module.began[2:], strict=False)]
    seconds = statistics.median(laps) if laps else float("nan")
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {"torch": torch.__version__, "lightning": L.__version__},
        "losses": [float(loss) for loss in module.losses],
        "seconds_per_step": seconds,
        "laps": laps,
        "tokens_per_second": a.tokens / seconds,
        "peak_device_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "reserved_device_gb": torch.cuda.max_memory_reserved() / 1e9 if cuda else None,
        "peak_host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", type=int, default=2048, help="per step")
    parser.add_argument("--rows", type=int, default=1, help="into which the tokens of a step are divided")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--device-memory", type=float, default=16, help="gigabytes of the GPU that may be used")
    parser.add_argument("--host-memory", type=int, default=0, help="bytes of RAM that may be used; 0: what there is")
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--full", action=argparse.BooleanOptionalAction, default=False, help="with optimizer state")
    parser.add_argument("--folder", default=".")
    return parser.parse_args()


if __name__ == "__main__":
    main()
