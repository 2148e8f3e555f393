"""What the engine costs the host per visit, in microseconds.

    python benchmarks/visit_overhead.py [--device cuda]

Chunks are so small that the host is the bottleneck; the difference to the plain module, divided by the visits, is the
engine's own time: opening and closing the visit, the Lend node, hooks, the transfer's launch, the gradient's way out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ramtorch_core import attach


def seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    for _ in range(5):
        step()
    laps = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        laps.append(time.perf_counter() - start)
    return statistics.median(laps)


def stack(chunks: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(chunks)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    report: dict[str, float] = {}
    x = torch.randn(4, 64, device=arguments.device)
    for activations in ("keep", "checkpoint"):
        for learning in (False, True):
            net, plain = stack(arguments.chunks), stack(arguments.chunks)
            plain.to(arguments.device)

            def step(model: nn.Module) -> Tensor:
                with torch.set_grad_enabled(learning):  # noqa: B023
                    output = model(x).sum()
                if learning:  # noqa: B023
                    output.backward()
                return output

            baseline = seconds(lambda: step(plain), arguments.device, arguments.repeats)  # noqa: B023
            engine = attach(net, device=arguments.device, chunks="*", resident_below=0, activations=activations)
            engine.conservative = False
            streamed = seconds(lambda: step(net), arguments.device, arguments.repeats)  # noqa: B023
            engine.close()
            visits = arguments.chunks * (2 if learning else 1)
            phase = f"{activations} {'forward+backward' if learning else 'forward'}"
            report[phase] = (streamed - baseline) / visits * 1e6
    print(json.dumps({"device": arguments.device, "microseconds per visit": report, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
