"""The alternatives to a pipeline in one process, each in processes of its own; `pipeline.py` starts them.

python benchmarks/pipeline_peers.py ramtorch WORK PATH
python -m torch.distributed.run --nproc-per-node N benchmarks/pipeline_peers.py torch_zbv WORK
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from pipeline_work import Work, report
from reference import loss_function
from torch import Tensor, nn

TORCH = {
    "torch": "Schedule1F1B",
    "torch_gpipe": "ScheduleGPipe",
    "torch_interleaved": "ScheduleInterleaved1F1B",
    "torch_zb": "ScheduleInterleavedZeroBubble",
    "torch_zbv": "ScheduleZBVZeroBubble",
}
"""Schedules of torch.distributed.pipelining; the last three have two stages per process."""


def torch_worker(system: str, work: Work) -> None:
    """One of the processes."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, ranks = int(os.environ["RANK"]), work.devices
    device = torch.device(work.device, rank) if work.device == "cuda" else torch.device("cpu")
    if work.device == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    class Stage(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(**work.autocast):
                return super().forward(x)

    several = system in ("torch_interleaved", "torch_zb", "torch_zbv")
    count = 2 * ranks if several else ranks
    mirrored = system == "torch_zbv"
    mine = [rank, count - 1 - rank if mirrored else rank + ranks][: 2 if several else 1]
    modules, parts = work.modules(), work.parts(count)
    models = [Stage(*(modules[i] for i in parts[stage])).to(device) for stage in mine]
    stages: Any = [PipelineStage(model, stage, count, device) for model, stage in zip(models, mine, strict=True)]
    schedule = getattr(schedules, TORCH[system])(stages if several else stages[0], work.microbatches, loss_function)
    x, y = work.tokens(device)
    optimizer = work.adamw([p for model in models for p in model.parameters()])
    first, last = 0 in mine, count - 1 in mine

    def step() -> Tensor:
        losses: list[Tensor] = []
        given = {"target": y, "losses": losses} if last else {}
        schedule.step(*([x] if first else []), return_outputs=False, **given)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return torch.stack(losses).mean() if losses else torch.zeros(())

    row: dict[str, Any] = report(system, work, step, quiet=True)
    rows: list[Any] = [None] * ranks
    dist.all_gather_object(rows, row)
    if rank == 0:
        peaks = [other["peak_gb"][i] for i, other in enumerate(rows) if other["peak_gb"]]
        losses = rows[0 if mirrored else -1]["losses"]
        slowest = max(rows, key=lambda other: other["seconds"])
        print(json.dumps({**slowest, "peak_gb": peaks, "losses": losses}), flush=True)
    dist.destroy_process_group()


def ramtorch(system: str, work: Work, path: Path) -> None:
    """RamTorch's pipeline, from an unpacked wheel. Its threads do not end, so the process has to."""
    sys.path.insert(0, str(path))
    from ramtorch import Pipeline

    modules = work.modules()
    stages = [
        nn.Sequential(*(modules[i] for i in part)).to(device)
        for part, device in zip(work.parts(work.devices), work.names, strict=True)
    ]
    pipe = Pipeline(stage_modules=stages, devices=work.names, autocast=torch.bfloat16)
    x, y = work.tokens(work.names[0])
    y = y.to(work.names[-1])
    optimizer = work.adamw([p for stage in stages for p in stage.parameters()])
    schedule = system.partition("_")[2] or "staggered_1b1f"

    def step() -> Tensor:
        arguments = {"schedule": schedule, "n_microbatches": work.microbatches, "loss_fn": loss_function}
        result = pipe.step(x, targets=y, **arguments)
        result.flush_grads()
        optimizer.step()
        optimizer.zero_grad()
        return torch.as_tensor(result.loss)

    report(system, work, step)
    os._exit(0)


def main() -> None:
    system, work = sys.argv[1], Work.read(sys.argv[2])
    if system in TORCH:
        torch_worker(system, work)
    else:
        ramtorch(system, work, Path(sys.argv[3]))


if __name__ == "__main__":
    main()
