"""Compiled blocks and compiled models stay compiled, and equal the eager run under a backend that changes nothing."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stream_cases import WIDTH, Block, Stack, assert_equals_resident, data, descend, every_policy, stack, streaming
from torch import Tensor, nn


class Backend:
    """Runs graphs as they are, and counts them and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        self.graphs += 1

        def call(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return call


@pytest.fixture
def backend() -> Iterator[Backend]:
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


@every_policy
def test_compiled_blocks_stay_compiled_and_train_exactly(mode, backend):
    def build():
        model = stack(3)
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    assert_equals_resident(build, chunks=Block, **mode)
    calls = backend.calls
    model = build()
    with streaming(model, chunks=Block, **mode):
        model(data()).sum().backward()
        assert backend.graphs > 0
        assert backend.calls >= calls + 3


@every_policy
def test_blocks_wrapped_by_the_compiler_stay_compiled_and_train_exactly(mode, backend):
    def build():
        return Stack(*(torch.compile(Block(), backend=backend) for _ in range(3)))

    assert_equals_resident(build, **mode)
    assert backend.graphs > 0


@every_policy
def test_a_compiled_part_of_a_chunk_stays_compiled_and_trains_exactly(mode, backend):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.lin = torch.compile(Block(), backend=backend), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(self.inner(x)).tanh()

    assert_equals_resident(lambda: Stack(Outer(), Outer()), **mode)
    assert backend.graphs > 0


@every_policy
def test_a_compiled_model_compiles_its_chunks_and_trains_exactly(mode, backend):
    def step(model, optimizer, index):
        if not hasattr(model, "compiled"):
            model.__dict__["compiled"] = torch.compile(model, backend=backend)
        loss = model.compiled(data(index)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(stack, step, **mode)
    assert backend.graphs > 0
    before = backend.calls
    model = stack()
    with streaming(model, **mode):
        compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(3):  # the first is watched, so it runs as it is
            descend(compiled, optimizer, index)
        assert backend.calls >= before + 2 * 4


@every_policy
def test_a_compiled_model_trains_exactly_under_autocast(mode, backend):
    def step(model, optimizer, index):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = model(data(index)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def build():
        return Stack(*(torch.compile(Block(), backend=backend) for _ in range(3)))

    assert_equals_resident(build, step, **mode)


@every_policy
@pytest.mark.parametrize("whole", [True, False])
def test_compilers_that_change_what_is_saved_recompute_with_the_same_graph(mode, whole, backend):
    """Such a backend saves other tensors than the eager forward, and would fail on the engine's own code."""

    def build():
        model = Stack(*(Block(dropout=0.2) for _ in range(3)))
        for block in () if whole else model.blocks:
            block.compile(backend="aot_eager")
        return model

    def step(model, optimizer, index):
        if whole and "compiled" not in model.__dict__:
            model.__dict__["compiled"] = torch.compile(model, backend="aot_eager")
        optimizer.zero_grad()
        loss = (model.__dict__["compiled"] if whole else model)(data(index)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    plain, streamed = build(), build()
    streamed.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, streamed)]
    with streaming(streamed, chunks=Block, **mode):
        for index in range(2):
            losses = []
            for each, optimizer in zip((plain, streamed), optimizers, strict=True):
                torch.manual_seed(index)
                losses.append(step(each, optimizer, index))
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-7)


class Eager(nn.Module):
    """A forward of which the compiler gives up a part, which then runs operation by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with open(os.devnull):
            torch._dynamo.graph_break()
            return self.second(x).tanh()


BLOCKS = {
    "of ours": Block,
    "of torch": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)),
    "in part": Eager,
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", BLOCKS)
@every_policy
def test_blocks_are_compiled_and_the_engines_own_code_is_not(mode, kind, whole, backend):
    seen = []

    def look(graph, inputs):
        seen.append({getattr(node.target, "__name__", node.target) for node in graph.graph.nodes if "call" in node.op})
        return graph.forward

    model = Stack(*(BLOCKS[kind]() for _ in range(2)))
    called = torch.compile(model, backend=look) if whole else model
    if not whole:
        for block in model.blocks:
            block.compile(backend=look)
    with streaming(model, chunks="blocks.*", **mode):
        for index in range(3):
            called(data(index)).sum().backward()
    assert any("linear" in names for names in seen)
    assert set().union(*seen) <= {"layer_norm", "linear", "gelu", "dropout", "add", "iadd", "tanh"}


def test_compiled_blocks_do_not_recompile_from_step_to_step(backend):
    model = stack(3)
    for block in model.blocks:
        block.compile(backend=backend)
    with streaming(model, chunks=Block, window=2, activations="keep"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(3):
            descend(model, optimizer, index)
        settled = backend.graphs
        for index in range(5):
            descend(model, optimizer, index)
        assert backend.graphs == settled
