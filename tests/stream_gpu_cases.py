"""Models for tests that only a GPU can pass: a long kernel in front of each chunk lets host and copies run ahead."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SLEEP_CYCLES = 2_000_000  # about a millisecond
WIDTH = 256


class Slow(nn.Module):
    """Occupies the compute stream, so that the host and the copies run ahead."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            with torch.cuda.device(x.device):
                torch.cuda._sleep(SLEEP_CYCLES)
        return x


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.slow, self.norm, self.dropout = Slow(), nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(self.slow(x))))))


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], count: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(count)])
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 512, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


class UserCheckpoint(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Keywords(nn.Module):
    """Called with keyword arguments only: nothing positional tells torch which device's random state to save."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(dropout=0.3)
        self.forward_inner = None

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x=x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slow, self.lstm, self.out = Slow(), nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.lstm(self.slow(x))[0])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.statistics = Block(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.statistics(self.block(x).transpose(1, 2)).transpose(1, 2)


class HalfFrozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class WholeFrozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Block,
    "dropout": lambda: Block(dropout=0.3),
    "user_checkpoint": UserCheckpoint,
    "keywords": Keywords,
    "lstm": Recurrent,
    "batch_norm": Normed,
    "half_frozen": HalfFrozen,
    "frozen": WholeFrozen,
}
