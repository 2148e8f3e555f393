"""Every precision of the Trainer, streamed: the same bits as resident, with half the traffic under autocast."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from offload_cases import WIDTH, Classifier, Net, Watched, compare_fits, fit, loader, make_trainer
from stream_cases import assert_same
from torch import Tensor, nn


class Mixed(nn.Module):
    """A convolution, attention, a recurrent layer, an embedding and a raw parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x.unsqueeze(1))
        x = self.attention(x, x, x, need_weights=False)[0] + x
        out: Tensor = self.head(self.norm(self.recurrent(x)[0].sum(1) * self.scale))
        return out


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_precisions_train_the_same(precision: Any, activations: str) -> None:
    found = compare_fits(Classifier, strategy={"activations": activations}, precision=precision)
    assert found.strategy.copied_bytes > 0


def test_16_true_trains_the_same() -> None:
    class Descending(Classifier):  # AdamW's epsilon vanishes in half precision
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    compare_fits(Descending, precision="16-true")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_kinds_of_layers_train_the_same_in_every_precision(precision: Any) -> None:
    compare_fits(lambda: Classifier(Mixed()), precision=precision)


class Ramped(nn.Linear):
    """Makes a tensor of the default dtype, which true precisions set during the training step alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * torch.linspace(0.1, 1.3, self.out_features)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_forwards_that_make_tensors_train_the_same_in_true_precisions(precision: Any) -> None:
    compare_fits(lambda: Classifier(nn.Sequential(Ramped(WIDTH, WIDTH), Ramped(WIDTH, 4))), precision=precision)


class Encoder(nn.Module):
    """Attention with batches first: torch evaluates it as one kernel, which depends on the dtype of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.unsqueeze(1) * torch.arange(1.0, 4.0, dtype=x.dtype).view(1, 3, 1))
        x = self.attention(x, x, x, need_weights=False)[0]
        out: Tensor = self.head(self.layer(x.to(self.norm.weight.dtype)).sum(1))
        return out


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_attention_evaluates_and_trains_the_same(precision: Any, activations: str) -> None:
    compare_fits(lambda: Classifier(Encoder()), precision=precision, strategy={"activations": activations})


def scaler(initial: float = 2.0**10) -> list[Any]:
    return [
        MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=3))
    ]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_16_mixed_scales_unscales_clips_and_grows_its_scale_the_same(clip: float | None) -> None:
    found = compare_fits(Classifier, plugins=scaler, gradient_clip_val=clip)
    assert found.trainer.precision_plugin.scaler.get_scale() > 2.0**10


def test_a_scaler_skips_the_step_with_an_infinite_gradient() -> None:
    class Overflowing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * 1e30 * 1e30 if len(self.seen) == 2 else loss

    found = compare_fits(Overflowing, plugins=lambda: scaler(4.0), accumulate_grad_batches=2)
    expected = fit(Overflowing, plugins=lambda: scaler(4.0), accumulate_grad_batches=2)
    assert found.trainer.precision_plugin.scaler.state_dict() == expected.trainer.precision_plugin.scaler.state_dict()


def test_under_autocast_linear_weights_cross_in_half_the_bytes() -> None:
    def copied(**options: Any) -> int:
        # Biases stay. Overlapped updates would let time decide how early the next forward fetches its first chunks.
        strategy = Watched(chunks=nn.Linear, resident_below=300, gradients="published")
        fit(Classifier, strategy, max_epochs=1, **options)
        return strategy.copied_bytes

    assert copied() == 2 * copied(precision="bf16-mixed")


@pytest.mark.parametrize("stream_dtype", [torch.float32, {"net.blocks.*": torch.float32}])
def test_weights_that_must_cross_in_full_do(stream_dtype: Any) -> None:
    strategy = {"chunks": "net.blocks.*", "stream_dtype": stream_dtype}
    found = compare_fits(Classifier, strategy=strategy, precision="bf16-mixed")
    assert {row.dtype for row in found.strategy.tables[-1] if row.placement == "streamed"} == {"float32"}


def test_the_table_shows_the_dtype_in_which_chunks_cross() -> None:
    found = compare_fits(Classifier, strategy={"chunks": nn.Linear}, precision="bf16-mixed")
    assert {row.dtype for row in found.strategy.tables[-1] if row.placement == "streamed"} == {"bfloat16"}


def test_weights_used_outside_of_autocast_cross_in_full() -> None:
    class Island(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(input.float())

    class Islands(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = Island(WIDTH, 4)

    compare_fits(lambda: Classifier(Islands()), precision="bf16-mixed")


def test_evaluation_under_autocast_equals_the_resident_run_and_leaves_training_alone() -> None:
    def results(strategy: Any) -> list[Any]:
        torch.manual_seed(1)
        model, trainer = Classifier(), make_trainer(strategy, max_epochs=1, precision="bf16-mixed")
        before = trainer.predict(model, loader())
        trainer.fit(model, loader(), loader(8))
        return [before, trainer.predict(model, loader()), model.state_dict()]

    assert_same(results(Watched()), results("auto"))


def test_masters_stay_float32_under_autocast() -> None:
    class Looking(Classifier):
        dtypes: set[torch.dtype]

        def on_train_batch_end(self, *_: Any) -> None:
            self.dtypes = {p.dtype for p in self.parameters()} | {p.grad.dtype for p in self.parameters()}

    assert compare_fits(Looking, strategy={"gradients": "published"}, precision="bf16-mixed").model.dtypes == {
        torch.float32
    }
