"""`OffloadStrategy(n_microbatches=)` trains like accumulation with batches of the microbatches' size, bit for bit."""

from typing import Any

import pytest
import torch
from offload_cases import WIDTH, Classifier, Net, Watched, fit, loader
from stream_cases import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ramtorch_core import RamtorchError
from ramtorch_core.plan.itinerary import format_itinerary
from ramtorch_lightning import OffloadStrategy

EVERY_PRECISION = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])


class Chunked(Watched):
    """Keeps the last itinerary, the transfers and the number of updates past the end of a run."""

    itinerary = ""
    transfers = updated = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"chunks": "net.blocks.*", "n_microbatches": 2, **options})

    def _detach(self) -> None:
        if self._streamer is not None and self._streamer._inventory.built:
            self.updated = self.streamer.updates.updater.updated
        super()._detach()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        out = super().optimizer_step(*args, **kwargs)
        visits, transfers = self.streamer.follower.last
        self.itinerary, self.transfers = format_itinerary(visits), len(transfers)
        return out


def weights_and_state(run: Any) -> dict[str, Any]:
    return {key: run.record[key] for key in ("weights", "optimizers", "random")}


def compare(build: Any = Classifier, *, streaming: dict[str, Any] | None = None, **options: Any) -> Any:
    """Two microbatches of two rows against two accumulated batches of two rows."""
    accumulated = 2 * options.pop("accumulate_grad_batches", 1)
    ours = {"train": lambda: loader(16, 4), "accumulate_grad_batches": accumulated // 2}
    found = fit(build, Chunked(**(streaming or {})), **ours, **options)
    expected = fit(build, train=lambda: loader(16, 2), accumulate_grad_batches=accumulated, **options)
    assert_same(weights_and_state(found), weights_and_state(expected))
    return found


def test_a_model_all_of_whose_gradients_are_taken_for_updates_trains() -> None:
    compare(streaming={"chunks": "leaves"})


@EVERY_PRECISION
@pytest.mark.parametrize("gradients", ["auto", "published"])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_microbatches_train_like_accumulated_batches(activations: str, gradients: str, precision: Any) -> None:
    found = compare(streaming={"activations": activations, "gradients": gradients}, precision=precision)
    assert found.strategy.itinerary == "F0 F0 F1 F1 F2 B2 F2 B2 B1 B1 B0 B0"
    assert (found.strategy.updated > 0) == (gradients == "auto")


class Tied(Net):
    """Two of its blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2][1].weight = self.blocks[0][1].weight


class Scaled(Net):
    """Every block reads one parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x)


@pytest.mark.parametrize("net", [Tied, Scaled])
def test_weights_that_several_chunks_use_differ_from_accumulation_in_the_last_place(net: Any) -> None:
    found = fit(lambda: Classifier(net()), Chunked(), train=lambda: loader(16, 4)).record["weights"]
    plain = fit(lambda: Classifier(net()), train=lambda: loader(16, 2), accumulate_grad_batches=2).record["weights"]
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


class Looking(Net):
    """Keeps something of its input, which it looks up behind every block."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 1 + x.mean()
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x)


@EVERY_PRECISION
@pytest.mark.parametrize("gradients", ["auto", "published"])
def test_each_microbatch_finds_what_the_model_kept_of_it(gradients: str, precision: Any) -> None:
    """All of them found what was kept of the last one, and trained with it."""
    compare(lambda: Classifier(Looking()), streaming={"gradients": gradients}, precision=precision)


def test_weights_cross_once_per_pass() -> None:
    """Of three chunks, the last stays in its slot between its forward and backward visits."""
    assert compare(streaming={"window": 1}).strategy.transfers == 5


def test_accumulation_on_top_of_microbatches_trains_the_same() -> None:
    compare(accumulate_grad_batches=2)


@pytest.mark.parametrize("gradients", ["auto", "published"])
def test_accumulated_sums_of_half_precision_masters_are_rounded_once(gradients: str) -> None:
    def run(microbatches: int) -> Any:
        strategy = Chunked(n_microbatches=microbatches, gradients=gradients)
        options: Any = {"accumulate_grad_batches": 6 // microbatches, "precision": "bf16-true"}
        return fit(Classifier, strategy, train=lambda: loader(24, 2 * microbatches), **options)

    found, expected = run(2), run(1)
    assert_same(weights_and_state(found), weights_and_state(expected))


class Skips(Classifier):
    """Trains on none of the rows of the middle one of three batches."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx // self.parts % 3 == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("gradients", ["auto", "published"])
def test_a_batch_without_a_loss_leaves_the_gradients_of_those_before(gradients: str) -> None:
    options = {"chunks": "net.blocks.*", "gradients": gradients}
    rows: Any = {"max_epochs": 1, "num_sanity_val_steps": 0}
    strategy = Chunked(**options)
    found = fit(lambda: Skips(1), strategy, train=lambda: loader(36, 4), accumulate_grad_batches=3, **rows)
    expected = fit(lambda: Skips(2), train=lambda: loader(36, 2), accumulate_grad_batches=6, **rows)
    assert_same(weights_and_state(found), weights_and_state(expected))
    assert (strategy.updated > 0) == (gradients == "auto")


def test_clipping_by_norm_clips_the_sum_of_all_microbatches() -> None:
    compare(gradient_clip_val=0.05)


def test_dropout_repeats_under_the_same_seed() -> None:
    def run() -> Any:
        return weights_and_state(fit(lambda: Classifier(Net(dropout=0.3)), Chunked(), train=lambda: loader(16, 4)))

    assert_same(run(), run())


def test_batch_norm_counts_every_microbatch_once() -> None:
    compare(lambda: Classifier(Net(norm=nn.BatchNorm1d)))


def test_a_smaller_last_batch_is_split_too() -> None:
    found = fit(Classifier, Chunked(), train=lambda: loader(14, 4))
    assert all(bool(tensor.isfinite().all()) for tensor in found.record["weights"].values())
    assert found.trainer.global_step == 8


class Twice(Net):
    """Its second block runs twice per forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index in (0, 1, 1, 2):
            x = x + self.blocks[index](x)
        return self.head(x)


class Backwards(Net):
    """Its blocks run in another order than that of their registration."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in reversed(self.blocks):
            x = x + block(x)
        return self.head(x)


class AtOnceAgain(Net):
    """Its first block runs twice in a row."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index in (0, 0, 1, 2):
            x = x + self.blocks[index](x)
        return self.head(x)


class LastFirst(Net):
    """Its first block runs last."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index in (1, 2, 0):
            x = x + self.blocks[index](x)
        return self.head(x)


class Regions(Net):
    """Its last two blocks are recomputed together."""

    def both(self, x: Tensor) -> Tensor:
        for block in self.blocks[1:]:
            x = x + block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.blocks[0](x)
        return self.head(checkpoint(self.both, x, use_reentrant=False))


@pytest.mark.parametrize("net", [Twice, Backwards, AtOnceAgain, LastFirst, Regions])
def test_chunks_that_are_not_called_once_in_order_train_one_microbatch_after_the_other(
    net: type[Net], caplog: pytest.LogCaptureFixture
) -> None:
    compare(lambda: Classifier(net()), num_sanity_val_steps=0)
    assert "microbatches run one after the other" in caplog.text


def test_a_chunk_that_contains_chunks_and_is_recomputed_trains_one_microbatch_after_the_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunks = ["net.blocks.*", "net.blocks.*.1", "net.blocks.*.4"]
    compare(streaming={"chunks": chunks, "activations": "checkpoint"})
    assert "microbatches run one after the other" in caplog.text


def positive(x: Tensor) -> bool:
    return float(x.detach().sum()) > 0


class Dropped(Net):
    """Some microbatches skip its second block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = x if index == 1 and positive(x) else x + block(x)
        return self.head(x)


class Early(Net):
    """Some microbatches leave before its last block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            if index == 2 and positive(x):
                break
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("net", [Dropped, Early])
@pytest.mark.parametrize("gradients", ["auto", "published"])
def test_chunks_that_some_microbatches_skip_train_the_same(net: type[Net], gradients: str) -> None:
    compare(lambda: Classifier(net()), streaming={"gradients": gradients})


class Changing(Net):
    """Some microbatches run its first block again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        again = self.training and positive(x)
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.blocks[0](x) if again else x)


def marked(batches: int) -> Any:
    """Batches of two microbatches; of the last batch, the second microbatch has a positive sum."""
    x = torch.full((4 * batches, WIDTH), -0.5)
    x[-2:] = 0.5
    return DataLoader(TensorDataset(x, torch.zeros(len(x), dtype=torch.long)), 4)


def test_what_was_logged_before_microbatches_turn_out_to_run_apart_is_logged_once() -> None:
    options = {"max_epochs": 1, "num_sanity_val_steps": 0}
    found = fit(lambda: Classifier(Changing()), Chunked(), train=lambda: marked(1), **options)
    logged = [row["loss_epoch"] for _, row in found.record["logged"] if "loss_epoch" in row]
    first, second = found.model.seen[-4:-2]  # validation follows
    assert logged == [pytest.approx(float(first + second) / 2, abs=1e-6)]


def test_a_chunk_that_is_called_twice_in_a_later_step_is_named_with_the_remedy() -> None:
    with pytest.raises(RamtorchError, match=r"'net.blocks.0' was called twice.*n_microbatches=1"):
        fit(lambda: Classifier(Changing()), Chunked(), train=lambda: marked(2))


class ReadsAhead(Net):
    """Uses a weight of its last block before the first one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + self.blocks[2][1].weight.mean()))


def test_a_weight_used_outside_of_its_chunk_is_left_to_the_optimizer() -> None:
    found = fit(lambda: Classifier(ReadsAhead()), Chunked(), train=lambda: loader(16, 4)).record["weights"]
    plain = fit(lambda: Classifier(ReadsAhead()), train=lambda: loader(16, 2), accumulate_grad_batches=2)
    for name, tensor in plain.record["weights"].items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_the_optimizer_state_is_in_the_dtypes_of_a_plain_run(precision: Any) -> None:
    def dtypes(run: Any) -> Any:
        states = run.trainer.optimizers[0].state.values()
        return [{key: value.dtype for key, value in state.items()} for state in states]

    found = fit(Classifier, Chunked(), train=lambda: loader(16, 4), precision=precision)
    assert found.strategy.updated > 0
    assert dtypes(found) == dtypes(fit(Classifier, precision=precision))


def test_an_evaluation_before_training_shows_the_order_of_the_chunks() -> None:
    found = compare(lambda: Classifier(Backwards()))
    assert found.strategy.itinerary == "F2 F2 F1 F1 F0 B0 F0 B0 B1 B1 B2 B2"


def test_losses_and_logs_are_those_of_the_whole_batch() -> None:
    found = fit(Classifier, Chunked(), train=lambda: loader(16, 4)).record["logged"]
    plain = fit(Classifier, Watched(), train=lambda: loader(16, 4)).record["logged"]
    assert [step for step, _ in found] == [step for step, _ in plain]
    for (_, mine), (_, other) in zip(found, plain, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_a_batch_that_cannot_be_split_runs_whole_with_one_warning() -> None:
    class Scalars(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(torch.full((2, WIDTH), float(batch))).square().mean()

    with pytest.warns(UserWarning, match=r"runs as one microbatch.*split_fn"):
        fit(Scalars, Chunked(), train=lambda: [1.0, 2.0, 3.0], validation=lambda: None)


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_a_number_of_microbatches_that_makes_no_sense_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="n_microbatches"):
        OffloadStrategy(n_microbatches=count)
