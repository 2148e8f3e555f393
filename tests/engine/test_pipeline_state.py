"""What a driver thread inherits, what repeats whatever the timing, and what each hook sees."""

import contextvars
import copy
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import WIDTH, Block, Chain, accumulate, assert_same_gradients, batches, pipeline, run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ramtorch_core.plan.schedule import build, forward_only

CUTS = ["blocks.1", "blocks.2", "blocks.3"]
SCHEDULES = ["sequential", "gpipe", "staggered_1b1f", "eager_1f1b", "zb_h1", "zbv"]


class Noisy(Chain):
    """Draws from torch, `random` and numpy in every stage, also inside a checkpoint."""

    def __init__(self, delays: random.Random | None = None) -> None:
        super().__init__(dropout=0.5)
        self.delays = delays

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        for i, block in enumerate(self.blocks):
            if self.delays is not None:
                time.sleep(self.delays.random() * 0.003)
            x = checkpoint(block, x, use_reentrant=False) if i % 2 else block(x)
            x = x + torch.rand(WIDTH) * random.random() + float(np.random.rand())
        return F.cross_entropy(self.head(x), y)


def noisy_run(schedule: str, delays: random.Random | None = None) -> list[Tensor]:
    torch.manual_seed(3)
    model = Noisy(delays)
    found = []
    with pipeline(model, CUTS) as executor:
        for step in range(2):
            result = run(executor, model.training_step, batches(4, seed=step), schedule, step=step)
            found += [*result.outputs, *result.gradients.values()]
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_operations_equal_the_sequential_schedule(schedule: str) -> None:
    for a, b in zip(noisy_run("sequential"), noisy_run(schedule), strict=True):
        assert torch.equal(a, b)


def test_ten_runs_with_random_delays_give_the_same_bits() -> None:
    first = noisy_run("eager_1f1b")
    for seed in range(10):
        for a, b in zip(first, noisy_run("eager_1f1b", random.Random(seed)), strict=True):
            assert torch.equal(a, b)


def test_dropout_differs_between_steps_and_microbatches_and_leaves_the_callers_generators_alone() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pipeline(model, ["1"]) as executor:
        draws = []
        for step in range(2):
            result = executor.run(lambda _: torch.rand(3), [None, None], forward_only(build("gpipe", 2, 2)), step=step)
            draws += result.outputs
    assert len({tuple(draw.tolist()) for draw in draws}) == 4
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def test_a_driver_inherits_modes_hooks_context_and_devices() -> None:
    """The whole list of what a new thread starts without."""
    model = Chain()
    seen: list[Any] = []

    def probe(item: Any) -> Tensor:
        loss = model.training_step(item)
        seen.append((
            variable.get(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.empty(()).device.type,
            torch.get_num_threads(),
        ))  # fmt: skip
        return loss

    packed: list[int] = []
    items = batches(2)
    token = variable.set("caller")
    try:
        with (
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
            torch.device("meta"),
            torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(1), t)[1], lambda t: t),
            pipeline(model, CUTS) as executor,
        ):
            run(executor, probe, items)
    finally:
        variable.reset(token)
    assert seen == [("caller", True, True, torch.bfloat16, False, "meta", 1)] * 2
    assert packed


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_equals_the_plain_call_and_does_not_disturb_training(mode: Any) -> None:
    """Also before the first training step."""
    model = Chain()
    items = batches(5)
    with pipeline(model, CUTS) as executor:
        with mode():
            expected = [model.training_step(item) for item in items]
            result = executor.run(model.training_step, items, forward_only(build("gpipe", 4, 5)))
            assert torch.is_inference(result.outputs[0]) == (mode is torch.inference_mode)
        assert all(torch.equal(a, b) for a, b in zip(result.outputs, expected, strict=True))
        reference = copy.deepcopy(model)
        accumulate(reference, reference.training_step, items)
        assert_same_gradients(model, reference, run(executor, model.training_step, items))


class Casts(TorchDispatchMode):
    """Counts casts of tensors of one shape to bf16 (forward) and back (backward)."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.counts = {torch.bfloat16: 0, torch.float32: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.counts[kwargs["dtype"]] += 1
        return func(*args, **kwargs)


def test_bf16_is_exact_and_casts_each_weight_once_per_step() -> None:
    model = Chain()
    reference = copy.deepcopy(model)
    items = batches(4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), pipeline(model, CUTS) as executor:
        accumulate(reference, reference.training_step, items)
        result = run(executor, model.training_step, items)
        assert_same_gradients(model, reference, result)
        assert next(iter(result.gradients.values())).dtype == torch.float32
        with Casts(model.blocks[0].up.weight.shape) as plain:
            accumulate(reference, reference.training_step, items)
        with Casts(model.blocks[0].up.weight.shape) as pipelined:
            run(executor, model.training_step, items)
    gradients = len(model.blocks) * len(items)
    assert plain.counts == {torch.bfloat16: gradients, torch.float32: gradients}
    assert pipelined.counts == {torch.bfloat16: len(model.blocks), torch.float32: gradients}


def test_bf16_with_autocasts_own_cache_is_exact_also_for_a_weight_used_twice() -> None:
    class Twice(Chain):
        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            for block in self.blocks:
                x = block(block(x))
            return F.cross_entropy(self.head(x), y)

    model = Twice()
    reference = copy.deepcopy(model)
    items = batches(4)
    for item in items:
        with torch.autocast("cpu", torch.bfloat16):
            loss = reference.training_step(item) / 4
        loss.backward()
    with pipeline(model, CUTS[1:]) as executor, torch.autocast("cpu", torch.bfloat16):

        def training_step(item: Any) -> Tensor:
            x, y = item
            x = model.blocks[1](model.blocks[1](model.blocks[0](model.blocks[0](x))))
            x = model.blocks[2](x)
            x = Block.forward(model.blocks[2], x)
            x = model.blocks[3](x)
            return F.cross_entropy(model.head(Block.forward(model.blocks[3], x)), y)

        assert_same_gradients(model, reference, run(executor, training_step, items))


def test_an_island_without_autocast_gets_the_weights_as_they_are_and_float32_gradients() -> None:
    """The backward used to run under the autocast of the forward, and to multiply the island's gradients in bf16."""

    class Island(Chain):
        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            for block in self.blocks[:2]:
                x = block(x)
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[2](x.float()) + self.blocks[2].up.weight.sum()
            return F.cross_entropy(self.head(self.blocks[3](x)), y)

    model = Island()
    reference = copy.deepcopy(model)
    items = batches(4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), pipeline(model, CUTS) as executor:
        accumulate(reference, reference.training_step, items)
        assert_same_gradients(model, reference, run(executor, model.training_step, items))


def test_attention_with_a_trained_bias_is_exact_under_autocast() -> None:
    """Its fallback computes in float32 inside; the backward used to multiply in bf16."""

    class Attention(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            x = self.blocks[1](self.blocks[0](x))
            q = x[:, :, None].expand(-1, -1, WIDTH) * x[:, None]
            x = F.scaled_dot_product_attention(q, q.mT, q, attn_mask=self.bias).mean(-1)
            return F.cross_entropy(self.head(self.blocks[3](self.blocks[2](x))), y)

    model = Attention()
    reference = copy.deepcopy(model)
    items = batches(4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), pipeline(model, CUTS) as executor:
        accumulate(reference, reference.training_step, items)
        assert_same_gradients(model, reference, run(executor, model.training_step, items))


def test_hooks_on_tensors_and_parameters_fire_as_in_accumulation() -> None:
    """Once per microbatch, with the same gradients; a hook may replace the gradient."""
    log: dict[str, list[Tensor]] = {}

    class Hooked(Chain):
        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            x = self.blocks[1](self.blocks[0](x))
            x.register_hook(lambda g: log.setdefault("tensor", []).append(g.clone()))
            kept = x
            x = self.blocks[3](self.blocks[2](x)) + kept
            return F.cross_entropy(self.head(x), y)

    def observe(model: Hooked) -> None:
        tied = model.blocks[0].up.weight
        model.blocks[3].up.weight = tied
        tied.register_hook(lambda g: log.setdefault("parameter", []).append(g.clone()))
        model.head.weight.register_hook(lambda g: g * 2)
        tied.register_post_accumulate_grad_hook(lambda p: log.setdefault("post", []).append(p.grad.clone()))
        model.blocks[1].register_full_backward_hook(lambda m, i, o: log.setdefault("module", []).append(o[0].clone()))

    torch.manual_seed(1)
    reference, model = Hooked(), Hooked()
    model.load_state_dict(reference.state_dict())
    observe(reference)
    observe(model)
    items = batches(3)
    accumulate(reference, reference.training_step, items)
    expected, log = log, {}
    with pipeline(model, CUTS) as executor:
        assert_same_gradients(model, reference, run(executor, model.training_step, items))
    assert log.keys() == expected.keys() == {"tensor", "parameter", "post", "module"}
    for key, values in expected.items():
        assert len(values) == 3
        assert all(torch.equal(a, b) for a, b in zip(sorted_by_sum(values), sorted_by_sum(log[key]), strict=True)), key


def sorted_by_sum(tensors: list[Tensor]) -> list[Tensor]:
    return sorted(tensors, key=lambda t: float(t.double().sum()))


def test_gradients_stay_private_and_accumulate_onto_earlier_ones_when_asked() -> None:
    model = Chain()
    reference = copy.deepcopy(model)
    first, second = batches(2), batches(2, seed=1)
    accumulate(reference, reference.training_step, first)
    with pipeline(model, CUTS) as executor:
        result = run(executor, model.training_step, first)
        assert all(p.grad is None for p in model.parameters())
        for p, gradient in result.gradients.items():
            p.grad = gradient
        before = {p: p.grad.clone() for p in model.parameters()}
        run(executor, model.training_step, second)
        assert all(torch.equal(p.grad, before[p]) for p in model.parameters())
        assert not run(executor, model.training_step, second, accumulate=True).gradients
    accumulate(reference, reference.training_step, second)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_tensor_with_gradient_may_enter_with_the_batch() -> None:
    model = Chain()
    items = [(x.clone().requires_grad_(), y) for x, y in batches(3)]
    references = [(x.detach().clone().requires_grad_(), y) for x, y in items]
    reference = copy.deepcopy(model)
    accumulate(reference, reference.training_step, references)
    with pipeline(model, CUTS) as executor:
        run(executor, model.training_step, items)
    for (x, _), (expected, _) in zip(items, references, strict=True):
        assert torch.equal(x.grad, expected.grad)


def test_a_copy_of_the_module_is_plain_and_computes_with_its_own_weights() -> None:
    model = Chain()
    item = batches(1)[0]
    with pipeline(model, CUTS) as executor:
        clone = copy.deepcopy(model)
        with torch.no_grad():
            clone.head.weight.zero_()
            clone.head.bias.zero_()
        teacher = []

        def training_step(batch: Any) -> Tensor:
            teacher.append(clone(batch[0]))
            return model.training_step(batch)

        run(executor, training_step, [item, item])
    assert all(torch.equal(t, torch.zeros_like(t)) for t in teacher)


def test_closing_leaves_a_plain_module() -> None:
    model = Chain()
    before = model.state_dict(keep_vars=True)
    with pipeline(model, CUTS) as executor:
        run(executor, model.training_step, batches(2))
        executor.close()
    after = model.state_dict(keep_vars=True)
    assert all(before[key] is after[key] for key in before)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("how", ["method", "function"])
def test_compiled_blocks_stay_compiled_and_exact(how: str) -> None:
    """Nothing is compiled again from one microbatch, step or schedule to the next."""
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    model = Chain()
    reference = copy.deepcopy(model)
    for i, block in enumerate(model.blocks):
        if how == "method":
            block.compile(backend=backend)
        else:
            model.blocks[i] = torch.compile(block, backend=backend)
    items = batches(4)
    accumulate(reference, reference.training_step, items)
    with pipeline(model, ["blocks.2"]) as executor:
        assert_same_gradients(model, reference, run(executor, model.training_step, items))
        first = graphs
        for schedule in ("gpipe", "zb_h1"):
            assert_same_gradients(model, reference, run(executor, model.training_step, items, schedule))
    assert 1 <= first == graphs
    calls = [vars(block).get("_compiled_call_impl") or vars(block).get("forward") for block in model.blocks]
    assert not any("shield" in getattr(call, "__qualname__", "") for call in calls)


@pytest.mark.parametrize(("schedule", "alone"), [("gpipe", True), ("staggered_1b1f", False)])
def test_one_thread_takes_all_microbatches_where_they_all_go_forward_first(schedule: str, alone: bool) -> None:
    model = Chain()
    threads = set()

    def note(value: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        value.register_hook(lambda gradient: threads.add(threading.get_ident()))
        return value

    with pipeline(model, CUTS) as executor:
        run(executor, lambda batch: note(model.training_step(batch)), batches(4), schedule)
    assert (len(threads) == 1) is alone
