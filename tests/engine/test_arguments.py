"""A forward that writes into its arguments, and is computed again in backward, writes once and sees what it saw."""

import gc
import logging
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from stream_cases import WIDTH, Stack, assert_equals_resident, data, every_policy, streaming
from torch import Tensor, nn

from ramtorch_core import offload_checkpoint
from ramtorch_core.engine.arguments import Arguments, Copies, may_write
from ramtorch_core.errors import RamtorchError


class Cache:
    """Keys and values per layer, as in decoders of the transformers library; the key and value of a layer are one."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def update(self, states: Tensor, index: int) -> Tensor:
        while len(self.layers) <= index:
            self.layers.append(Layer())
        layer = self.layers[index]
        layer.states = states if layer.states is None else torch.cat([layer.states, states])
        return layer.states

    def get_seq_length(self) -> int:
        return 0 if not self.layers or self.layers[0].states is None else len(self.layers[0].states)


class Layer:
    def __init__(self) -> None:
        self.states: Tensor | None = None


class Attention(nn.Module):
    """Attends to everything in the cache."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.project, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        states = self.project(x)
        if cache is not None:
            states = cache.update(states, self.index)
        return x + self.out(F.softmax(x @ states.t(), -1) @ states)


class Decoder(Stack):
    """Returns its cache too."""

    def __init__(self) -> None:
        super().__init__(*(Attention(index) for index in range(3)))

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        cache = Cache() if cache is None else cache
        for block in self.blocks:
            x = block(x, cache=cache)
        return x, cache


def step_with_cache(read: bool) -> Any:
    """A training step whose loss reads the cache or not."""

    def step(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Tensor]:
        optimizer.zero_grad()
        y, cache = model(data(index))
        loss = y.square().mean()
        if read:
            loss = loss + sum(layer.states.sum() for layer in cache.layers)
        loss.backward()
        optimizer.step()
        return [y.detach(), *(layer.states.detach() for layer in cache.layers)]

    return step


@every_policy
@pytest.mark.parametrize("read", [False, True])
def test_a_cache_is_filled_once_and_keeps_its_graph(mode: Any, read: bool) -> None:
    assert_equals_resident(Decoder, step_with_cache(read), **mode)


@every_policy
def test_a_cache_that_holds_something_before_the_step_is_used_with_its_gradient(mode: Any) -> None:
    """As in prefix tuning."""

    class Prefixed(Stack):
        def __init__(self) -> None:
            super().__init__(Decoder())
            self.prefix = nn.Parameter(torch.randn(2, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            cache = Cache()
            for index in range(3):
                cache.update(self.prefix, index)
            return self.blocks[0](x, cache)[0]

    assert_equals_resident(Prefixed, chunks="blocks.0.blocks.*", **mode)


def test_without_gradients_a_cache_serves_token_after_token() -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(), data(0, 5, WIDTH)
    with torch.no_grad():
        cache = Cache()
        expected = [model(token, cache)[0] for token in tokens.split(1)]
        with streaming(model):
            cache = Cache()
            for token, y in zip(tokens.split(1), expected, strict=True):
                assert torch.equal(model(token, cache)[0], y)
    assert cache.get_seq_length() == 5


def test_training_with_a_cache_is_warned_of_once(caplog: Any) -> None:
    model = Decoder()
    with streaming(model), caplog.at_level(logging.WARNING):
        for index in range(2):
            step_with_cache(False)(model, torch.optim.SGD(model.parameters()), index)
    assert [m for m in caplog.messages if "cache" in m] == [
        "chunk 'blocks.0' fills a cache of keys and values in training: they stay in device memory until its backward. "
        "If nobody reads them, switch the cache off (config.use_cache = False)."
    ]


def test_a_graph_that_ends_in_an_argument_dies_without_a_backward() -> None:
    """A recompute that held its arguments would be held by their graph in turn."""
    model = Decoder()
    with streaming(model):
        y, cache = model(data())
        references = [weakref.ref(cache), weakref.ref(cache.layers[0].states)]
        del y, cache
        gc.collect()
        assert [reference() for reference in references] == [None, None]


# --- other arguments that can be written ------------------------------------------------------------------------------


@dataclass
class Record:
    """Has attributes."""

    losses: list[Tensor] = field(default_factory=list)
    calls: int = 0


@dataclass(slots=True)
class Slotted:
    """Has slots."""

    losses: list[Tensor] = field(default_factory=list)
    calls: int = 0


class Named(NamedTuple):
    """A tuple around something that can be written."""

    record: Record
    scale: float


def add_to_record(record: Any, loss: Tensor) -> Tensor:
    record.losses.append(loss)
    record.calls += 1
    return loss * record.calls * len(record.losses)


def add_to_list(losses: list[Tensor], loss: Tensor) -> Tensor:
    losses.append(loss)
    return loss * len(losses)


def add_to_dict(losses: dict[str, list[Tensor]], loss: Tensor) -> Tensor:
    losses.setdefault("all", []).append(loss)
    return loss * len(losses["all"])


WRITERS = [
    (list, add_to_list),
    (deque, add_to_list),
    (dict, add_to_dict),
    (OrderedDict, add_to_dict),
    (lambda: defaultdict(list), add_to_dict),
    (lambda: {"deep": [{}]}, lambda holder, loss: add_to_dict(holder["deep"][0], loss)),
    (Record, add_to_record),
    (Slotted, add_to_record),
    (lambda: Named(Record(), 1.0), lambda named, loss: add_to_record(named.record, loss)),
    (lambda: ([], 1), lambda pair, loss: add_to_list(pair[0], loss)),
]


@every_policy
@pytest.mark.parametrize(("make", "write"), WRITERS)
def test_losses_that_chunks_leave_in_an_argument_are_left_once(mode: Any, make: Any, write: Any) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, losses: Any) -> Tensor:
            y = torch.tanh(self.lin(x))
            return y * write(losses, y.square().mean())

    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            losses = make()
            for block in self.blocks:
                x = block(x, losses)
            found: list[Tensor] = [leaf for leaf in _leaves(losses) if isinstance(leaf, Tensor)]
            assert len(found) == len(self.blocks)
            return x + sum(found)

    assert_equals_resident(lambda: Root(*(Routed() for _ in range(3))), **mode)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return _leaves(list(value.values()))
    if isinstance(value, list | tuple | deque):
        return [leaf for item in value for leaf in _leaves(item)]
    return _leaves(value.losses) if hasattr(value, "losses") else [value]


@every_policy
def test_states_that_one_chunk_leaves_in_a_dict_for_another_arrive(mode: Any) -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
            if "states" not in shared:
                shared["states"] = self.lin(x)
            return torch.tanh(self.lin(x) * shared["states"])

    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            shared: dict[str, Tensor] = {}
            for block in self.blocks:
                x = block(x, shared=shared)
            return x

    assert_equals_resident(lambda: Root(*(Shares() for _ in range(3))), **mode)


def test_a_second_backward_through_one_graph_starts_from_the_same_arguments() -> None:
    def gradients(model: Any) -> list[Tensor]:
        y, _ = model(data())
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(0)
    plain, model = Decoder(), Decoder()
    model.load_state_dict(plain.state_dict())
    expected = gradients(plain)
    with streaming(model):
        for found, wanted in zip(gradients(model), expected, strict=True):
            assert torch.equal(found, wanted)


# --- tensors ----------------------------------------------------------------------------------------------------------


class Leaks(nn.Module):
    """Begins with an activation in place, as blocks of image-to-image networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.LeakyReLU(0.2, inplace=True)
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.activation(x))


@every_policy
def test_a_chunk_may_write_its_input_in_place(mode: Any) -> None:
    assert_equals_resident(lambda: Stack(nn.Linear(WIDTH, WIDTH), *(Leaks() for _ in range(3))), **mode)


def test_a_chunk_without_operations_in_place_keeps_its_own_input() -> None:
    x = data()
    assert may_write(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) is Copies.NONE
    assert may_write(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))) is Copies.ACTIVATIONS
    assert Arguments("f", (x,), {}, copies=Copies.NONE).tensors[0] is x
    assert Arguments("f", (x,), {}, copies=Copies.ACTIVATIONS).tensors[0] is x
    assert Arguments("f", (x,), {}, copies=Copies.ALL).tensors[0] is not x


class Doubles(nn.Linear):
    """Writes its input, which does not show beforehand."""

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return super().forward(x)


def test_a_write_that_comes_unexpected_is_refused_once_and_then_expected() -> None:
    torch.manual_seed(0)
    model = Stack(nn.Linear(WIDTH, WIDTH), Doubles(WIDTH, WIDTH))
    model(data()).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with streaming(model):
        with pytest.raises(RamtorchError, match=r"chunk 'blocks.1' writes a tensor .* activations='keep'"):
            model(data())
        model(data()).sum().backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)


def test_tensors_that_share_memory_with_a_written_one_and_tensors_inside_of_objects_are_refused() -> None:
    for args in [(x := data(), x[:1]), (Named(Record([data()]), 1.0),)]:
        arguments = Arguments("chunk 'it'", args, {}, copies=Copies.ALL)
        tensor = args[0] if isinstance(args[0], Tensor) else args[0].record.losses[0]
        tensor.zero_()
        with pytest.raises(RamtorchError, match="chunk 'it' writes a tensor among its arguments in place"):
            arguments.finish()


def test_a_marked_region_fills_its_arguments_once_and_may_not_write_tensors() -> None:
    lin = nn.Linear(WIDTH, WIDTH)
    calls: list[int] = []

    def region(x: Tensor, seen: list[Tensor]) -> Tensor:
        calls.append(1)
        seen.append(lin(x))
        return torch.tanh(seen[-1]) * len(seen)

    seen: list[Tensor] = []
    offload_checkpoint(region, data(), seen).sum().backward()
    assert (len(calls), len(seen)) == (2, 1)
    with pytest.raises(RamtorchError, match=r"the marked region TensorBase.relu_ writes a tensor"):
        offload_checkpoint(Tensor.relu_, lin(data()))


def test_a_marked_module_may_write_its_input_by_an_operation_in_place() -> None:
    first, module = nn.Linear(WIDTH, WIDTH), Leaks()
    parameters = [*first.parameters(), *module.parameters()]
    expected = torch.autograd.grad(module(first(data())).sum(), parameters)
    found = torch.autograd.grad(offload_checkpoint(module, first(data())).sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- what is copied ---------------------------------------------------------------------------------------------------


class MadeInItsOwnWay:
    """A class with a constructor of its own kind, like handles of native libraries."""

    def __new__(cls) -> "MadeInItsOwnWay":
        made = super().__new__(cls)
        made.items = []
        return made

    items: list[int]


def test_modules_functions_sentinels_and_what_makes_itself_are_shared() -> None:
    values = [nn.Linear(1, 1), len, lambda: 0, MadeInItsOwnWay(), type("Sentinel", (), {})(), torch.float32, (1, 2)]
    arguments = Arguments("f", (values,), {}, copies=Copies.NONE)
    (again,), _ = arguments.again([])
    assert again is not values
    assert all(found is value for found, value in zip(again, values, strict=True))


def test_objects_that_are_given_twice_or_hold_themselves_stay_one() -> None:
    record: Any = Record()
    record.itself = record
    (first, second), keywords = Arguments("f", (record, [record]), {"third": record}, copies=Copies.NONE).again([])
    assert first is second[0] is keywords["third"] is first.itself
    assert first is not record
