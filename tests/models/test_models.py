"""Models that people train, streamed and pipelined: the plain Trainer's results, bit for bit."""

from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from autocast_cases import lstm_runs_in
from model_cases import CASES, ROWS, STEPS, Case, adapted
from offload_cases import Watched, make_trainer
from stream_cases import assert_same

from ramtorch_core import attach
from ramtorch_core.engine.module_tree import glob_regex
from ramtorch_lightning import PipelineStrategy

Precision = Literal["32-true", "bf16-mixed"]
EVERY_MODEL = pytest.mark.parametrize("name", CASES)
EVERY_PRECISION = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
DROPOUT = 0.1


class TwoStages(PipelineStrategy):
    """Two stages on the CPU, two microbatches; remembers where the second stage began."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"devices": ["cpu", "cpu"], "n_microbatches": 2} | options)
        self.cut = ""

    def _close(self) -> None:
        if self._runner is not None:
            self.cut = self.stage_table()[1].first_module
        super()._close()


def fit(case: Case, strategy: Any = "auto", *, dropout: float, batch: int = ROWS, **options: Any) -> Any:
    """One epoch; returns the trained LightningModule and its record."""
    task, loader = case.task(dropout), case.loader(batch)
    recurrent = any(isinstance(module, torch.nn.LSTM) for module in task.modules())
    if recurrent and options.get("precision") == "bf16-mixed" and not lstm_runs_in(torch.bfloat16):
        pytest.skip("this CPU has no such kernel")
    trainer = make_trainer(strategy, max_epochs=1, **options)
    torch.manual_seed(2)
    trainer.fit(task, loader)
    return task, {
        "losses": task.seen,
        "weights": {key: value.clone() for key, value in task.state_dict().items()},
        "buffers": {key: value.clone() for key, value in task.named_buffers()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
    }


@cache
def plain(name: str, precision: Precision, dropout: float, batch: int, accumulate: int = 1) -> Any:
    """The record of the Trainer without a strategy."""
    options = {"accumulate_grad_batches": accumulate} if accumulate > 1 else {}
    return fit(CASES[name], dropout=dropout, batch=batch, precision=precision, **options)[1]


def assert_trained(case: Case, record: Any) -> None:
    """Every weight that can change has changed."""
    before = case.task()
    frozen = {name for name, p in before.named_parameters() if not p.requires_grad}
    same = {name for name, p in before.named_parameters() if torch.equal(p, record["weights"][name])}
    assert same == frozen


@EVERY_PRECISION
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@EVERY_MODEL
def test_a_streamed_model_trains_as_without_streaming(name: str, activations: str, precision: Precision) -> None:
    case = CASES[name]
    strategy = Watched(chunks=None, activations=activations)
    _, record = fit(case, strategy, dropout=DROPOUT, precision=precision)
    assert_same(record, plain(name, precision, DROPOUT, ROWS))
    assert len(record["losses"]) == STEPS * (2 if case.whole else 1)
    assert_trained(case, record)
    assert strategy.copied_bytes > 0
    found = {glob: [n for n in strategy.streamed if glob_regex(f"net.{glob}").fullmatch(n)] for glob in case.chunks}
    assert {glob: len(names) for glob, names in found.items()} == case.chunks, sorted(strategy.streamed)
    assert sum(case.chunks.values()) == len(strategy.streamed), sorted(strategy.streamed)


@EVERY_PRECISION
@EVERY_MODEL
def test_a_pipelined_model_trains_as_with_accumulated_gradients(name: str, precision: Precision) -> None:
    """A model that is optimised by hand runs in one microbatch, and is compared with whole batches."""
    case = CASES[name]
    strategy = TwoStages()
    _, record = fit(case, strategy, dropout=0.0, precision=precision)
    expected = plain(name, precision, 0.0, ROWS) if case.whole else plain(name, precision, 0.0, ROWS // 2, 2)
    assert_same(record, expected)
    assert_trained(case, record)
    assert glob_regex(f"net.{case.stage}").fullmatch(strategy.cut), strategy.cut


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.whole])
def test_dropout_in_a_pipeline_does_not_depend_on_the_schedule(name: str) -> None:
    results = [fit(CASES[name], TwoStages(schedule=s), dropout=DROPOUT)[1] for s in ("1f1b", "sequential")]
    assert_same(*results)


@EVERY_PRECISION
def test_adapters_are_trained_over_a_base_that_keeps_its_bits_and_has_no_gradients_or_moments(
    precision: Precision,
) -> None:
    """LoRA, whose layers wrap those of the base."""
    case = CASES["lora"]
    task = case.task(DROPOUT)
    before = {name: p.detach().clone() for name, p in task.named_parameters()}
    gradients: set[str] = set()

    def look(*_: Any) -> None:
        gradients.update(name for name, p in task.named_parameters() if p.grad is not None)

    task.on_before_optimizer_step = look
    trainer = make_trainer(Watched(chunks=None), max_epochs=1, precision=precision)
    trainer.fit(task, case.loader(ROWS))
    adapters = {name for name, _ in task.named_parameters() if "lora_" in name}
    assert {name for name, p in task.named_parameters() if not torch.equal(p, before[name])} == adapters
    assert gradients == adapters
    assert len(trainer.optimizers[0].state) == len(adapters)


ADAPTED_PARTS = {
    "qwen2": "all-linear",
    "gpt2": ["c_attn", "c_fc"],  # transposed linear layers of its own
    "bert": ["query", "value"],
    "t5": ["q", "v", "wo"],
    "mixtral": ["q_proj", "v_proj"],
    "vit": "all-linear",
}


@pytest.mark.parametrize("name", ADAPTED_PARTS)
def test_adapters_on_other_models_train_as_without_streaming_and_as_with_accumulated_gradients(name: str) -> None:
    base = CASES[name]
    build = lambda dropout: adapted(base.build(0.0), dropout, ADAPTED_PARTS[name])
    case = replace(base, build=build, packages=(*base.packages, "peft"))
    strategy = Watched(chunks=None)
    _, record = fit(case, strategy, dropout=DROPOUT, precision="bf16-mixed")
    assert_same(record, fit(case, dropout=DROPOUT, precision="bf16-mixed")[1])
    assert_trained(case, record)
    blocks = max(base.chunks, key=lambda glob: base.chunks[glob])
    pattern = glob_regex(f"net.base_model.model.{blocks}")
    assert sum(pattern.fullmatch(chunk) is not None for chunk in strategy.streamed) == base.chunks[blocks]

    pipeline = TwoStages()
    _, record = fit(case, pipeline, dropout=0.0)
    assert_same(record, fit(case, dropout=0.0, batch=ROWS // 2, accumulate_grad_batches=2)[1])
    assert glob_regex(f"net.base_model.model.{base.stage}").fullmatch(pipeline.cut), pipeline.cut


def test_weights_of_t5_whose_dtype_is_read_may_cross_in_half_precision_all_the_same() -> None:
    strategy = Watched(chunks=None, stream_dtype={"*.wo.weight": torch.bfloat16})
    _, record = fit(CASES["t5"], strategy, dropout=DROPOUT, precision="bf16-mixed")
    assert_same(record, plain("t5", "bf16-mixed", DROPOUT, ROWS))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "t5", "mixtral"])
def test_a_streamed_decoder_uses_its_cache_in_training_and_in_generation(name: str) -> None:
    """Which is how all decoders here are trained; it is their default."""
    case = CASES[name]
    torch.manual_seed(0)
    batch = case.data(2)
    prompt = {"input_ids": batch["input_ids"], "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = case.task().net.eval().generate(**prompt)
    net = case.task().net
    streamer = attach(net, device="cpu", resident_below=0)
    try:
        training = net(**batch)
        training.loss.backward()
        assert training.past_key_values.get_seq_length() == training.logits.shape[1]
        assert torch.equal(net.eval().generate(**prompt), expected)
    finally:
        streamer.close()
