"""A LLaMA of 0.2M parameters and a tokenizer of bytes, equal on all ranks, without any download."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + '\n' }}{% endif %}"
    "{% endfor %}"
)
"""The generation tags mark what `assistant_only_loss` counts."""


def make() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model, untrained, and its tokenizer."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "<pad>"]
    vocab = {token: index for index, token in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<pad>"})
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config), tokenizer
