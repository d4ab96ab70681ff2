"""Tiny random models of the architectures that people download most, with the demo's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from privlora.demo import model_path

_TOKENS: dict[str, Any] = {"vocab_size": 1280, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BASE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_TOKENS}
_PLAIN = {**_BASE, "intermediate_size": 64, "max_position_embeddings": 256}
_GQA = {**_PLAIN, "num_key_value_heads": 2}
_HEADS = {**_GQA, "head_dim": 8}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_GEMMA = {**_HEADS, "sliding_window": 8, "query_pre_attn_scalar": 8}
_FALCON = {**_BASE, "new_decoder_architecture": True, "num_kv_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}  # their loss would be asked for
_QWEN = {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16}
_LOCAL = {**_EXPERTS, "num_local_experts": 4}
_NEXT = {
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_MLA = {
    **{
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8},
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
_SSD = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_PICTURES = {
    "vision_config": {
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": 28, "patch_size": 14},
    },
    **{"mm_tokens_per_image": 4, "image_token_index": 1279, "boi_token_index": 1278, "eoi_token_index": 1277},
}

FAMILIES: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**_GQA),
    "mistral": lambda: hf.MistralConfig(**_GQA),
    "qwen2": lambda: hf.Qwen2Config(**_GQA),
    "qwen3": lambda: hf.Qwen3Config(**_HEADS),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(**_GQA, **_QWEN, shared_expert_intermediate_size=16),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**_HEADS, **_QWEN),
    "qwen3-next": lambda: hf.Qwen3NextConfig(**_HEADS, **_QWEN, **_NEXT, shared_expert_intermediate_size=16),
    "gemma2": lambda: hf.Gemma2Config(**_GEMMA),
    "gemma3-text": lambda: hf.Gemma3TextConfig(**_GEMMA),
    "gemma3": lambda: hf.Gemma3Config(text_config=hf.Gemma3TextConfig(**_GEMMA).to_dict(), **_PICTURES),
    "phi3": lambda: hf.Phi3Config(**_GQA),
    "phi-moe": lambda: hf.PhimoeConfig(**_GQA, **_LOCAL),
    "gpt2": lambda: hf.GPT2Config(**_GPT),
    "gptj": lambda: hf.GPTJConfig(**_GPT, rotary_dim=4),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**_PLAIN),
    "opt": lambda: hf.OPTConfig(**_BASE, ffn_dim=64, max_position_embeddings=256, word_embed_proj_dim=32),
    "falcon": lambda: hf.FalconConfig(**_FALCON),
    "bloom": lambda: hf.BloomConfig(**_TOKENS, hidden_size=32, n_layer=2, n_head=4),
    "mamba": lambda: hf.MambaConfig(
        **_TOKENS, hidden_size=32, num_hidden_layers=2, state_size=8, time_step_rank=8
    ),
    "falcon-h1": lambda: hf.FalconH1Config(**_HEADS, **_SSD, mamba_chunk_size=8),
    "mixtral": lambda: hf.MixtralConfig(**_GQA, **_LOCAL),
    "deepseek-v3": lambda: hf.DeepseekV3Config(**_PLAIN, **_MLA),
    "olmo2": lambda: hf.Olmo2Config(**_GQA),
    "gpt-oss": lambda: hf.GptOssConfig(**_HEADS, **_LOCAL, sliding_window=8),
    "smollm3": lambda: hf.SmolLM3Config(**_GQA),
    "granite": lambda: hf.GraniteConfig(**_GQA),
    "stablelm": lambda: hf.StableLmConfig(**_GQA),
    "cohere": lambda: hf.CohereConfig(**_GQA),
    "starcoder2": lambda: hf.Starcoder2Config(**_GQA),
    "bert": lambda: hf.BertConfig(**_PLAIN),
}


def save_family(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A random model and its tokenizer, in ``folder``."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family]())
    model.to(dtype).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(model_path()).save_pretrained(folder)
    return folder
