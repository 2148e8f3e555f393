"""The reference work: a GPT-like stack of pre-norm blocks, 2.68 billion parameters by default, and its data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 32000
HEAD_WIDTH = 128


class Block(nn.Module):
    """Pre-norm attention and a fourfold MLP without biases: 12 * width**2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return result


class Head(nn.Module):
    def __init__(self, width: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x))
        return logits


def build(layers: int, width: int, device: str = "cpu", vocabulary: int = VOCABULARY) -> list[nn.Module]:
    """Embedding, blocks and head on `device`; initialised on the GPU if there is one, which is faster."""
    fast = "cuda" if torch.cuda.is_available() else "cpu"
    modules: list[nn.Module] = []
    for index in range(layers + 2):
        torch.manual_seed(index)
        with torch.device(fast):
            if index == 0:
                module: nn.Module = nn.Embedding(vocabulary, width)
            elif index <= layers:
                module = Block(width)
            else:
                module = Head(width, vocabulary)
        modules.append(module.to(device))
    return modules


def count_parameters(layers: int, width: int) -> int:
    """Of the whole stack: embedding, blocks with two norms each, head with one."""
    return 2 * VOCABULARY * width + layers * (12 * width**2 + 4 * width) + 2 * width


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in float32 over all tokens."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.reshape(-1))


def tokens(
    batch: int, length: int, device: torch.device | str = "cpu", vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Random inputs and targets, the same in every run."""
    torch.manual_seed(1)
    ids = torch.randint(0, vocabulary, (batch, length))
    return ids.to(device), torch.randint(0, vocabulary, (batch, length)).to(device)
