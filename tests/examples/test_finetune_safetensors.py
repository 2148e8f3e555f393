"""examples/finetune_safetensors.py: from a folder of safetensors, through streamed training, to such a folder."""

import ctypes
import gc
import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import finetune_safetensors
import lightning as L
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

from ramtorch_lightning import OffloadStrategy

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama in bfloat16, in several files, with a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "base")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=256, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    assert len([*(tmp_path / "base").glob("*.safetensors")]) > 1
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def finetune(folder: Path, *options: str) -> Any:
    """The loaded result; the files of the base keep their bytes."""
    files = [*(folder / "base").iterdir()]
    before = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    finetune_safetensors.main(
        [
            *(str(folder / "base"), "--text", str(folder / "text.txt"), "--out", str(folder / "tuned")),
            *("--steps", "8", "--batch", "4", "--length", "32", "--learning-rate", "1e-2", "--resident-below", "0"),
            *options,
        ]
    )
    assert [hashlib.sha256(file.read_bytes()).digest() for file in files] == before
    assert [*(folder / "tuned").glob("*.safetensors")]
    return load(folder / "tuned")


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def loss(model: Any, folder: Path) -> float:
    tokens = transformers.AutoTokenizer.from_pretrained(folder / "base")(TEXT, return_tensors="pt").input_ids[:, :64]
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize("options", [[], ["--lora", "4", "--merge"]], ids=["all parameters", "merged adapters"])
def test_the_result_loads_as_an_ordinary_checkpoint_and_has_learned(folder: Path, options: list[str]) -> None:
    tuned = finetune(folder, *options)
    base = load(folder / "base")
    assert type(tuned) is type(base)
    assert tuned.dtype == (torch.bfloat16 if options else torch.float32)
    assert loss(tuned, folder) < loss(base, folder) - 0.1
    assert (folder / "tuned" / "tokenizer.json").is_file()


def test_adapters_are_saved_alone_and_load_over_the_base(folder: Path) -> None:
    tuned = finetune(folder, "--lora", "4")
    assert {path.name for path in (folder / "tuned").glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert loss(tuned, folder) < loss(load(folder / "base"), folder) - 0.1
    state = load(folder / "base").state_dict()
    for name, weight in tuned.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(weight, state[name.replace(".base_layer", "")]), name


class OwnMemory(threading.Thread):
    """The most memory that this process held at any time, in bytes, without pages of files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()

    @staticmethod
    def now() -> int:
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))

    def look(self) -> None:
        self.peak = max(self.peak, self.now())

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.look()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4], ids=["all parameters", "adapters"])
def test_until_the_first_step_ram_holds_one_copy_of_the_model(folder: Path, lora: int) -> None:
    """The files are mapped, and read to where the weights are trained."""
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=4096,
    )  # fmt: skip
    large = transformers.LlamaForCausalLM(config)
    nbytes = sum(parameter.nbytes for parameter in large.parameters())
    large.save_pretrained(folder / "large")
    del large
    finetune(folder, "--lora", str(lora))  # whatever has to be imported and compiled is, now

    class Stopping(L.Callback):
        def on_train_batch_start(self, *_: Any) -> int:
            memory.look()
            memory.over.set()
            return -1

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what other tests left is not used again for the model, unseen
    memory = OwnMemory()
    before = memory.now()
    memory.start()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy=OffloadStrategy(), accelerator="cpu", callbacks=[Stopping()], max_epochs=1, **options)
    try:
        trainer.fit(finetune_safetensors.FineTune(folder / "large", lora), DataLoader([torch.zeros(8).long()]))
    finally:
        memory.over.set()
        memory.join()
    assert 0.5 * nbytes < memory.peak - before < 1.25 * nbytes
