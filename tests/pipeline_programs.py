"""Random programs on random stages, and a model whose chunks share weights in every way."""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Block, Chain, accumulate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Affine(nn.Module):
    """Linear and an activation; its weight is what other cells borrow."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(len(x), 2, -1)).flatten(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        return (x + self.attention(x, x, x, need_weights=False)[0])[0]


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.norm(x))


class Counting(nn.Module):
    """Computes with a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0)
        return x + self.seen * 0.1


class InPlace(nn.Module):
    """Begins by changing its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        x += 0.5
        return self.block(F.relu(x, inplace=True))


class Twice(nn.Module):
    """One layer used twice, and its output cut into pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.lin(self.lin(x)).chunk(2, -1)
        return torch.cat([b, a], -1) + x


CELLS: list[Callable[[], nn.Module]] = [Affine, Convolution, Attention, Normalised, Counting, InPlace, Twice, Block]


class Program(nn.Module):
    """Cells in a fixed order; `random.Random(number)` says what else happens between and around them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        choose = random.Random(number)
        self.number, self.depth = number, choose.randint(4, 6)
        self.cells = nn.ModuleList(choose.choice(CELLS)() for _ in range(self.depth))
        self.cells[choose.randrange(self.depth)] = Affine()
        self.shared = [i for i, cell in enumerate(self.cells) if isinstance(cell, Affine)]
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        for cell in self.cells:
            if choose.random() < 0.15:
                cell.requires_grad_(False)
        self.head.requires_grad_(choose.random() < 0.9)
        self.remembers = any(True for _ in self.buffers())
        """Then no cell is skipped or recomputed: another order of changes is another result."""

    def training_step(self, item: Any) -> Tensor:
        x, y = item
        choose = random.Random(self.number)  # the same program for every microbatch
        known, extra = [x], torch.zeros(())
        for cell in self.cells:
            source = self.mix(choose, known)
            skip, recompute = choose.random() < 0.15, choose.random() < 0.2
            if self.remembers:
                known.append(cell(source * 1))
            elif skip and float(source.detach().sum()) > 0:
                known.append(source)
            elif recompute:
                known.append(checkpoint(cell, source * 1, use_reentrant=False))
            else:
                known.append(cell(source * 1))
            for _ in range(choose.randint(0, 3)):
                known.append(self.glue(choose, known))
            if choose.random() < 0.2:
                extra = extra + known[choose.randrange(len(known))].pow(2).mean()
            if choose.random() < 0.08 and not self.remembers and float(known[-1].detach().sum()) > 0:
                return known[-1].tanh().mean() + extra
        if choose.random() < 0.2:
            extra = extra + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())
        return F.cross_entropy(self.head(self.mix(choose, known)), y) + extra

    def mix(self, choose: random.Random, known: list[Tensor]) -> Tensor:
        chosen = [known[-1], *choose.sample(known, min(len(known), choose.choice([0, 0, 1, 2])))]
        return chosen[0] if len(chosen) == 1 else torch.stack(chosen).mean(0)

    def glue(self, choose: random.Random, known: list[Tensor]) -> Tensor:
        a, b = choose.choice(known), choose.choice(known)
        lender: Any = self.cells[choose.choice(self.shared)]
        kind = choose.choice(GLUE)
        if kind == "add":
            return a + b * 0.5
        if kind == "gate":
            return a * torch.sigmoid(b)
        if kind == "where":
            return torch.where(torch.arange(WIDTH, device=a.device) % 2 == 0, a, b)
        if kind == "cat":
            return torch.cat([a, b]).view(2, -1, WIDTH).mean(0)
        if kind == "write":
            fresh = a * 1
            fresh[:, 0] = b[:, 1]
            return fresh.mul_(0.5).add_(b)
        if kind == "out":
            fresh = torch.empty_like(a)
            fresh.copy_(b)
            return fresh + a
        if kind == "views":
            return a.t().t() + b.T.mT + a.view(-1).view_as(a)
        if kind == "dtypes":
            return a.double().float() + b.to(torch.float64).to(a)
        if kind == "detached":
            return a.detach() * b
        if kind == "no grad":
            with torch.no_grad():
                weight = torch.softmax(a, -1)
            return b * weight
        if kind == "borrow":
            return torch.tanh(F.linear(a, lender.lin.weight, lender.lin.bias))
        if kind == "borrow otherwise":
            return a * lender.lin.weight.sum(0) + F.linear(b, lender.lin.weight.t())
        if kind == "scale":
            return a * self.scale
        if kind == "hook":
            fresh = a * self.scale + b
            if fresh.requires_grad:
                fresh.register_hook(lambda gradient: gradient * 0.5)
            return fresh
        if kind == "hook on an earlier one":
            if a.requires_grad:
                a.register_hook(lambda gradient: gradient * 0.75)
            return a
        assert kind == "einsum"
        return torch.einsum("ij,kj->ki", torch.eye(WIDTH, device=a.device), a) + b.expand(2, *b.shape).sum(0)


GLUE = [
    "add", "gate", "where", "cat", "write", "out", "views", "dtypes", "detached", "no grad", "borrow",
    "borrow otherwise", "scale", "hook", "hook on an earlier one", "einsum",
]  # fmt: skip


def runs(model: Program, inputs: list[list[Any]]) -> bool:
    """Whether plain torch runs the program: it may change what autograd needs, train nothing, or overflow."""
    plain = copy.deepcopy(model)
    try:
        losses = [loss for items in inputs for loss in accumulate(plain, plain.training_step, items)]
    except RuntimeError:
        return False
    gradients = [p.grad.sum() for p in plain.parameters() if p.grad is not None]
    return bool(torch.stack([*losses, *gradients]).isfinite().all())


class Sharing(Chain):
    """Weights that are shared within a chunk, between chunks of a stage, between stages, and before their home."""

    def __init__(self) -> None:
        super().__init__(10)
        for block in (self.blocks[3], self.blocks[8]):
            block.again = block.up
        self.blocks[2].up.weight = self.blocks[1].up.weight
        self.blocks[7].norm.weight = self.blocks[6].norm.weight
        self.blocks[9].up.weight = self.blocks[0].up.weight
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.late(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.late(x) + self.late(x * x))
