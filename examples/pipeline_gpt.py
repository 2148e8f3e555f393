"""Train a GPT across several GPUs in one process: 85 million parameters there, a tiny one on the CPU.

    python examples/pipeline_gpt.py                                         # every GPU, or two CPU "devices"
    python examples/pipeline_gpt.py --devices 0 1 --schedule zb_h1 --microbatches 8

No launcher and no process group: the script is started with plain python, and `training_step` is that of a model on one
device. The text is the Python standard library's source code; the log shows which blocks each device got.
"""

import argparse
import warnings
from collections.abc import Sequence

import lightning as L
import torch
from gpt import GPT, SIZES, Size, next_byte_loss
from torch import Tensor
from train_gpt import TextData, standard_library

from ramtorch_lightning import PipelineStrategy

# 12 blocks of 12 * 768**2 parameters
GPU_SIZE = Size(blocks=12, width=768, heads=12, context=1024, batch=32, learning_rate=6e-4)


class LanguageModel(L.LightningModule):
    """Learns to predict the next byte; nothing in here knows about stages or microbatches."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.learning_rate = size.learning_rate
        self.model = GPT(size)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = next_byte_loss(self.model(batch[:, :-1]), batch[:, 1:])
        self.log("training_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("validation_loss", next_byte_loss(self.model(batch[:, :-1]), batch[:, 1:]), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.learning_rate, betas=(0.9, 0.95), fused=True)


def main(arguments: Sequence[str] | None = None) -> float:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", help="GPU numbers, or cpu several times")
    parser.add_argument("--schedule", default="staggered_1b1f")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the text is in memory
    L.seed_everything(0)

    named = options.devices or ([str(gpu) for gpu in range(gpus)] if gpus > 1 else ["cpu", "cpu"])
    devices = [int(device) if device.isdigit() else device for device in named]
    on_gpus = isinstance(devices[0], int)
    size = GPU_SIZE if on_gpus else SIZES["tiny"]
    trainer = L.Trainer(
        strategy=PipelineStrategy(devices=devices, schedule=options.schedule, n_microbatches=options.microbatches),
        precision="bf16-mixed" if on_gpus else "32-true",
        max_steps=options.steps,
        val_check_interval=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = TextData(standard_library(), "import ", size.context, size.batch, options.steps, seed=0)
    trainer.fit(LanguageModel(size), data)
    loss = float(trainer.callback_metrics["validation_loss"])
    print(f"validation loss: {loss:.3f} nats per byte")
    return loss


if __name__ == "__main__":
    main()
