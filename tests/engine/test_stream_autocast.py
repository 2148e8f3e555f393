"""Autocast, and the dtype in which each weight crosses, against the plain resident run under the same autocast."""

import logging
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from stream_cases import WIDTH, Block, Stack, assert_equals_resident, data, every_mode, every_policy, stack, streaming
from torch import Tensor, nn

from ramtorch_core.errors import ConfigurationError

HALVES = [torch.bfloat16, torch.float16]
halves = pytest.mark.parametrize("dtype", HALVES)


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


ON_ROWS = [Functional, Doubled, Reused, UsedTwice, Island, OwnAutocast, Transposed, Sliced]


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
    if block is nn.LSTM and dtype == torch.float16:
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


def dtypes_after(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, remember: bool = False, **options: object
) -> dict[str, torch.dtype]:
    """In which dtype each weight crosses after three observed steps."""
    with streaming(model, **options) as streamer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(3):
            training(dtype, remember=remember)(model, optimizer, index)
        weights = [weight for group in streamer.groups for weight in group.weights]
        return {weight.name: weight.dtype for weight in weights} | {w.name: w.dtype for w in streamer.census.copies}


@halves
def test_linear_weights_cross_in_half_precision_and_norms_do_not(dtype):
    found = dtypes_after(stack(1), dtype)
    assert found["blocks.0.up.weight"] == found["blocks.0.down.weight"] == dtype
    assert found["blocks.0.norm.weight"] == torch.float32


def test_raw_parameters_whose_only_use_is_a_product_are_promoted_after_they_were_seen():
    found = dtypes_after(Stack(Functional()))
    assert found == dict.fromkeys(["blocks.0.first", "blocks.0.second", "blocks.0.bias"], torch.bfloat16)


def test_a_weight_cast_twice_crosses_in_half_precision_where_autocast_remembers_its_casts():
    assert dtypes_after(Stack(UsedTwice(WIDTH, WIDTH)), remember=True)["blocks.0.weight"] == torch.bfloat16


@pytest.mark.parametrize("kind", [Doubled, Reused, UsedTwice, Island])
def test_weights_that_need_all_their_bits_cross_in_their_own_dtype(kind):
    assert dtypes_after(Stack(kind(WIDTH, WIDTH)))["blocks.0.weight"] == torch.float32


def test_nothing_crosses_in_half_precision_without_autocast():
    model = stack(1)
    with streaming(model) as streamer:
        for index in range(3):
            model(data(index)).sum().backward()
        assert {weight.dtype for group in streamer.groups for weight in group.weights} == {torch.float32}


def test_half_precision_shadows_halve_the_slots():
    model = Stack(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    with streaming(model, window=2) as streamer:
        with torch.autocast("cpu", torch.bfloat16):
            model(data(0, 3, 64))
        assert streamer.device_weight_bytes() == 2 * 64 * 64 * 2


@every_policy
def test_stream_dtype_float32_is_exact_under_autocast(mode):
    assert_equals_resident(stack, training(torch.bfloat16), stream_dtype=torch.float32, **mode)
    assert set(dtypes_after(stack(1), stream_dtype=torch.float32).values()) == {torch.float32}


def test_stream_dtype_by_pattern_takes_the_first_match():
    override = {"*.up.weight": torch.float32, "*.up.*": torch.float16}
    found = dtypes_after(stack(1), torch.float16, stream_dtype=override)
    assert found["blocks.0.up.weight"] == torch.float32
    assert found["blocks.0.up.bias"] == found["blocks.0.down.weight"] == torch.float16


def test_stream_dtype_rounds_even_what_autocast_would_not():
    plain, model = Stack(Doubled(WIDTH, WIDTH)), Stack(Doubled(WIDTH, WIDTH))
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        plain.blocks[0].weight.copy_(plain.blocks[0].weight.bfloat16())
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
        streaming(model, stream_dtype={"*weight": torch.bfloat16}),
    ):
        assert torch.equal(model(data()), plain(data()))


@pytest.mark.parametrize("wrong", ["half", torch.int8, {"*": torch.int64}, {"*": "bf16"}, 16])
def test_an_unknown_stream_dtype_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="stream_dtype"):
        streaming(stack(1), stream_dtype=wrong).__enter__()


def test_visits_outside_of_autocast_after_half_precision_shadows_are_told_once(caplog):
    model = stack(2)
    with streaming(model), caplog.at_level(logging.WARNING):
        with torch.autocast("cpu", torch.bfloat16):
            model(data()).sum().backward()
        for _ in range(2):
            model(data()).sum().backward()
    assert sum("outside of autocast" in message for message in caplog.messages) == 1
