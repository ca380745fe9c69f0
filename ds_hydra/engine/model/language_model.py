"""The language model inside a model that also reads images or sound: it trains on text alone."""

from __future__ import annotations

import logging
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_hydra.engine.model.adapters import unwrap_adapters
from ds_hydra.engine.model.model_checks import find_other_inputs, find_text_config

logger = logging.getLogger(__name__)

_HEADLESS = {
    "qwen2_vl_text": "Qwen2VLTextModel",
    "qwen2_5_vl_text": "Qwen2_5_VLTextModel",
    "qwen3_vl_text": "Qwen3VLTextModel",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
}
"""Types of text models that transformers ships without a causal language model around them, whose
logits are a product with the head alone.
"""

_found: WeakKeyDictionary[nn.Module, nn.Module | None] = WeakKeyDictionary()


class TextForCausalLM(PreTrainedModel):
    """A text model of transformers and a head."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # As those of the text models
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any):
        super().__init__(config)
        self.model = getattr(transformers, _HEADLESS[config.model_type])(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutput:
        """Logits, and the mean cross entropy of `labels` where these are given."""
        outputs = self.model(input_ids=input_ids, position_ids=position_ids, **others)
        logits = self.lm_head(outputs[0])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


def language_model_of(model: nn.Module) -> nn.Module:
    """Return the causal language model inside `model`, the same one in each call: `model` without
    its wrapper of PEFT, or, where that reads other inputs, too, a model of its text with the same
    modules. It is left as it is where transformers has no such model.
    """
    model = unwrap_adapters(model)
    config = getattr(model, "config", None)
    if config is None or not find_other_inputs(config):
        return model
    if model not in _found:  # a value that is its own key would keep it
        _found[model] = _put_together(model, find_text_config(config))
    found = _found[model]
    return model if found is None else found


def _put_together(model: nn.Module, text: Any) -> nn.Module | None:
    """None where `model` has no single text model of the class that `text` is for."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type, "")
    kind = TextForCausalLM if text.model_type in _HEADLESS else getattr(transformers, name, None)
    if kind is None or isinstance(model, kind):
        return None
    with torch.device("meta"):
        inner = kind(text)
    bases = [m for m in model.modules() if type(m) is type(inner.base_model)]
    head = model.get_output_embeddings()
    if len(bases) != 1 or head is None:
        return None
    setattr(inner, inner.base_model_prefix, bases[0])
    inner.set_output_embeddings(head)
    return inner


def freeze_other_parts(model: nn.Module) -> None:
    """Freeze all parameters of `model` that text does not train, and say which."""
    model = unwrap_adapters(model)
    inner = language_model_of(model)
    if inner is model:
        return
    of_text = {id(param) for param in inner.parameters()}
    others = [(name, p) for name, p in model.named_parameters() if id(p) not in of_text]
    if trained := [(name, p) for name, p in others if p.requires_grad]:
        for _, param in trained:
            param.requires_grad_(False)
        logger.warning(
            "%s trains on text alone, as a %s: %d parameters that text does not reach are frozen (%s ...)",
            type(model).__name__,
            type(inner).__name__,
            len(trained),
            trained[0][0],
        )
