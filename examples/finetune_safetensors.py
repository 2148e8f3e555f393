"""Fine-tune a checkpoint folder of the transformers library on one GPU, or on the CPU: weights stream from RAM.

    python examples/finetune_safetensors.py FOLDER --text notes.txt --out tuned            # all parameters
    python examples/finetune_safetensors.py FOLDER --text notes.txt --out tuned --lora 16  # adapters over a frozen base

FOLDER is what `save_pretrained` writes: config.json, model.safetensors in one or several files, and a tokenizer. The
files are memory-mapped and each weight is read once, to where it is trained, so that RAM holds about one copy of the
weights. The result is such a folder again, with adapters alone if there are any, or merged into the base by `--merge`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import peft
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from ramtorch_lightning import OffloadStrategy


class FineTune(L.LightningModule):
    """A causal language model from a folder; learns all parameters, or adapters of rank `lora` on its linear layers."""

    def __init__(self, folder: Path, lora: int = 0, learning_rate: float = 1e-4) -> None:
        super().__init__()
        self.folder, self.lora, self.learning_rate = folder, lora, learning_rate
        self.model: torch.nn.Module | None = None

    def configure_model(self) -> None:
        """Frozen weights stay in the dtype of the files; weights that are trained need float32, to take small steps."""
        if self.model is not None:
            return
        dtype = "auto" if self.lora else torch.float32
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, local_files_only=True)
        model.config.use_cache = False  # of keys, for generating; a block that is recomputed would fill it twice
        if self.lora:
            options = peft.LoraConfig(
                r=self.lora, lora_alpha=2 * self.lora, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(model, options)
        self.model = model.train()

    def training_step(self, tokens: Tensor, batch_index: int) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=0.01, fused=True)

    def save(self, folder: Path, merge: bool) -> None:
        """Writes safetensors that `from_pretrained` loads."""
        model = self.model.merge_and_unload() if merge else self.model
        model.config.use_cache = True
        model.save_pretrained(folder)


def read_windows(text: Path, folder: Path, length: int) -> list[Tensor]:
    """The text as token numbers, in pieces of `length`."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    if len(tokens) < length:
        raise ValueError(f"{text} has {len(tokens)} tokens, fewer than one window of {length}: use a smaller --length")
    return [*tokens[: len(tokens) // length * length].view(-1, length)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of the transformers library")
    parser.add_argument("--text", type=Path, required=True, help="what to learn")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0 trains all parameters")
    parser.add_argument("--merge", action="store_true", help="add the adapters to the weights and save all of them")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=4, help="windows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--window", type=int, default=2, help="slots: chunks that are on the GPU at a time")
    parser.add_argument("--pin", type=int, default=0, help="chunks that stay on the GPU instead of streaming")
    parser.add_argument("--resident-below", type=int, default=2**20, help="bytes; smaller tensors stay on the GPU")
    parser.add_argument("--precision", help="of the Trainer; by default bf16-mixed on a GPU, else 32-true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.merge and not options.lora:
        parser.error("--merge needs --lora")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    L.seed_everything(options.seed)
    windows = read_windows(options.text, options.folder, options.length)
    module = FineTune(options.folder, options.lora, options.learning_rate)
    trainer = L.Trainer(
        strategy=OffloadStrategy(window=options.window, pin=options.pin, resident_below=options.resident_below),
        precision=options.precision or ("bf16-mixed" if torch.cuda.is_available() else "32-true"),
        max_steps=options.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, DataLoader(windows, options.batch, shuffle=True, drop_last=len(windows) > options.batch))
    module.save(options.out, options.merge)
    AutoTokenizer.from_pretrained(options.folder, local_files_only=True).save_pretrained(options.out)
    print(f"loss {trainer.callback_metrics['loss']:.3f} after {trainer.global_step} steps; saved to {options.out}")


if __name__ == "__main__":
    main()
