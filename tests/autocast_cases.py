"""Ways to use a weight under autocast, and a training step under it."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from stream_cases import WIDTH, data
from torch import Tensor, nn

HALVES = [torch.bfloat16, torch.float16]
halves = pytest.mark.parametrize("dtype", HALVES)


@cache
def lstm_runs_in(dtype: torch.dtype) -> bool:
    """Whether this CPU trains an LSTM in half precision: with AVX2 alone it has no kernel, in float16 few have."""
    try:
        with torch.autocast("cpu", dtype):
            output, _ = nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
        output.sum().backward()
    except RuntimeError:
        return False
    return True


def training(dtype: torch.dtype, *size: int, microbatches: int = 1, remember: bool = False):
    """A training step with forwards under autocast to `dtype`, which remembers its casts or casts for each use."""

    def step(model, optimizer, index):
        optimizer.zero_grad()
        results = []
        for microbatch in range(microbatches):
            with torch.autocast("cpu", dtype, cache_enabled=remember):
                y = model(data(10 * index + microbatch, *size))
                loss = y.float().square().mean()
            loss.backward()
            results += [y.detach(), loss.detach()]
        optimizer.step()
        return results

    return step


class Functional(nn.Module):
    """Raw parameters whose only use is one matrix product each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.addmm(self.bias, x, self.first), self.second).tanh()


class Doubled(nn.Linear):
    """Multiplies its weight first, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias).tanh()


class Reused(nn.Linear):
    """Uses its weight twice: one cast use and one in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.weight.sum(0)


class UsedTwice(nn.Linear):
    """Casts its weight twice; autocast casts once and adds both gradients in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(super().forward(x)))


class Island(nn.Linear):
    """Computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class OwnAutocast(nn.Linear):
    """Brings its own autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Transposed(nn.Linear):
    """A view of the weight goes into the product."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight.t()) + self.bias


class Sliced(nn.Linear):
    """Only parts of the weight go into each product."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2)
        return torch.cat([F.linear(x, first), F.linear(x, second)], -1) + self.bias


class Adapted(nn.Module):
    """Converts its input to the dtype of a weight, as adapters do; dropout between the two rounds in that dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.up(self.down(F.dropout(y.to(self.down.weight.dtype), 0.3))) * 1.1


class Sized(nn.Linear):
    """Rounds by what the size of its weight tells."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16() if self.weight.nbytes < 4 * self.weight.numel() else x * 1.0001
        return super().forward(x)


ON_ROWS = [Functional, Doubled, Reused, UsedTwice, Island, OwnAutocast, Transposed, Sliced, Sized]
