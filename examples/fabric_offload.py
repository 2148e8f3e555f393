"""Streaming under Lightning Fabric, in a loop of your own: weights in RAM, two chunks at a time on the GPU."""

from contextlib import closing

import lightning as L
import torch
import torch.nn.functional as F
from quickstart import Block
from torch import nn
from torch.utils.data import DataLoader

from ramtorch_core import attach


def main(steps: int = 200, out: str = "runs/fabric_offload.ckpt") -> None:
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = L.Fabric(accelerator=accelerator, devices=1, precision="bf16-mixed")
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 128), *(Block(128) for _ in range(6)), nn.Linear(128, 8))
    adam = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)  # updates the weights where they are, in RAM
    # resident_below=0 streams even tiny tensors: leave it out for a real model.
    with closing(attach(model, device=fabric.device, resident_below=0, overlapped=True)) as streamer:
        module, optimizer = fabric.setup(model, adam, move_to_device=False)  # the engine moves what has to move
        batches = fabric.setup_dataloaders(DataLoader(torch.rand(128 * steps, 8), 128))
        for step, numbers in enumerate(batches):
            loss = F.mse_loss(module(numbers), numbers.sort(dim=1).values)
            with streamer.updates.overlap(adam):  # without it, .grad is there after backward, and nothing overlaps
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 40 == 0 or step == steps - 1:
                fabric.print(f"step {step:3d}   loss {loss.item():.5f}")
        fabric.save(out, {"model": module, "optimizer": optimizer})


if __name__ == "__main__":
    main()
