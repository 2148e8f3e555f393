"""The observer tells casting uses from others, and who guesses what before anything was seen."""

import pytest
import torch
import torch.nn.functional as F
from stream_cases import WIDTH
from torch import Tensor, nn

from ramtorch_core.engine.dtypes import StreamDtypes
from ramtorch_core.engine.observe import Observer, Use, guess_casts, is_compiled
from ramtorch_core.errors import ConfigurationError
from ramtorch_core.memory.weights import Weight


def watched(use, *, remember: bool = False, dtype: torch.dtype = torch.bfloat16) -> Use:
    """What the observer says of `use(x, weight)` under autocast."""
    weight = Weight("w", nn.Parameter(torch.randn(WIDTH, WIDTH)), ())
    observer = Observer(torch.device("cpu"), lambda w: w.parameter, lambda _: False)
    observer.compute = torch.bfloat16
    lent = weight.parameter.detach().clone()
    (found,) = observer.lend([weight], [lent])
    with observer, torch.autocast("cpu", dtype, cache_enabled=remember):
        use(torch.randn(3, WIDTH), lent)
    observer.reclaim([lent])
    return found


CASTING = [F.linear, torch.matmul, torch.mm, lambda x, w: x @ w, lambda x, w: torch.addmm(torch.zeros(WIDTH), x, w)]
OTHERS = [
    lambda x, w: F.linear(x, w * 2),
    lambda x, w: x @ w.t(),
    lambda x, w: w.sum(),
    lambda x, w: F.embedding(torch.tensor([1]), w),
    lambda x, w: torch.cat([x, w]),
    lambda x, w: F.layer_norm(x, (WIDTH,), w[0]),
]


@pytest.mark.parametrize("use", CASTING)
def test_one_casting_use_may_be_cast_before(use):
    found = watched(use)
    assert found.count == 1
    assert found.cast


@pytest.mark.parametrize("use", OTHERS)
def test_other_uses_need_the_weights_own_dtype(use):
    assert not watched(use).cast


@pytest.mark.parametrize("remember", [True, False])
def test_two_casting_uses_may_be_cast_before_only_where_autocast_remembers_casts(remember):
    assert watched(lambda x, w: F.linear(F.linear(x, w), w), remember=remember).cast is remember


def test_a_use_under_another_autocast_dtype_or_none_does_not_count_as_a_cast():
    assert not watched(F.linear, dtype=torch.float16).cast

    def island(x: Tensor, w: Tensor) -> None:
        with torch.autocast("cpu", enabled=False):
            F.linear(x, w)

    assert not watched(island).cast


def test_looking_at_the_shape_is_no_use():
    found = watched(
        lambda x, w: (w.shape, w.size(0), w.dim(), w.is_floating_point(), w.device, len(w), w.requires_grad)
    )
    assert found.count == 0


ASKING = [lambda w: w.dtype, lambda w: w.element_size(), lambda w: w.itemsize, lambda w: w.nbytes, lambda w: w.type()]


@pytest.mark.parametrize("ask", ASKING)
def test_asking_for_the_dtype_gets_the_masters_and_counts_as_a_use_that_needs_it(ask):
    """The half-precision shadow's own would round what the code computes with it."""
    weight = Weight("w", nn.Parameter(torch.randn(WIDTH, WIDTH)), ())
    observer = Observer(torch.device("cpu"), lambda w: w.parameter, lambda _: False)
    observer.compute = torch.bfloat16
    lent = weight.parameter.detach().bfloat16()
    weight.dtype = torch.bfloat16
    (found,) = observer.lend([weight], [lent])
    with observer, torch.autocast("cpu", torch.bfloat16):
        assert ask(lent) == ask(weight.parameter.detach())
        F.linear(torch.randn(3, WIDTH), lent)
    assert not found.cast
    assert found.count == 2


def test_an_address_is_that_of_an_exact_copy_which_lives_as_long_as_the_visit():
    weight = Weight("w", nn.Parameter(torch.randn(WIDTH, WIDTH)), ())
    observer = Observer(torch.device("cpu"), lambda w: w.parameter.detach().clone(), lambda _: False)
    lent = weight.parameter.detach().bfloat16()
    weight.dtype = torch.bfloat16
    (found,) = observer.lend([weight], [lent])
    with observer:
        address = lent.data_ptr()
    assert not found.cast
    assert found.exact is not None
    assert found.exact.data_ptr() == address


def test_attention_that_compares_dtypes_to_choose_a_kernel_does_not_count():
    attention = nn.MultiheadAttention(WIDTH, 2)
    weights = [Weight(name, p, ((attention, name),)) for name, p in attention.named_parameters(recurse=False)]
    observer = Observer(torch.device("cpu"), lambda w: w.parameter, lambda _: False)
    observer.compute = torch.bfloat16
    uses = observer.lend(weights, [weight.parameter for weight in weights])
    with observer, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        attention(*[torch.randn(3, WIDTH)] * 3)
    assert all(use.cast and use.count == 1 and use.asked is None for use in uses)


@pytest.mark.parametrize(
    ("module", "guess"), [(nn.Linear(2, 2), True), (nn.Conv2d(2, 2, 1), True), (nn.LayerNorm(2), False)]
)
def test_the_kind_of_module_is_the_first_guess(module, guess):
    assert guess_casts(Weight("w", module.weight, ((module, "weight"),))) is guess


def test_a_tied_weight_is_guessed_to_need_its_dtype():
    module = nn.Linear(2, 2)
    assert not guess_casts(Weight("w", module.weight, ((module, "weight"), (nn.Linear(2, 2), "weight"))))


def test_compiled_modules_are_recognised():
    block = nn.Linear(2, 2)
    assert not is_compiled(nn.Sequential(block))
    assert is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))
    block.compile(backend="eager")
    assert is_compiled(nn.Sequential(block))


# --- dtypes -----------------------------------------------------------------------------------------------------------


def linear_weight() -> Weight:
    module = nn.Linear(2, 2)
    return Weight("blocks.0.up.weight", module.weight, ((module, "weight"),))


def used(*, cast: bool) -> Use:
    use = Use()
    use.count, use.cast = 1, cast
    return use


def test_what_was_seen_replaces_the_guess_and_one_contradiction_is_remembered():
    dtypes, weight = StreamDtypes(), linear_weight()
    assert dtypes.wanted(weight) == torch.float32
    dtypes.compute = torch.bfloat16
    assert dtypes.wanted(weight) == torch.bfloat16
    dtypes.note(weight, used(cast=False))
    assert dtypes.wanted(weight) == torch.float32
    assert dtypes.changed
    dtypes.note(weight, used(cast=True))
    assert dtypes.wanted(weight) == torch.float32


def test_an_override_wins_and_only_for_float32_masters_under_autocast():
    dtypes, weight = StreamDtypes({"*.up.*": torch.float16}), linear_weight()
    assert dtypes.wanted(weight) == torch.float32
    dtypes.compute = torch.bfloat16
    assert dtypes.wanted(weight) == torch.float16
    dtypes.note(weight, used(cast=False))
    assert dtypes.wanted(weight) == torch.float16
    assert not dtypes.changed
    double = Weight("x.up.weight", nn.Parameter(torch.zeros(2, dtype=torch.float64)), ())
    assert dtypes.wanted(double) == torch.float64


def test_an_override_that_is_no_floating_dtype_is_refused():
    with pytest.raises(ConfigurationError, match="use 'auto', a floating-point dtype"):
        StreamDtypes(torch.int32)
