"""Chunks of every kind, from which random models are put together; each takes (rows, WIDTH) to the same."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Dropping(Residual):
    def __init__(self) -> None:
        super().__init__(0.3)


class FrozenFirst(Residual):
    """What needs no gradient is needed last in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.norm.requires_grad_(False)


class FrozenLast(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.down.requires_grad_(False)


class Frozen(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Raw(nn.Module):
    """A bare parameter, a weight used as a function's argument, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.lin = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.full((WIDTH,), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x * self.scale + self.offset, self.lin.weight, self.lin.bias))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.statistics = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.statistics(self.lin(x))


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.nothing = nn.Linear(WIDTH, 3), nn.Parameter(torch.zeros(0))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(torch.relu(self.lin(x)))


class Transposed(nn.Module):
    """Weights whose memory is not in the order of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(5, WIDTH).t() / 3)
        self.other = nn.Parameter(torch.randn(3, WIDTH, 5).permute(2, 0, 1) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.one) @ self.other.sum(1)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, (1, 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(self.conv(x.view(-1, 2, 1, WIDTH // 2)), (0, 1)).flatten(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x[None])[0][0]


class Double(nn.Module):
    """Weights of another dtype than those of their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.wide = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + (x.double() @ self.wide).to(x.dtype)


class Checkpointed(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.relu = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.lin(x).add_(0.1))


class Keywords(nn.Module):
    """Its own chunk-like part is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x=x)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x.to(torch.bfloat16)).to(x.dtype)


class Reused(nn.Module):
    """Needs all bits of its weight in one of two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.lin.weight.sum(0)


class Adapted(nn.Module):
    """Rounds to the dtype of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        return y + self.down(y.to(self.down.weight.dtype) * 1.1)


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(Residual, Dropping, FrozenFirst, FrozenLast, Frozen, Plain, Raw, Normed, Unused, Twice, Transposed, Images),
        *(Attention, Recurrent, Double, Checkpointed, InPlace, Keywords, Half, Reused, Adapted),
    )
}


class Model(nn.Module):
    """Chunks, called in the order of `calls`; a parameter and a layer of its own."""

    def __init__(self, kinds: list[str], tied: tuple[int, int] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([KINDS[kind]() for kind in kinds])
        if tied is not None:
            self.blocks[tied[1]].lin.weight = self.blocks[tied[0]].lin.weight
        self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(WIDTH, 2)
        self.calls = list(range(len(kinds)))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.calls:
            x = self.blocks[index](x)
        return self.head(x) * self.scale
