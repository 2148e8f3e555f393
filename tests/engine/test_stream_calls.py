"""How chunks are called: arguments, outputs, in-place operations, order; against the plain resident run."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from stream_cases import WIDTH, Block, Stack, assert_equals_resident, data, descend, every_mode, every_policy, stack
from torch import Tensor, nn

from ramtorch_core import WindowError


@dataclass
class Packet:
    x: Tensor
    mask: Tensor | None = None
    history: list[Tensor] = field(default_factory=list)


class Pair(NamedTuple):
    x: Tensor
    extra: Any


class Lin(nn.Module):
    """One linear layer; subclasses say how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)


class Keywords(Lin):
    def forward(self, x: Tensor, /, *, mask: Tensor, flag: bool = False, nothing: None = None) -> Tensor:
        return self.lin(x) * mask if flag and nothing is None else x


class OnlyKeywords(Lin):
    def forward(self, *, x: Tensor, scale: float, drop: bool = True) -> Tensor:
        return F.dropout(self.lin(x) * scale, 0.3, training=drop)


class Dicts(Lin):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = torch.tanh(self.lin(batch["x"]))
        return {"x": x, "deep": [{"sum": x.sum()}, None], "name": batch["name"]}


class Packets(Lin):
    def forward(self, packet: Packet) -> Packet:
        x = torch.tanh(self.lin(packet.x))
        return Packet(x if packet.mask is None else x * packet.mask, packet.mask, [*packet.history, x])


class Pairs(Lin):
    def forward(self, x: Tensor, extra: Any = None) -> Pair:
        return Pair(torch.tanh(self.lin(x)), (extra, None, 3))


class Nones(Lin):
    def forward(self, x: Tensor, store: list[Tensor]) -> None:
        store.append(torch.tanh(self.lin(x)))


class Through(Lin):
    """Returns its input itself, and a view of it, beside what it computes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x[1:], self.lin(x)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def use_keywords(model, optimizer, index):
    mask = (data(7) > 0).float()
    x = data(index)
    for block in model.blocks:
        x = block(x, mask=mask, flag=True)
    return backward(model, optimizer, x.square().mean())


def use_only_keywords(model, optimizer, index):
    x = data(index)
    for block in model.blocks:
        x = block(x=x, scale=0.5)
    return backward(model, optimizer, x.square().mean())


def use_dicts(model, optimizer, index):
    batch = model({"x": data(index), "name": "a"})
    assert batch["name"] == "a"
    return backward(model, optimizer, batch["x"].square().mean() + batch["deep"][0]["sum"])


def use_packets(model, optimizer, index):
    packet = model(Packet(data(index), data(9)))
    return backward(model, optimizer, packet.x.square().mean() + sum(x.sum() for x in packet.history))


def use_only_the_history(model, optimizer, index):
    return backward(model, optimizer, model(Packet(data(index))).history[1].square().mean())


def use_pairs(model, optimizer, index):
    x, extra = data(index), None
    for block in model.blocks:
        x, extra = block(x, extra=extra)
    return backward(model, optimizer, x.square().mean())


def use_nones(model, optimizer, index):
    store = [data(index)]
    for block in model.blocks:
        assert block(store[-1], store) is None
    return backward(model, optimizer, store[-1].square().mean())


def use_through(model, optimizer, index):
    x = data(index).requires_grad_()
    for block in model.blocks:
        same, view, y = block(x)
        x = torch.tanh(y + same) + F.pad(view, (0, 0, 1, 0))
    return backward(model, optimizer, x.square().mean())


CALLS = [
    (Keywords, use_keywords),
    (OnlyKeywords, use_only_keywords),
    (Dicts, use_dicts),
    (Packets, use_packets),
    (Packets, use_only_the_history),
    (Pairs, use_pairs),
    (Nones, use_nones),
    (Through, use_through),
]


@every_mode
@pytest.mark.parametrize(("kind", "step"), CALLS, ids=[step.__name__ for _, step in CALLS])
def test_arguments_and_outputs_of_every_kind_pass_through(mode, kind, step):
    assert_equals_resident(lambda: Stack(*(kind() for _ in range(3))), step, **mode)


class InPlace(Lin):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.lin(x), inplace=True)
        y = y + 1
        y.mul_(0.5)
        y[0] += 1.0
        return y


@every_mode
def test_in_place_operations_inside_a_chunk_are_exact(mode):
    assert_equals_resident(lambda: Stack(InPlace(), nn.ReLU(inplace=True), InPlace(), InPlace()), **mode)


@every_mode
def test_in_place_operations_on_a_chunks_output_are_exact(mode):
    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x.add_(1)
                x[:, :2] *= 0.5
                x.relu_()
            return x

    assert_equals_resident(lambda: Root(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), **mode)


@every_mode
def test_views_of_a_chunks_output_may_be_modified_in_place(mode):
    class Splits(Lin):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.lin(x)
            return y.view(-1, 2, WIDTH // 2).select(1, 0), y[:, WIDTH // 2 :].t()

    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                first, second = block(x)
                first.mul_(2)
                x = torch.cat([first, second.t()], 1).tanh()
            return x

    assert_equals_resident(lambda: Root(*(Splits() for _ in range(3))), **mode)


@every_mode
def test_a_chunk_called_twice_gets_the_sum_of_its_gradients(mode):
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x)) + self.blocks[0](x)

    assert_equals_resident(lambda: Twice(Block(), Block(), Block()), **mode)


@every_mode
def test_chunks_may_be_skipped_repeated_or_reordered_in_some_steps(mode):
    orders = [[0, 1, 2, 3], [0, 1, 2, 3], [3, 1], [2, 2, 0], [0, 1, 2, 3], [3, 2, 1, 0], [], [0, 1, 2, 3]]

    def step(model, optimizer, index):
        x = data(index).requires_grad_()
        for position in orders[index]:
            x = model.blocks[position](x)
        return backward(model, optimizer, x.square().mean())

    assert_equals_resident(stack, step, steps=len(orders), **mode)


@every_mode
def test_branches_that_do_not_reach_the_loss_are_left_out(mode):
    class Branches(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first, second, third = (block(x) for block in self.blocks)
            assert second is not None
            return first + third.detach() * 2

    assert_equals_resident(lambda: Branches(Block(), Block(), Block()), **mode)


class Recursive(nn.Module):
    """Runs inside itself, and uses a weight before and another one after that."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        x = torch.tanh(self.before(x))
        return self.after(self(x, depth - 1) if depth else x)


@every_mode
def test_a_chunk_that_runs_inside_itself_is_exact(mode):
    assert_equals_resident(lambda: Stack(Recursive(), Recursive()), **mode)


class Calls(nn.Module):
    """Calls a module that is not its child."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.other[0](torch.tanh(self.before(x))))


@every_mode
def test_a_chunk_that_calls_another_one_is_exact_or_told_to_raise_the_window(mode):
    def build():
        first = Block()
        second = Calls(first)
        return Stack(first, second, Calls(second))

    if mode["window"] < 3:
        with pytest.raises(WindowError, match="Raise window="):
            assert_equals_resident(build, **mode)
    else:
        assert_equals_resident(build, **mode)


@every_mode
def test_a_submodule_of_a_chunk_called_from_outside_is_exact_or_refused(mode):
    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0].up(super().forward(x))

    assert_equals_resident(lambda: Root(Block(), Block()), **mode)


@every_policy
def test_forward_hooks_of_the_user_see_and_change_what_they_do_in_plain_training(mode):
    def step(model, optimizer, index):
        seen = []
        handles = [
            model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
            model.blocks[1].register_forward_hook(lambda _, args, output: output * 0.5),
            model.blocks[2].up.register_forward_hook(lambda _, args, output: seen.append(output.detach().clone())),
            model.blocks[3].register_full_backward_hook(lambda _, gi, go: (gi[0] * 2,)),
            model.blocks[1].register_full_backward_pre_hook(lambda _, go: seen.append(go[0].clone())),
            model.blocks[2].down.register_full_backward_hook(lambda _, gi, go: seen.append(gi[0].clone())),
        ]
        loss = descend(model, optimizer, index)
        for handle in handles:
            handle.remove()
        return [loss, seen if mode["activations"] == "keep" else len(seen) > 0]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_an_input_that_requires_a_gradient_gets_it(mode):
    def step(model, optimizer, index):
        x = data(index).requires_grad_()
        loss = backward(model, optimizer, model(x).square().mean())
        return [loss, x.grad]

    assert_equals_resident(stack, step, **mode)


@every_mode
def test_a_tensor_captured_by_a_later_chunk_gets_its_gradient(mode):
    class Captures(Lin):
        source: "list[Tensor]"

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.lin(x)) + sum(self.source)
            return y

    def step(model, optimizer, index):
        x = data(index)
        extra = model.blocks[0](x)
        for block in list(model.blocks)[1:]:
            block.source = [extra]
        return backward(model, optimizer, model.blocks[2](model.blocks[1](extra)).square().mean())

    assert_equals_resident(lambda: Stack(nn.Linear(WIDTH, WIDTH), Captures(), Captures()), step, **mode)
