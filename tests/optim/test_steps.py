"""Steps divided by weight and by block: those of the whole optimizer, bit for bit."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stream_cases import assert_same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ramtorch_core.engine.pipeline.running_order import optimizers_follow
from ramtorch_core.memory.device import Device
from ramtorch_core.memory.weights import Weight, WeightGroup
from ramtorch_core.optim import steps
from ramtorch_core.optim.compiled import adam_kernel, read_number, write_number
from ramtorch_core.optim.steps import Granularity, Recipe, WeightUpdate, defining_class, granularity, update, why_whole

SIZES: list[tuple[int, ...]] = [(), (1,), (7,), (3, 5), (64,), (5, 33), (0, 4), (2, 3, 4, 5)]
AdamW = torch.optim.AdamW


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "BLOCK", 32)


def masters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def grads_of(parameters: list[nn.Parameter], index: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(index)
    return [torch.randn(p.size(), generator=generator).to(p.dtype) for p in parameters]


def divided(
    build: Callable[[Any], Any],
    count: int = 3,
    *,
    shadow: torch.dtype | None = None,
    scale: float = 1.0,
    kernel: bool = False,
    dtype: torch.dtype = torch.float32,
    between: Callable[[Any, int], None] | None = None,
) -> tuple[list[nn.Parameter], Any, list[Weight]]:
    parameters = masters(dtype)
    weights = [Weight(str(i), p, ()) for i, p in enumerate(parameters)]
    group = WeightGroup(0, "chunk", weights)
    group.build([shadow or dtype for _ in weights], Device("cpu"))
    optimizer = build(parameters)
    for index in range(count):
        recipe = Recipe(optimizer)
        flats = [grad.flatten().clone() for grad in grads_of(parameters, index)]
        updates = [WeightUpdate(weight, flat, recipe) for weight, flat in zip(weights, flats, strict=True)]
        update(updates, scale=scale, kernel=adam_kernel() if kernel else None, threads=1)
        if between is not None:
            between(optimizer, index)
    return parameters, optimizer, weights


def whole(
    build: Callable[[Any], Any],
    count: int = 3,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    between: Callable[[Any, int], None] | None = None,
) -> tuple[list[nn.Parameter], Any]:
    parameters = masters(dtype)
    optimizer = build(parameters)
    for index in range(count):
        for p, grad in zip(parameters, grads_of(parameters, index), strict=True):
            p.grad = grad * scale
        optimizer.step()
        if between is not None:
            between(optimizer, index)
    return parameters, optimizer


def compare(build: Callable[[Any], Any], **options: Any) -> None:
    plain = {key: value for key, value in options.items() if key not in ("shadow", "kernel")}
    expected, theirs = whole(build, **plain)
    found, ours, weights = divided(build, **options)
    assert_same([p.detach() for p in found], [p.detach() for p in expected])
    assert_same(ours.state_dict(), theirs.state_dict())
    for weight in weights:
        assert torch.equal(weight.shadow, weight.parameter.detach().to(weight.dtype))


@pytest.mark.parametrize("shadow", [None, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.NAdam(p, lr=0.1),
        lambda p: torch.optim.Rprop(p, lr=0.1),
    ],
)
def test_steps_of_single_weights_in_blocks_are_those_of_the_optimizer(
    build: Any, scale: float, shadow: torch.dtype | None
) -> None:
    compare(build, scale=scale, shadow=shadow)


@pytest.mark.parametrize("shadow", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_compiled_kernel_makes_and_keeps_the_state_that_the_fused_optimizer_has(kind: Any, shadow: Any) -> None:
    if adam_kernel() is None:
        pytest.skip("no C compiler")
    compare(lambda p: kind(p, lr=0.1, weight_decay=0.1, fused=True), kernel=True, shadow=shadow)


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}], ids=str)
def test_what_the_compiled_kernel_does_not_do_is_left_to_the_optimizer(options: Any) -> None:
    compare(lambda p: torch.optim.AdamW(p, lr=0.1, **options), kernel=True)


def test_a_class_that_makes_its_state_itself_is_left_to_its_own_code() -> None:
    class Half(torch.optim.AdamW):
        def _init_group(self, group: Any, *args: Any) -> Any:
            found = super()._init_group(group, *args)
            for p in group["params"]:
                self.state[p].setdefault("seen", torch.zeros(()))
            return found

    compare(lambda p: Half(p, lr=0.1), kernel=True)


def test_state_of_a_loaded_checkpoint_is_used() -> None:
    saved: dict[str, Any] = {}

    def between(optimizer: Any, index: int) -> None:
        if index == 0:
            saved["state"] = copy.deepcopy(optimizer.state_dict())
        if index == 1:
            optimizer.load_state_dict(saved["state"])

    compare(lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), between=between, count=4)


def test_state_that_is_none_yet_is_made_whole() -> None:
    """Checkpoints of SGD without momentum may hold a momentum of None."""

    def between(optimizer: Any, index: int) -> None:
        if index == 0:
            for p in optimizer.param_groups[0]["params"]:
                optimizer.state[p] = {"momentum_buffer": None}
            optimizer.param_groups[0]["momentum"] = 0.9

    compare(lambda p: torch.optim.SGD(p, lr=0.1), between=between)


def test_state_that_appears_at_a_later_step_is_made_whole() -> None:
    class Averages(torch.optim.SGD):
        update_granularity = "element"

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    if state["step"] > 1:
                        state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.detach().add_(p.grad + state.get("mean", 0.0), alpha=-group["lr"])

    compare(lambda p: Averages(p, lr=0.1), count=4)


def test_double_precision_by_default_in_another_thread_does_not_change_the_state() -> None:
    """The thread that steps the optimizer by its own default decides, whatever the default is by then."""
    parameters = masters()
    optimizer = torch.optim.AdamW(parameters)
    recipe = Recipe(optimizer)
    weight = Weight("w", parameters[4], ())
    WeightGroup(0, "chunk", [weight]).build([torch.float32], Device("cpu"))
    torch.set_default_dtype(torch.float64)
    try:
        update([WeightUpdate(weight, torch.ones(64), recipe)], scale=1.0, kernel=None, threads=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[parameters[4]]["step"].dtype == torch.float32


def test_options_are_those_of_the_moment_at_which_the_recipe_was_made() -> None:
    (parameter,) = masters()[4:5]
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)))
    recipe = Recipe(optimizer)
    optimizer.param_groups[0]["lr"].mul_(0.0)
    optimizer.param_groups[0]["betas"][0].mul_(0.0)
    optimizer.param_groups[0]["weight_decay"] = 5.0
    options = recipe.options[parameter]
    assert float(options["lr"]) == pytest.approx(0.1)
    assert float(options["betas"][0]) == pytest.approx(0.9)
    assert options["weight_decay"] == 0.01


def test_an_error_of_one_weight_leaves_the_step_counters_of_others_as_they_were() -> None:
    if adam_kernel() is None:
        pytest.skip("no C compiler")
    parameters = masters()[4:6]
    weights = [Weight(str(i), p, ()) for i, p in enumerate(parameters)]
    WeightGroup(0, "chunk", weights).build([torch.float32] * 2, Device("cpu"))
    optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "amsgrad": True}])
    recipe = Recipe(optimizer)
    bad = [WeightUpdate(weights[0], torch.ones(64), recipe), WeightUpdate(weights[1], torch.ones(3), recipe)]
    with pytest.raises(RuntimeError):
        update(bad, scale=1.0, kernel=adam_kernel(), threads=1)
    assert float(optimizer.state[parameters[0]].get("step", 0)) == 0


# ---------------------------------------------------------------------- which optimizers can be divided


@pytest.fixture
def untouched() -> Iterator[None]:
    """AdamW as it is before its first object exists: torch wraps the step of each class with its first object."""
    wrapped = vars(torch.optim.AdamW).get("step"), vars(torch.optim.Adam)["step"]
    if wrapped[0] is not None and getattr(wrapped[0], "hooked", False):
        del torch.optim.AdamW.step
    torch.optim.Adam.step = steps._unhooked(wrapped[1])  # type: ignore[method-assign]
    yield
    torch.optim.Adam.step = wrapped[1]  # type: ignore[method-assign]
    if wrapped[0] is not None:
        torch.optim.AdamW.step = wrapped[0]  # type: ignore[method-assign]


@pytest.mark.parametrize("first", [None, torch.optim.Adam, torch.optim.AdamW])
def test_a_class_that_inherits_its_step_is_divided_whichever_object_was_made_first(untouched: None, first: Any) -> None:
    class Inherits(torch.optim.AdamW):
        pass

    if first is not None:
        first(masters())
    optimizer = Inherits(masters())
    assert defining_class(Inherits) in (torch.optim.Adam, torch.optim.AdamW)
    assert granularity(optimizer) is Granularity.ELEMENT
    assert why_whole(optimizer) is None


def test_a_class_with_a_step_of_its_own_is_divided_only_if_that_class_says_so() -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Declared(Own):
        update_granularity = "parameter"

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Inherited(Declared):
        pass

    class Changed(Declared):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    kinds = [Own, Declared, Inherited, Changed]
    found = [granularity(kind(masters())) for kind in kinds]
    assert found == [None, Granularity.PARAMETER, Granularity.PARAMETER, None]


def test_a_granularity_that_does_not_exist_raises() -> None:
    class Wrong(torch.optim.SGD):
        update_granularity = "tensor"

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    with pytest.raises(ValueError, match="tensor"):
        granularity(Wrong(masters(), lr=0.1))


def test_a_group_of_several_dtypes_is_stepped_whole_where_one_of_them_counts_for_all() -> None:
    """torch's Adafactor takes the epsilon of its first parameter's dtype for those behind it."""
    mixed = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    assert "a group per dtype" in str(why_whole(torch.optim.Adafactor(mixed)))
    assert why_whole(torch.optim.Adafactor(mixed, eps=(1e-8, 1e-3))) is None
    assert why_whole(torch.optim.Adafactor([{"params": [p]} for p in mixed])) is None
    assert why_whole(torch.optim.AdamW(mixed)) is None


def test_reasons_to_step_whole_are_named() -> None:
    scheduled = AdamW(masters())
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert why_whole(scheduled) is None
    replaced = AdamW(masters())
    replaced.step = lambda closure=None: None  # type: ignore[assignment,method-assign]
    assert why_whole(replaced) == "the step method of this AdamW was replaced"
    hooked = AdamW(masters())
    hooked.register_step_pre_hook(lambda *_: None)
    assert why_whole(hooked) == "AdamW has step hooks"
    assert why_whole(AdamW(masters(), differentiable=True)) == "AdamW is capturable or differentiable"
    assert "LBFGS is not known" in str(why_whole(torch.optim.LBFGS(masters())))


def test_a_hook_of_a_pipeline_on_every_step_is_no_reason_to_publish() -> None:
    parameter = nn.Parameter(torch.ones(3))
    handle = optimizers_follow({parameter: torch.device("meta")})
    try:
        assert why_whole(torch.optim.SGD([parameter], lr=0.1)) is None
    finally:
        handle.remove()


def test_the_kernel_is_used_after_something_was_compiled() -> None:
    """The compiler wraps the method with which each optimizer class makes its state."""
    torch.compile(torch.nn.Identity(), backend="eager")(torch.ones(1))
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        weight = Weight("w", nn.Parameter(torch.ones(3)), ())
        optimizer = kind([weight.parameter], lr=0.1)
        assert steps.is_decoupled(Recipe(optimizer), weight) is (kind is torch.optim.AdamW)


class Operations(TorchDispatchMode):
    """Those of torch's that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_kernels_updates_call_no_operation_of_torchs(kind: Any) -> None:
    """Each would let other threads have the interpreter, and wait for those that compute in Python."""
    if adam_kernel() is None:
        pytest.skip("no C compiler")
    parameters = masters()
    group = WeightGroup(0, "chunk", [Weight(str(i), p, ()) for i, p in enumerate(parameters)])
    group.build([torch.bfloat16] * len(parameters), Device("cpu"))
    optimizer = kind(parameters, lr=0.1)
    for step in range(3):
        flats = [grad.flatten().bfloat16() for grad in grads_of(parameters, step)]
        recipe = Recipe(optimizer)
        updates = [WeightUpdate(weight, flat, recipe) for weight, flat in zip(group.weights, flats, strict=True)]
        with Operations() as operations:
            update(updates, scale=0.5, kernel=adam_kernel(), threads=1)
        assert bool(operations.seen) is (step == 0), operations.seen  # the first one makes the state
        assert {float(row["step"]) for row in optimizer.state.values()} == {step + 1.0}


@pytest.mark.parametrize("step", [torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float64), torch.tensor([3.0]), 3])
def test_counters_of_every_kind_are_read_and_written_in_place(step: Any) -> None:
    state = {"step": step}
    assert read_number(step) == 3.0
    write_number(state, "step", 4)
    assert state["step"] == 4
    assert (state["step"] is step) is isinstance(step, Tensor)
