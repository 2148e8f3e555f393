"""Training under autocast, streamed, against the plain resident run under the same autocast."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from autocast_cases import (
    HALVES,
    ON_ROWS,
    Doubled,
    Functional,
    Island,
    Reused,
    UsedTwice,
    halves,
    lstm_runs_in,
    training,
)
from stream_cases import (
    WIDTH,
    Block,
    Stack,
    assert_equals_resident,
    assert_same,
    data,
    every_mode,
    every_policy,
    stack,
    streaming,
)
from torch import Tensor, nn

from ramtorch_core import MicrobatchRunner


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@every_mode
@halves
@pytest.mark.parametrize("remember", [False, True])
def test_ordinary_blocks_train_exactly_under_autocast(mode, dtype, remember):
    assert_equals_resident(stack, training(dtype, remember=remember), steps=4, **mode)


@every_policy
@halves
@pytest.mark.parametrize("kind", ON_ROWS)
@pytest.mark.parametrize("remember", [False, True])
def test_every_way_to_use_a_weight_is_exact_under_autocast(mode, dtype, kind, remember):
    def build():
        return Stack(*(kind() if kind is Functional else kind(WIDTH, WIDTH) for _ in range(3)))

    assert_equals_resident(build, training(dtype, remember=remember), steps=4, **mode)


@every_policy
@pytest.mark.parametrize("kind", ON_ROWS)
def test_every_way_to_use_a_weight_accumulates_exactly_under_autocast(mode, kind):
    def build():
        return Stack(*(kind() if kind is Functional else kind(WIDTH, WIDTH) for _ in range(2)))

    assert_equals_resident(build, training(torch.bfloat16, microbatches=3), **mode)


class Late(Stack):
    """Its second chunk is not called in the first step."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.steps > 1 else self.blocks[0](x)


@every_policy
@pytest.mark.parametrize("kind", ON_ROWS)
@pytest.mark.parametrize("remember", [False, True])
def test_a_chunk_that_is_called_late_is_exact_under_autocast(mode, kind, remember):
    def build():
        return Late(nn.Linear(WIDTH, WIDTH), kind() if kind is Functional else kind(WIDTH, WIDTH))

    step = training(torch.bfloat16, remember=remember)

    def late(model, optimizer, index):
        model.steps = index + 1
        return step(model, optimizer, index)

    assert_equals_resident(build, late, steps=4, **mode)


@every_policy
@pytest.mark.parametrize("kind", [UsedTwice, Reused])
def test_a_chunk_that_is_called_late_is_exact_in_all_microbatches_of_its_first_step(mode, kind):
    def train(streamed):
        torch.manual_seed(0)
        model = Late(nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with streaming(model, **mode) if streamed else nullcontext() as streamer:
            runner = MicrobatchRunner(streamer) if streamed else None
            for index in range(3):
                optimizer.zero_grad()
                inputs = [data(10 * index + batch) for batch in range(3)]
                model.steps = index + 1
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    if runner is None:
                        for x in inputs:
                            model(x).float().square().mean().backward()
                    else:
                        loss = lambda x: model(x).float().square().mean()
                        found = runner.train(loss, inputs, lambda loss, _: (loss, None), step=index).gradients
                        for parameter, gradient in found.items():
                            parameter.grad = gradient
                optimizer.step()
            if runner is not None:
                runner.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert_same(train(True), train(False))


@every_policy
@halves
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_are_exact_under_autocast(mode, dtype, dimensions, transposed):
    name = f"Conv{'Transpose' if transposed else ''}{dimensions}d"
    step = training(dtype, 2, 4, *[5] * dimensions)
    if transposed and dimensions == 3 and dtype == torch.float16:
        pytest.skip("this CPU has no such kernel")
    assert_equals_resident(lambda: Stack(*(getattr(nn, name)(4, 4, 3, padding=1) for _ in range(2))), step, **mode)


@every_policy
@halves
@pytest.mark.parametrize(
    "block",
    [Attention, nn.LSTM, nn.GRU, nn.Bilinear],
)
def test_attention_and_recurrent_modules_are_exact_under_autocast(mode, dtype, block):
    if block is nn.LSTM and not lstm_runs_in(dtype):
        pytest.skip("this CPU has no such kernel")
    if block is nn.Bilinear:

        class Pairs(nn.Bilinear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x, x).tanh()

        block = lambda: Pairs(WIDTH, WIDTH, WIDTH)
    make = (lambda: Recurrent(block)) if block in (nn.LSTM, nn.GRU) else block
    assert_equals_resident(lambda: Stack(make(), make()), training(dtype, 2, 3, WIDTH), steps=4, **mode)


@every_policy
@pytest.mark.parametrize("chunks", [["embedding", "blocks.*", "head"], "leaves"])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_tied_heads_are_exact_under_autocast(mode, chunks, tied):
    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
            self.blocks = nn.ModuleList([Block(), Block()])
            if tied:
                self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def step(model, optimizer, index):
        tokens = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(index))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert_equals_resident(LanguageModel, step, chunks=chunks, **mode)


@every_policy
@pytest.mark.parametrize("first", [0, 1])
def test_steps_with_and_without_autocast_may_alternate(mode, first):
    def step(model, optimizer, index):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if (index + first) % 2 else nullcontext():
            loss = model(data(index)).float().square().mean()
        loss.backward()
        with torch.no_grad():
            exact = model(data(9))
            with torch.autocast("cpu", torch.bfloat16):
                rounded = model(data(9))
        optimizer.step()
        return [loss.detach(), exact, rounded]

    assert_equals_resident(stack, step, steps=4, **mode)
    assert_equals_resident(lambda: Stack(Doubled(WIDTH, WIDTH), Island(WIDTH, WIDTH)), step, steps=4, **mode)


@every_policy
def test_chunks_with_and_without_autocast_may_alternate_inside_a_step(mode):
    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                with torch.autocast("cpu", enabled=index % 2 == 0, dtype=torch.bfloat16):
                    x = block(x.float())
            return x

    def build():
        return Root(*(Block() for _ in range(4)))

    assert_equals_resident(build, training(torch.bfloat16), steps=4, **mode)


@every_policy
def test_two_autocast_dtypes_may_alternate(mode):
    def step(model, optimizer, index):
        return training(HALVES[index % 2])(model, optimizer, index)

    assert_equals_resident(stack, step, steps=4, **mode)


@every_policy
def test_a_use_that_changes_between_steps_is_exact(mode):
    class Changing(nn.Linear):
        wide = False

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * 2 if self.wide else self.weight)

    def step(model, optimizer, index):
        model.blocks[1].wide = True  # from the first step on for one, never for the other
        return training(torch.bfloat16)(model, optimizer, index)

    assert_equals_resident(lambda: Stack(Changing(WIDTH, WIDTH), Changing(WIDTH, WIDTH)), step, steps=4, **mode)


@every_policy
def test_frozen_chunks_are_exact_under_autocast(mode):
    def build():
        model = stack()
        model.blocks[1].requires_grad_(False)
        model.blocks[3].up.requires_grad_(False)
        return model

    assert_equals_resident(build, training(torch.bfloat16), **mode)


@halves
def test_a_scaler_scales_and_unscales_as_in_plain_training(dtype):
    def step(model, optimizer, index):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = model(data(index)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    assert_equals_resident(stack, step)
