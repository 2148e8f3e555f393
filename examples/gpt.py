"""A small modern GPT over bytes, shared by the examples: pre-norm blocks, rotary positions, no biases."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token is one byte


@dataclass(frozen=True)
class Size:
    """The shape of a model; a block has 12 * width**2 parameters, and `batch` and `learning_rate` are a start."""

    blocks: int
    width: int
    heads: int
    context: int
    batch: int
    learning_rate: float


SIZES = {
    "tiny": Size(blocks=4, width=128, heads=4, context=128, batch=8, learning_rate=2e-3),
    "1b": Size(blocks=20, width=2048, heads=16, context=2048, batch=8, learning_rate=3e-4),
    "3b": Size(blocks=28, width=3072, heads=24, context=2048, batch=8, learning_rate=2e-4),
    "8b": Size(blocks=40, width=4096, heads=32, context=2048, batch=8, learning_rate=1.5e-4),
}


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): turns pairs of features of `x` (..., time, features) by their position."""
    half = x.shape[-1] // 2
    speed = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    sine, cosine = angle.sin(), angle.cos()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1).type_as(x)


class Block(nn.Module):
    """Causal attention, then an MLP of four times the width; it starts as the identity, since both outputs are zero."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width, bias=False)
        self.query_key_value = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.LayerNorm(size.width, bias=False)
        self.mlp_in = nn.Linear(size.width, 4 * size.width, bias=False)
        self.mlp_out = nn.Linear(4 * size.width, size.width, bias=False)
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.mlp_out.weight)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        query, key, value = projected.view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Maps bytes (batch, time) to the logits of the byte that follows each of them, (batch, time, VOCABULARY)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.context = size.context
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)  # an untrained model finds all bytes equally likely: 8 bits per byte

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.7, seed: int = 0) -> Tensor:
        """Continues `tokens` (batch, time) by `count` sampled bytes; the seed decides what is drawn."""
        generator = torch.Generator(tokens.device).manual_seed(seed)
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[:, -1].float()
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, following), dim=1)
        return tokens


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, computed in fp32; divide by ln 2 for bits per byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
