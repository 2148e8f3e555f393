"""What streaming costs and saves: a GPT trained resident, streamed, and streamed with checkpointed activations.

    python examples/offload_vs_resident.py               # tiny, also without a GPU
    python examples/offload_vs_resident.py --size 1b     # a GPU, under bf16 autocast
    python examples/offload_vs_resident.py --compile     # each block compiled, in all three

For each system: seconds, GPU memory at its peak, and the largest difference of any weight from the resident run. All
three update their weights in RAM with the same AdamW, so the weights can be equal to the last bit. A resident run would
normally update on the GPU: the price of streaming is in the column without the update.
"""

import argparse
import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from gpt import GPT, SIZES, VOCABULARY, Size, next_byte_loss
from matplotlib.figure import Figure
from torch import Tensor, nn

from ramtorch_core import OffloadModel


@dataclass(frozen=True)
class Task:
    """What every system does: the same model, the same batches of (tokens, targets), the same device."""

    size: Size
    batches: list[tuple[Tensor, Tensor]]
    device: torch.device
    compiled: bool = False

    def build(self) -> GPT:
        """The same weights every time, in RAM."""
        torch.manual_seed(0)
        return GPT(self.size)

    def compile_blocks(self, model: GPT) -> None:
        """One region per block, if they are to be compiled: equal blocks share their code."""
        for block in model.blocks if self.compiled else ():
            block.compile()


@dataclass(frozen=True)
class Result:
    """Median seconds, peak bytes on the GPU (None without one) and the weights after the last step."""

    forward_backward: float
    whole_step: float
    peak_bytes: int | None
    weights: list[Tensor]


def host_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def train_resident(task: Task) -> Result:
    """Plain torch: the whole model on the device; gradients travel to the masters in RAM, and weights back."""
    masters = task.build()
    model = copy.deepcopy(masters).to(task.device)
    task.compile_blocks(model)
    optimizer = host_optimizer(masters.parameters())
    pairs = list(zip(masters.parameters(), model.parameters(), strict=True))

    def forward_backward(tokens: Tensor, targets: Tensor) -> None:
        next_byte_loss(model(tokens), targets).backward()

    @torch.no_grad()
    def update() -> None:
        for master, parameter in pairs:
            master.grad, parameter.grad = parameter.grad.to("cpu"), None
        optimizer.step()
        for master, parameter in pairs:
            parameter.copy_(master)

    return measure(task, forward_backward, update, masters.parameters())


def train_streamed(task: Task, window: int, keep_activations: bool | str) -> Result:
    """The same, with at most `window` of the model's chunks on the device at a time."""
    model = task.build()
    task.compile_blocks(model)
    chunks = [model.embedding, *model.blocks, nn.Sequential(model.norm, model.head)]
    with OffloadModel(
        chunks,
        device=task.device,
        window=window,
        keep_activations=keep_activations,
        resident_below=16 * task.size.width,  # bytes: norms stay on the device, matrices stream
    ) as streamed:
        optimizer = host_optimizer(streamed.parameters())

        def forward_backward(tokens: Tensor, targets: Tensor) -> None:
            streamed.step(tokens, targets=targets, loss_fn=next_byte_loss)

        def update() -> None:
            streamed.flush_grads()
            optimizer.step()
            optimizer.zero_grad()

        return measure(task, forward_backward, update, streamed.parameters())


def measure(
    task: Task,
    forward_backward: Callable[[Tensor, Tensor], None],
    update: Callable[[], None],
    parameters: Iterable[nn.Parameter],
) -> Result:
    """Trains on all batches; the first is for warming up and is not timed."""
    gpu = task.device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(task.device)

    def now() -> float:
        if gpu:
            torch.cuda.synchronize(task.device)
        return time.perf_counter()

    halves, wholes = [], []
    for tokens, targets in task.batches:
        start = now()
        with torch.autocast(task.device.type, torch.bfloat16, enabled=gpu):
            forward_backward(tokens, targets)
        middle = now()
        update()
        halves.append(middle - start)
        wholes.append(now() - start)
    return Result(
        forward_backward=statistics.median(halves[1:]),
        whole_step=statistics.median(wholes[1:]),
        peak_bytes=torch.cuda.max_memory_allocated(task.device) if gpu else None,
        weights=[parameter.detach().to("cpu", copy=True) for parameter in parameters],
    )


def difference(result: Result, reference: Result | None) -> str:
    """How far the weights are from the reference's, in words."""
    if reference is None:
        return "nothing to compare with"
    pairs = list(zip(result.weights, reference.weights, strict=True))
    if all(torch.equal(mine, other) for mine, other in pairs):
        return "bit-identical"
    return f"{max((mine - other).abs().max().item() for mine, other in pairs):.1e}"


def draw(results: dict[str, Result], title: str, file: Path) -> None:
    """One bar per system: seconds of a step, with the update set apart, and on a GPU its peak memory."""
    names = list(results)[::-1]
    rows = [results[name] for name in names]
    on_gpu = all(row.peak_bytes is not None for row in rows)
    figure = Figure(figsize=(9 if on_gpu else 6.5, 2.6), layout="constrained")
    panels = figure.subplots(1, 2 if on_gpu else 1, sharey=True, squeeze=False)[0]
    halves = [row.forward_backward for row in rows]
    panels[0].barh(names, halves, label="forward + backward")
    panels[0].barh(names, [row.whole_step - row.forward_backward for row in rows], left=halves, label="update in RAM")
    panels[0].set(xlabel="seconds per step")
    panels[0].legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2, frameon=False)
    if on_gpu:
        panels[1].barh(names, [row.peak_bytes / 1e9 for row in rows], color="tab:green")
        panels[1].set(xlabel="peak GPU memory in GB")
    figure.suptitle(title)
    figure.savefig(file, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="number of parameters")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps, the untimed first one included")
    parser.add_argument("--batch", type=int, help="sequences per step; the default depends on the size")
    parser.add_argument("--window", type=int, default=2, help="slots: chunks that are on the GPU at a time")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--out", type=Path, default=Path("runs/offload_vs_resident.png"), help="the chart")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: at least 2, since the first one is not timed")

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to give the same bits every time
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # it would cost time, and nothing here reads such memory
    )
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    size = SIZES[options.size]
    generator = torch.Generator().manual_seed(1)
    shape = (options.steps, options.batch or size.batch, size.context + 1)
    text = torch.randint(VOCABULARY, shape, generator=generator).to(device)
    batches = [(sequence[:, :-1], sequence[:, 1:]) for sequence in text]
    task = Task(size, batches, device, options.compile)

    systems: dict[str, Callable[[], Result]] = {
        "resident": lambda: train_resident(task),
        "streamed, keep": lambda: train_streamed(task, options.window, True),
        "streamed, checkpoint": lambda: train_streamed(task, options.window, "checkpoint"),
    }
    results: dict[str, Result] = {}
    print(f"GPT {options.size}, {options.steps} steps on {device}, window={options.window}")
    print(f"{'':22}{'forward+backward':>18}{'whole step':>14}{'peak memory':>14}   weights against resident")
    for name, train in systems.items():
        try:
            results[name] = result = train()
        except torch.OutOfMemoryError:
            print(f"{name:22}{'does not fit on this GPU':>32}")
        else:
            memory = f"{result.peak_bytes / 1e9:.2f} GB" if result.peak_bytes is not None else "n/a"
            exact = "the reference" if name == "resident" else difference(result, results.get("resident"))
            if name != "resident":
                result.weights.clear()  # compared already: a large model should not be in RAM three times
            print(f"{name:22}{result.forward_backward:16.3f} s{result.whole_step:12.3f} s{memory:>14}   {exact}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(results, f"GPT {options.size} on {device.type}", options.out)
    print(f"chart: {options.out}")


if __name__ == "__main__":
    main()
