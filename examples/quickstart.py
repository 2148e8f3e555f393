"""The streaming engine without Lightning: eight chunks in RAM, two of them at a time on the GPU, learn to sort."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ramtorch_core import OffloadModel


class Block(nn.Module):
    """One chunk: the modules whose weights move together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 512), nn.GELU(), nn.Linear(512, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def main(steps: int = 200) -> None:
    torch.manual_seed(0)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    chunks = [nn.Linear(8, 128), *(Block(128) for _ in range(6)), nn.Linear(128, 8)]
    streaming = {"window": 2, "pin": 1, "keep_activations": "checkpoint", "resident_below": 0}  # 0: tiny tensors too
    with OffloadModel(chunks, device=device, **streaming) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)  # updates the weights where they are
        for step in range(steps):
            numbers = torch.rand(128, 8, device=device)
            result = model.step(numbers, targets=numbers.sort(dim=1).values, loss_fn=F.mse_loss)
            model.flush_grads()  # publishes the gradients as .grad
            optimizer.step()
            optimizer.zero_grad()
            if step % 40 == 0 or step == steps - 1:
                print(f"step {step:3d}   loss {result.loss.item():.5f}")


if __name__ == "__main__":
    main()
