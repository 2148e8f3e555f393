"""Checkpoints of the user, torch's own and `offload_checkpoint`, in and around chunks; against uncheckpointed runs."""

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from stream_cases import (
    WIDTH,
    Block,
    Stack,
    assert_equals_resident,
    assert_same,
    data,
    every_mode,
    every_policy,
    run,
    streaming,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ramtorch_core import offload_checkpoint
from ramtorch_core.engine import activations


class Switch:
    """Whether the user's checkpoints are active: the reference run has none."""

    on = True


def maybe(function: Any, *args: Any, **kwargs: Any) -> Any:
    reentrant = kwargs.pop("use_reentrant")
    return checkpoint(function, *args, use_reentrant=reentrant, **kwargs) if Switch.on else function(*args, **kwargs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    x = data(index).requires_grad_()  # a reentrant checkpoint needs an input with a gradient
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return [loss.detach(), x.grad]


def assert_equals_uncheckpointed(build: Any, step: Any = train, **options: Any) -> None:
    Switch.on = False
    try:
        expected = run(build, step)
    finally:
        Switch.on = True
    assert_same(run(build, step, streamed=options), expected)


class Inside(Block):
    """Checkpoints a part of itself."""

    reentrant = False

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + maybe(self.inner, self.norm(x), use_reentrant=self.reentrant)


class InsideReentrant(Inside):
    reentrant = True


class Whole(Inside):
    """Checkpoints a submodule that has a batch of its own hooks, by keyword only."""

    def inner(self, *, x: Tensor, scale: float) -> Tensor:
        return self.down(self.drop(self.up(x) * scale).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return maybe(self.inner, x=x, scale=0.5, use_reentrant=False)


class Around(Stack):
    """Checkpoints every block."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = maybe(block, x, use_reentrant=self.reentrant)
        return x


class AroundReentrant(Around):
    reentrant = True


class Pairs(Stack):
    """Checkpoints two blocks at once."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.blocks), 2):
            x = maybe(nn.Sequential(*self.blocks[first : first + 2]), x, use_reentrant=self.reentrant)
        return x


class PairsReentrant(Pairs):
    reentrant = True


class Nested(Stack):
    """A checkpoint around everything, and one around each block."""

    def once(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = maybe(block, x, use_reentrant=False)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return maybe(self.once, x, use_reentrant=False)


class Selective(Stack):
    """Checkpoints some blocks, keyword arguments only."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = maybe(block, x=x, use_reentrant=False) if index % 2 else block(x=x)
        return x


@every_mode
@pytest.mark.parametrize("kind", [Inside, InsideReentrant, Whole])
def test_checkpoints_inside_chunks_are_exact(mode, kind):
    assert_equals_uncheckpointed(lambda: Stack(*(kind(dropout=0.3) for _ in range(3))), **mode)


@every_mode
@pytest.mark.parametrize("kind", [Around, AroundReentrant, Pairs, PairsReentrant, Nested, Selective])
def test_checkpoints_around_chunks_are_exact(mode, kind):
    assert_equals_uncheckpointed(lambda: kind(*(Block(dropout=0.3) for _ in range(4))), **mode)


@every_mode
@pytest.mark.parametrize("kind", [Around, AroundReentrant, Pairs, PairsReentrant, Nested, Selective])
def test_checkpoints_around_and_inside_chunks_together_are_exact(mode, kind):
    assert_equals_uncheckpointed(lambda: kind(*(Inside(dropout=0.3) for _ in range(4))), **mode)


@every_policy
@pytest.mark.parametrize("kind", [Around, AroundReentrant, Pairs, Nested])
@pytest.mark.parametrize("resident_below", [0, 256])
def test_checkpoints_around_chunks_accumulate_exactly(mode, kind, resident_below):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        losses = []
        for microbatch in range(3):
            loss = model(data(10 * index + microbatch).requires_grad_()).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return losses

    build = lambda: kind(*(Block(dropout=0.3) for _ in range(4)))
    assert_equals_uncheckpointed(build, step, resident_below=resident_below, **mode)


@every_policy
@pytest.mark.parametrize("kind", [Around, AroundReentrant, Nested])
def test_checkpoints_around_chunks_are_exact_under_autocast(mode, kind):
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, self.weight * 2, self.bias).tanh()

    def step(model, optimizer, index):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = model(data(index).requires_grad_()).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_uncheckpointed(lambda: kind(Block(dropout=0.3), Doubled(WIDTH, WIDTH), Block()), step, **mode)


@every_policy
def test_checkpoint_sequential_is_exact(mode):
    class Segments(Stack):
        def forward(self, x: Tensor) -> Tensor:
            if Switch.on:
                return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)
            return super().forward(x)

    assert_equals_uncheckpointed(lambda: Segments(*(Block(dropout=0.3) for _ in range(4))), **mode)


@every_policy
def test_a_reentrant_checkpoint_passes_several_outputs_of_a_chunk(mode):
    class Two(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, y * 2

    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                first, second = maybe(block, x, use_reentrant=True)
                x = first + second.tanh()
            return x

    assert_equals_uncheckpointed(lambda: Root(Two(), Two(), Two()), **mode)


class Regions(Block):
    """Marks regions with `offload_checkpoint`: a module by position, a function by keyword only."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__(width, dropout)
        self.batch = nn.BatchNorm1d(width)

    def tail(self, *, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(x)))

    def forward(self, x: Tensor) -> Tensor:
        if not Switch.on:
            return x + self.tail(x=self.up(self.batch(self.norm(x))))
        x_in = offload_checkpoint(self.batch, self.norm(x))
        return x + offload_checkpoint(self.tail, x=offload_checkpoint(self.up, x_in))


@every_mode
def test_regions_marked_with_offload_checkpoint_are_exact(mode):
    assert_equals_uncheckpointed(lambda: Stack(*(Regions(dropout=0.3) for _ in range(3))), **mode)


def test_regions_marked_in_a_plain_model_are_exact():
    build = partial(lambda: Stack(*(Regions(dropout=0.3) for _ in range(3))))
    Switch.on = False
    try:
        expected = run(build, train)
    finally:
        Switch.on = True
    assert_same(run(build, train), expected)


@every_mode
def test_regions_around_chunks_are_exact(mode):
    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = offload_checkpoint(block, x) if Switch.on else block(x)
            return x

    assert_equals_uncheckpointed(lambda: Root(*(Regions(dropout=0.3) for _ in range(3))), **mode)


def test_offload_checkpoint_without_gradients_calls_the_function_once():
    calls = []
    with torch.no_grad():
        assert offload_checkpoint(lambda x, y: calls.append(x) or x + y, 1, y=2) == 3
    assert calls == [1]


@every_policy
def test_frozen_blocks_under_a_reentrant_checkpoint_pass_gradients_on(mode):
    def build():
        model = AroundReentrant(*(Block() for _ in range(4)))
        model.blocks[1].requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        return model

    assert_equals_uncheckpointed(build, **mode)


@pytest.mark.parametrize(("activations", "freed_before_backward"), [("checkpoint", 2), ("keep", 0)])
def test_activations_inside_of_chunks_are_freed_when_they_are_recomputed(activations, freed_before_backward):
    freed = []

    class Watched(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x).tanh()
            weakref.finalize(hidden.untyped_storage(), freed.append, True)
            return x + self.down(hidden)

    model = Stack(Watched(), Watched())
    with streaming(model, activations=activations):
        loss = model(data()).sum()
        assert len(freed) == freed_before_backward
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("activations", "warnings"), [("checkpoint", 1), ("keep", 0)])
def test_a_checkpoint_of_the_users_own_on_top_of_ours_gets_one_warning(
    use_reentrant: bool, activations: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrapped(Stack):
        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    with streaming(Wrapped(Block(), Block()), activations=activations) as streamer:
        for index in range(2):
            streamer.root(data(index).requires_grad_()).sum().backward()
    assert [r.message.count("checkpoint of your own") for r in caplog.records if r.levelname == "WARNING"] == [
        1
    ] * warnings


def test_chunks_inside_of_a_checkpointed_chunk_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with streaming(Stack(Block(), Block()), chunks=["blocks.*", "blocks.*.up"], activations="checkpoint") as streamer:
        streamer.root(data(0)).sum().backward()
    assert not caplog.records


class Ramped(nn.Linear):
    """Makes a tensor of the default dtype in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.tanh(y * torch.linspace(0.1, 1.3, WIDTH)).to(y.dtype)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = (layer(x).reshape(1, 2, -1, WIDTH // 2) for layer in (self.queries, self.keys))
        return x + nn.functional.scaled_dot_product_attention(queries, keys, keys).reshape(x.shape)


class Remembering(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Marked(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = offload_checkpoint(block, x)
        return x


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "default dtype": (partial(Ramped, WIDTH, WIDTH), lambda: default_dtype(torch.float64)),
    "attention": (Attending, lambda: sdpa_kernel(SDPBackend.MATH)),
    "kernels": (Remembering, lambda: torch.backends.mkldnn.flags(enabled=False)),
}


@pytest.mark.parametrize("kind", CONTEXTS)
def test_settings_of_a_context_around_the_forward_alone_hold_in_the_recompute(kind):
    block, context = CONTEXTS[kind]

    def step(model, optimizer, index):
        optimizer.zero_grad()
        x = data(index)
        with context():
            loss = model(x).square().mean()
        settings = activations._settings
        before = settings()
        loss.backward()
        assert settings() == before
        optimizer.step()
        return [loss.detach()]

    assert_equals_resident(lambda: Stack(block(), block()), step, activations="checkpoint")
    assert_same(run(lambda: Marked(block(), block()), step), run(lambda: Stack(block(), block()), step))
