"""AdamW with less memory: which bits, on what they depend, and that what is lost to rounding is not lost on average."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from stream_cases import assert_same, data, stack
from torch import Tensor, nn

from ramtorch_core import AdamW, attach
from ramtorch_core.optim import adamw
from ramtorch_core.optim.adamw import suits_kernel, update_in_torch
from ramtorch_core.optim.compiled import adam_kernel

FLOAT, BF16 = torch.float32, torch.bfloat16
COMBINATIONS = list(itertools.product([FLOAT, BF16], repeat=2))
every_combination = pytest.mark.parametrize(("masters", "moments"), COMBINATIONS)
needs_kernel = pytest.mark.skipif(adam_kernel() is None, reason="needs a C compiler")


def parameters(dtype: torch.dtype, *sizes: int) -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes or (37, 100)]


def train(optimizer: torch.optim.Optimizer, steps: range = range(4)) -> list[Tensor]:
    """Step with gradients that depend on the number of the step; returns copies of weights and state."""
    chosen = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in chosen:
            p.grad = torch.randn(p.size(), generator=generator).to(p.dtype)
        optimizer.step()
    state = [value for p in chosen for key, value in sorted(optimizer.state[p].items()) if key != "step"]
    return [tensor.detach().clone() for tensor in (*chosen, *state)]


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- which bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.3, "eps": 1e-3}])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_in_float32_it_is_the_fused_adamw(options: dict[str, Any], kernel: Any) -> None:
    sizes = range(1, 40)
    ours = train(AdamW(parameters(FLOAT, *sizes), lr=torch.tensor(1e-2), betas=(0.8, 0.9), kernel=kernel, **options))
    theirs = train(torch.optim.AdamW(parameters(FLOAT, *sizes), lr=1e-2, betas=(0.8, 0.9), fused=True, **options))
    assert same_bits(ours, theirs)


@needs_kernel
@every_combination
@pytest.mark.parametrize("grads", [FLOAT, BF16])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("maximize", [False, True])
def test_kernel_and_torch_give_the_same_bits(
    masters: torch.dtype, moments: torch.dtype, grads: torch.dtype, scale: float, maximize: bool
) -> None:
    kernel = adam_kernel()
    assert kernel is not None
    for shadows, size in itertools.product([None, BF16] if masters == FLOAT else [None], [5, 33, 70000]):
        results = []
        for threads in (0, 1, 3):
            (p,) = parameters(masters, size)
            optimizer = AdamW([p], lr=1e-2, weight_decay=0.1, moments=moments, maximize=maximize)
            shadow = None if shadows is None else torch.empty(size, dtype=shadows)
            for step in range(3):
                grad = data(step, size).to(grads)
                options = optimizer.param_groups[0]
                each = optimizer.prepare(p, grad, position=0, options=options, grad_scale=scale, shadow=shadow)
                assert suits_kernel(each)
                if threads:
                    kernel([each], threads)
                else:
                    update_in_torch(each)
                optimizer.state[p]["step"] += 1
            results.append([p.detach(), *optimizer.state[p].values(), *([] if shadow is None else [shadow])])
        assert same_bits(results[0], results[1])
        assert same_bits(results[0], results[2])


@every_combination
def test_bits_do_not_depend_on_blocks(
    masters: torch.dtype, moments: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(AdamW(parameters(masters, 1000), moments=moments, kernel="torch"))
    monkeypatch.setitem(adamw.BLOCK, "cpu", 64)
    assert same_bits(train(AdamW(parameters(masters, 1000), moments=moments, kernel="torch")), whole)


def test_bits_depend_on_seed_position_and_step() -> None:
    def first(**options: Any) -> Tensor:
        p, q = (nn.Parameter(torch.ones(1000, dtype=BF16)) for _ in range(2))
        optimizer = AdamW([{"params": [p]}, {"params": [q]}], lr=1e-4, weight_decay=0.0, **options)
        p.grad = q.grad = torch.ones(1000, dtype=BF16)
        optimizer.step()
        assert not torch.equal(p, q)
        return p.detach()

    assert torch.equal(first(), first(seed=0))
    assert not torch.equal(first(), first(seed=1))
    unchanged = nn.Parameter(torch.ones(1000, dtype=BF16))
    optimizer = AdamW([unchanged], lr=1e-3, weight_decay=0.0)
    moved = []
    for _ in range(2):
        before = unchanged.detach().clone()
        unchanged.grad = torch.ones(1000, dtype=BF16)
        optimizer.step()
        moved.append(before != unchanged)
    assert not torch.equal(*moved)


@every_combination
def test_any_layout_of_memory_trains_the_same(masters: torch.dtype, moments: torch.dtype) -> None:
    """Elements count in memory order; a parameter with gaps is taken as if it were contiguous."""
    values, grads = data(0, 4, 6), data(1, 4, 6)
    storage = torch.zeros(4, 12, dtype=masters)
    contiguous, gaps = values.to(masters), storage[:, ::2].copy_(values)
    transposed = values.T.to(masters).contiguous().T
    results = []
    for tensor in (contiguous, gaps, transposed):
        p = nn.Parameter(tensor)
        optimizer = AdamW([p], lr=1e-2, moments=moments)
        for _ in range(3):
            p.grad = grads.to(masters)
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(results[0], results[1])
    assert bool((storage[:, 1::2] == 0).all())
    if masters == moments == FLOAT:
        torch.testing.assert_close(results[2], results[0], rtol=1e-6, atol=0)  # other elements fill whole vectors
    assert torch.equal(results[0].sign(), results[2].sign())


def test_an_update_is_seen_by_version_counters() -> None:
    """So autograd refuses a backward through weights that were changed meanwhile."""
    p = nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- state ------------------------------------------------------------------------------------------------------------


@every_combination
def test_a_saved_and_resumed_run_continues_with_the_same_bits(masters: torch.dtype, moments: torch.dtype) -> None:
    expected = train(AdamW(parameters(masters), lr=1e-2, moments=moments, seed=5))
    first = AdamW(parameters(masters), lr=1e-2, moments=moments, seed=5)
    train(first, range(2))
    file = io.BytesIO()
    torch.save([[p.detach() for p in first.param_groups[0]["params"]], first.state_dict()], file)
    weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second = AdamW([nn.Parameter(weight) for weight in weights])
    second.load_state_dict(state)
    assert same_bits(train(second, range(2, 4)), expected)
    assert same_bits(train(copy.deepcopy(first), range(2, 4)), expected)


@every_combination
def test_state_of_the_plain_adamw_is_taken_and_given(masters: torch.dtype, moments: torch.dtype) -> None:
    theirs = torch.optim.AdamW(parameters(masters), lr=1e-2, fused=True)
    train(theirs)
    ours = AdamW([p.detach().clone().requires_grad_() for p in theirs.param_groups[0]["params"]], moments=moments)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert ours.state[p]["exp_avg_sq"].dtype == moments
        assert torch.equal(ours.state[p]["exp_avg_sq"], theirs.state[q]["exp_avg_sq"].to(moments))
        assert float(ours.state[p]["step"]) == 4
    found = train(ours, range(4, 6))
    if masters == moments == FLOAT:
        assert same_bits(found, train(theirs, range(4, 6)))
    theirs.load_state_dict(ours.state_dict())
    train(theirs, range(6, 7))


@every_combination
def test_it_takes_the_bytes_that_the_table_states(masters: torch.dtype, moments: torch.dtype) -> None:
    """Columns master and moments of the table; the shadow is the engine's."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in str(AdamW.__doc__).splitlines() if "|" in line]
    stated = {(row[0], row[1]): (int(row[2]), int(row[3])) for row in rows[2:]}
    (p,) = parameters(masters, 4096)
    optimizer = AdamW([p], moments=moments)
    train(optimizer)
    state = sum(value.nbytes for key, value in optimizer.state[p].items() if key != "step")
    names = {FLOAT: "float32", BF16: "bfloat16"}
    assert (p.nbytes / 4096, state / 4096) == stated[names[masters], names[moments]]


# --- what rounding would lose -----------------------------------------------------------------------------------------


def distance(build: Any, dtype: torch.dtype, steps: int = 800) -> float:
    """How far from their goal, 0.97 of where they start, weights are on average after steps of 0.0002."""
    torch.manual_seed(0)
    goal = 0.97 * (start := 2.0 + torch.rand(2000))
    p = nn.Parameter(start.to(dtype))
    optimizer = build([p])
    for _ in range(steps):
        p.grad = ((p.detach().float() - goal) * 2).to(dtype)
        optimizer.step()
    return float((p.detach().float() - goal).mean())


def test_small_steps_reach_what_float32_reaches_where_rounding_to_nearest_stays() -> None:
    options: dict[str, Any] = {"lr": 2e-4, "weight_decay": 0.0}
    exact = distance(lambda p: torch.optim.AdamW(p, **options), FLOAT)
    nearest = distance(lambda p: torch.optim.AdamW(p, **options), BF16)
    assert exact < 0.003
    assert nearest > 0.07  # 0.03 of 2.5: it has not moved
    for masters, moments in COMBINATIONS:
        found = distance(lambda p, moments=moments: AdamW(p, moments=moments, **options), masters)
        assert found == pytest.approx(exact, abs=0.002)


def test_second_moments_decay_where_rounding_to_nearest_keeps_them() -> None:
    """By a thousandth a step, a quarter of the distance to the next bfloat16."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([p], lr=0.0, moments=BF16)
    p.grad = torch.ones(4096)
    optimizer.step()
    nearest = optimizer.state[p]["exp_avg_sq"].clone()
    begin = nearest.float().mean()
    for _ in range(693):
        p.grad.zero_()
        optimizer.step()
        nearest = (nearest.float() * 0.999).bfloat16()
    assert float(nearest.float().mean() / begin) > 0.99
    assert float(optimizer.state[p]["exp_avg_sq"].float().mean() / begin) == pytest.approx(0.5, rel=0.01)


# --- overlapped with backward -----------------------------------------------------------------------------------------


@pytest.fixture(params=["auto", "torch"])
def kernel(request: pytest.FixtureRequest) -> Any:
    return request.param


@every_combination
@pytest.mark.parametrize("clip", [None, 0.01])
def test_overlapped_updates_give_the_bits_of_the_resident_run(
    masters: torch.dtype, moments: torch.dtype, clip: float | None, kernel: Any
) -> None:
    torch.manual_seed(0)
    resident = stack().to(masters)
    streamed = copy.deepcopy(resident)
    engine = attach(streamed, device="cpu", chunks="leaves", resident_below=0, poison=True, kernel=kernel)  # type: ignore[arg-type]
    optimizers = [AdamW(net.parameters(), lr=1e-2, moments=moments, seed=9) for net in (resident, streamed)]
    try:
        for step in range(4):
            x = data(step).to(masters)
            for net, optimizer in zip((resident, streamed), optimizers, strict=True):
                optimizer.zero_grad()
                loss = net(x).float().square().mean()
                if net is resident:
                    loss.backward()
                    if clip is not None:
                        nn.utils.clip_grad_norm_(net.parameters(), clip)
                else:
                    with engine.updates.overlap(optimizer, hold=clip is not None):
                        loss.backward()
                    if clip is not None:
                        engine.updates.clip(net.parameters(), clip)
                optimizer.step()
        engine.updates.wait()
        assert engine.updates.updater.updated == 4 * len(engine.groups)
        assert_same(dict(streamed.named_parameters()), dict(resident.named_parameters()))
        assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())
    finally:
        engine.close()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"moments": torch.float16}, "moments=torch.float16: use torch.float32 or torch.bfloat16"),
        ({"kernel": "fast"}, "kernel='fast': use one of 'auto', 'torch'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(parameters(FLOAT), **options)


def test_other_dtypes_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got torch\.float64: use torch\.optim\.AdamW"):
        AdamW([nn.Parameter(torch.zeros(2, dtype=torch.float64))])
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match="SparseAdam"):
        AdamW([p]).step()
