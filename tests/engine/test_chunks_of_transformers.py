"""The chunks found automatically in tiny models of the transformers library."""

from typing import Any

import pytest
import torch

from ramtorch_core.engine.chunks import find_chunks

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 64, "n_positions": 16}
VIT = {key: value for key, value in SIZES.items() if key != "vocab_size"} | {"image_size": 16, "patch_size": 8}
MIXTRAL = SIZES | {"num_key_value_heads": 4, "num_local_experts": 4}


@pytest.mark.parametrize(
    ("model", "config", "options", "blocks", "others"),
    [
        ("GPT2LMHeadModel", "GPT2Config", GPT2, 3, ["transformer.wte", "lm_head"]),
        ("LlamaForCausalLM", "LlamaConfig", SIZES | {"num_key_value_heads": 4}, 3, ["model.embed_tokens", "lm_head"]),
        ("BertForMaskedLM", "BertConfig", SIZES, 3, ["bert.embeddings.word_embeddings", "cls.predictions.decoder"]),
        ("T5ForConditionalGeneration", "T5Config", T5, 4, ["shared", "lm_head"]),
        ("MixtralForCausalLM", "MixtralConfig", MIXTRAL, 3, ["model.embed_tokens", "lm_head"]),
        ("ViTForImageClassification", "ViTConfig", VIT, 3, ["vit.embeddings.patch_embeddings.projection"]),
    ],
)
def test_blocks_embeddings_and_heads_are_chunks(
    model: str, config: str, options: dict[str, Any], blocks: int, others: list[str]
) -> None:
    special = {} if model.startswith("ViT") else SPECIAL
    with torch.device("meta"):
        root = getattr(transformers, model)(getattr(transformers, config)(**options, **special))
    found = find_chunks(root, None, resident_below=0)
    streamed = {parameter for _, module in found for parameter in module.parameters()}
    assert [name.rpartition(".")[2].isdigit() for name, _ in found].count(True) == blocks
    assert set(others) <= {name for name, _ in found}
    assert sum(p.numel() for p in streamed) > 0.95 * sum(p.numel() for p in root.parameters())
