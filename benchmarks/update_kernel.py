"""The compiled AdamW kernel alone: nanoseconds per parameter, by threads.

    python benchmarks/update_kernel.py [--parameters 67108864 --threads 1 2 4 8 12 16]

bf16 gradients in, float32 master and moments, bf16 shadows out; the best of four calls. Prints one line per count.
"""

from __future__ import annotations

import argparse
import time

import torch

from ramtorch_core.optim.compiled import AdamWeight, adam_kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16])
    options = parser.parse_args()
    kernel = adam_kernel()
    if kernel is None:
        raise SystemExit("there is no compiled kernel here; the log says why")
    count = options.parameters
    weight = AdamWeight(
        torch.randn(count), torch.zeros(count), torch.zeros(count), torch.randn(count).bfloat16(),
        torch.zeros(count, dtype=torch.bfloat16),
        step=7, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True,
    )  # fmt: skip
    for threads in options.threads:
        laps = []
        for _ in range(4):
            begun = time.perf_counter()
            kernel([weight], threads)
            laps.append(time.perf_counter() - begun)
        print(f"{threads:3d} threads: {min(laps) / count * 1e9:.3f} ns per parameter")


if __name__ == "__main__":
    main()
