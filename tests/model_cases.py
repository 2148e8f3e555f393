"""Tiny models of the kinds people train, built here without any download, each with data, a loss, and what is expected.

Widths are small on purpose: what is tested is how a model is written, not how large it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

Batch = dict[str, Tensor]

ROWS = 4
STEPS = 3
TOKENS = 6
VOCABULARY = 40
IMAGE = 32
CLASSES = 5


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        build: the model, given the dropout that it is to have; those without dropout ignore it.
        data: columns of so many rows.
        loss: a scalar; unused with a `module` of its own.
        chunks: globs, and how many chunks each matches; together they match every chunk that streams.
        stage: a glob for the module that begins the second of two stages.
        packages: what must be installed.
        module: the LightningModule, if it is none of the ordinary kind.
        whole: batches run as one microbatch.
    """

    build: Callable[[float], nn.Module]
    data: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    chunks: dict[str, int]
    stage: str
    packages: tuple[str, ...] = ()
    module: Callable[[nn.Module], pl.LightningModule] | None = None
    whole: bool = False

    def task(self, dropout: float = 0.0) -> Any:
        """The LightningModule, the same at each call."""
        for package in self.packages:
            pytest.importorskip(package)
        torch.manual_seed(1)
        net = self.build(dropout)
        return Task(net, self.loss) if self.module is None else self.module(net)

    def loader(self, batch: int) -> Any:
        """`STEPS` batches of `ROWS` rows, or the same rows in batches of another size."""
        torch.manual_seed(3)
        columns = self.data(ROWS * STEPS)
        return DataLoader([{name: c[i] for name, c in columns.items()} for i in range(ROWS * STEPS)], batch)


class Task(pl.LightningModule):
    """An ordinary LightningModule; keeps its losses in `seen`."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.seen: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch)
        self.seen.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


# --- data -------------------------------------------------------------------------------------------------------------


def text(rows: int) -> Batch:
    """Token numbers; the last tokens of every third row are padding."""
    tokens = torch.randint(3, VOCABULARY, (rows, TOKENS))
    mask = torch.ones_like(tokens)
    mask[::3, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def pairs_of_text(rows: int) -> Batch:
    return text(rows) | {"labels": torch.randint(3, VOCABULARY, (rows, TOKENS - 1))}


def images(rows: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE), "labels": torch.randint(CLASSES, (rows,))}


def captioned_images(rows: int) -> Batch:
    return {"pixel_values": images(rows)["pixel_values"], "input_ids": text(rows)["input_ids"]}


def noisy_images(rows: int) -> Batch:
    return {
        "clean": torch.randn(rows, 3, IMAGE, IMAGE),
        "noise": torch.randn(rows, 3, IMAGE, IMAGE),
        "time": torch.randint(1000, (rows,)),
        "label": torch.randint(CLASSES, (rows,)),
    }


# --- losses -----------------------------------------------------------------------------------------------------------


def own_loss(net: nn.Module, batch: Batch) -> Tensor:
    """The loss that models of the transformers library compute themselves."""
    loss: Tensor = net(**batch).loss
    return loss


def classification(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch["pixel_values"]), batch["labels"])


def contrastive(net: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = net(**batch, return_loss=True).loss
    return loss


def next_token(net: nn.Module, batch: Batch) -> Tensor:
    tokens = batch["input_ids"]
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def denoising(net: nn.Module, batch: Batch) -> Tensor:
    """The noise is to be found in images that are mixed with it."""
    share = (batch["time"].float() / 1000)[:, None, None, None]
    noisy = (1 - share).sqrt() * batch["clean"] + share.sqrt() * batch["noise"]
    labels = {"class_labels": batch["label"]} if type(net).__name__.startswith("DiT") else {}
    return F.mse_loss(net(noisy, timestep=batch["time"], **labels).sample[:, :3], batch["noise"])


# --- models -----------------------------------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "image_size": IMAGE, "patch_size": 4,
}  # fmt: skip


def pretrained(kind: str, config: str, **options: Any) -> nn.Module:
    """A model of the transformers library with random weights."""
    import transformers

    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**options))
    return model


def llama(dropout: float) -> nn.Module:
    return pretrained("LlamaForCausalLM", "LlamaConfig", **LLAMA, attention_dropout=dropout)


def qwen2(dropout: float) -> nn.Module:
    return pretrained("Qwen2ForCausalLM", "Qwen2Config", **LLAMA, attention_dropout=dropout, tie_word_embeddings=True)


def gpt2(dropout: float) -> nn.Module:
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    return pretrained(
        "GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=4, n_head=2, n_positions=32, vocab_size=VOCABULARY,
        bos_token_id=1, eos_token_id=2, **dict.fromkeys(names, dropout),
    )  # fmt: skip


def bert(dropout: float) -> nn.Module:
    options = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    return pretrained("BertForMaskedLM", "BertConfig", **options, **dict.fromkeys(names, dropout))


def t5(dropout: float) -> nn.Module:
    return pretrained(
        "T5ForConditionalGeneration", "T5Config", d_model=16, d_kv=8, d_ff=32, num_layers=6, num_heads=2,
        vocab_size=VOCABULARY, dropout_rate=dropout, decoder_start_token_id=0,
    )  # fmt: skip


def mixtral(dropout: float) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return pretrained("MixtralForCausalLM", "MixtralConfig", **LLAMA, **experts, attention_dropout=dropout)


def vit(dropout: float) -> nn.Module:
    return pretrained(
        "ViTForImageClassification",
        "ViTConfig",
        **(VISION | {"num_hidden_layers": 8}),
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
    )


def convnext(dropout: float) -> nn.Module:
    return pretrained(
        "ConvNextForImageClassification", "ConvNextConfig", depths=[2, 2, 3, 2], hidden_sizes=[8, 12, 16, 20],
        drop_path_rate=dropout, num_labels=CLASSES,
    )  # fmt: skip


def resnet(dropout: float) -> nn.Module:
    return pretrained(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 9, 10, 11], depths=[2] * 4,
        layer_type="basic", num_labels=CLASSES,
    )  # fmt: skip


def clip(dropout: float) -> nn.Module:
    towers = {"text_config": LLAMA | {"projection_dim": 8}, "vision_config": VISION | {"projection_dim": 8}}
    for tower in towers.values():
        tower.pop("num_key_value_heads", None)
        tower["attention_dropout"] = dropout
    return pretrained("CLIPModel", "CLIPConfig", **towers, projection_dim=8)


def adapted(net: nn.Module, dropout: float, parts: list[str] | str, **options: Any) -> nn.Module:
    """With adapters on the modules of these names, over a frozen base."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=dropout, target_modules=parts, **options)
    model: nn.Module = peft.get_peft_model(net, config)
    return model


def lora(dropout: float) -> nn.Module:
    return adapted(llama(0.0), dropout, ["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def timm_vit(dropout: float) -> nn.Module:
    import timm

    model: nn.Module = timm.models.vision_transformer.VisionTransformer(
        img_size=IMAGE, patch_size=4, embed_dim=16, depth=4, num_heads=2, num_classes=CLASSES, drop_rate=dropout
    )
    return model


def timm_convnext(dropout: float) -> nn.Module:
    import timm

    model: nn.Module = timm.models.convnext.ConvNeXt(
        depths=(2, 2, 3, 2), dims=(8, 12, 16, 20), num_classes=CLASSES, drop_rate=dropout, drop_path_rate=dropout
    )
    return model


def resnet18(dropout: float) -> nn.Module:
    import torchvision

    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [2, 2, 2, 2], num_classes=CLASSES)


def unet(dropout: float) -> nn.Module:
    import diffusers

    model: nn.Module = diffusers.UNet2DModel(
        sample_size=IMAGE, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=8, dropout=dropout,
    )  # fmt: skip
    return model


def dit(dropout: float) -> nn.Module:
    import diffusers

    model: nn.Module = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=4, sample_size=IMAGE, patch_size=8,
        num_embeds_ada_norm=1000, norm_num_groups=4, dropout=dropout,
    )  # fmt: skip
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # of whole labels
            module.dropout_prob = dropout
    return model


class Recurrent(nn.Module):
    """Two layers of LSTM between an embedding and a head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits


class Adversaries(nn.Module):
    """A generator and a discriminator, each a stack of equal blocks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.generator, self.discriminator = self.tower(8, 12), self.tower(12, 1)

    @staticmethod
    def tower(inputs: int, outputs: int) -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.LeakyReLU()) for _ in range(3))
        return nn.Sequential(nn.Linear(inputs, 16), *blocks, nn.Linear(16, outputs))


class AdversarialTask(pl.LightningModule):
    """Two optimizers in turn, optimised by hand."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net: Any = net
        self.seen: list[Tensor] = []

    def score(self, vectors: Tensor, real: bool) -> Tensor:
        logits = self.net.discriminator(vectors)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for optimizer, own in zip(self.optimizers(), (self.net.discriminator, self.net.generator), strict=True):
            self.toggle_optimizer(optimizer)
            made = self.net.generator(batch["noise"])
            if own is self.net.generator:
                loss = self.score(made, True)
            else:
                loss = self.score(batch["real"], True) + self.score(made.detach(), False)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.seen.append(loss.detach().clone())

    def configure_optimizers(self) -> Any:
        towers = (self.net.discriminator, self.net.generator)
        return [torch.optim.AdamW(tower.parameters(), lr=1e-2, fused=True) for tower in towers]


def vectors(rows: int) -> Batch:
    return {"real": torch.randn(rows, 12), "noise": torch.randn(rows, 8)}


HF = ("transformers",)
DECODER = {"model.layers.*": 4, "model.embed_tokens": 1, "lm_head": 1}
MASKED = {"bert.encoder.layer.*": 4, "bert.embeddings.position_embeddings": 1, "cls.predictions.transform.dense": 1}
TOWERS = {"text_model.encoder.layers.*": 4, "vision_model.encoder.layers.*": 4, "**.*_embedding": 4}
ADAPTED = {"**.layers.*": 4, "**.embed_tokens": 1, "**.lm_head": 1}
UNET = {"**.resnets.*": 8, "**.attentions.*": 4, "**.conv": 2, "time_embedding.linear_2": 1}
DIT = {"transformer_blocks.*": 4, "pos_embed.proj": 1, "proj_out_2": 1}

CASES = {
    "llama": Case(llama, text, own_loss, DECODER, "model.layers.2", HF),
    "qwen2": Case(qwen2, text, own_loss, {"model.layers.*": 4}, "model.layers.2", HF),  # embedding and head are tied
    "gpt2": Case(gpt2, text, own_loss, {"transformer.h.*": 4, "transformer.wpe": 1}, "transformer.h.2", HF),
    "bert": Case(bert, text, own_loss, MASKED, "bert.encoder.layer.2", HF),
    "t5": Case(t5, pairs_of_text, own_loss, {"encoder.block.*": 6, "decoder.block.*": 6}, "decoder.block.*", HF),
    "mixtral": Case(mixtral, text, own_loss, DECODER, "model.layers.2", HF),
    "vit": Case(vit, images, own_loss, {"vit.**layer*.*": 8, "vit.embeddings.**": 1}, "vit.**layer*.4", HF),
    "convnext": Case(
        convnext, images, own_loss, {"**.layers.*": 9, "**.downsampling_layer.1": 3, "**.patch_embeddings": 1},
        "convnext.encoder.stages.2.layers.2", HF,
    ),
    "resnet": Case(resnet, images, own_loss, {"**.layers.*": 8, "**.embedder": 1}, "resnet.encoder.stages.2", HF),
    "clip": Case(clip, captioned_images, contrastive, TOWERS, "visual_projection", HF),
    "lora": Case(lora, text, own_loss, ADAPTED, "base_model.model.model.layers.2", (*HF, "peft")),
    "unet": Case(unet, noisy_images, denoising, UNET, "up_blocks.**", ("diffusers",)),
    "dit": Case(dit, noisy_images, denoising, DIT, "transformer_blocks.2", ("diffusers",)),
    "timm vit": Case(timm_vit, images, classification, {"blocks.*": 4, "patch_embed.proj": 1}, "blocks.2", ("timm",)),
    "timm convnext": Case(
        timm_convnext, images, classification, {"**.blocks.*": 9, "**.downsample.1": 3, "stem.0": 1},
        "stages.2.blocks.2", ("timm",),
    ),
    "torchvision resnet": Case(resnet18, images, classification, {"layer*.*": 8}, "layer4.1", ("torchvision",)),
    "lstm": Case(Recurrent, text, next_token, {"embedding": 1, "head": 1}, "head"),  # cuDNN's weights stay
    "gan": Case(
        Adversaries, vectors, own_loss, {"generator.*": 5, "discriminator.*": 4}, "discriminator",
        module=AdversarialTask, whole=True,
    ),
}  # fmt: skip
