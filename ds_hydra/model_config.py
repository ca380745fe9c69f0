"""Models of a command's `--model`: a shipped preset, a folder with config.json, such a file, or an
id of the hub; read by the classes of transformers, and never by code of the model's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hydra.configs.files import find_file, list_files, load_model_preset, read_json_object
from ds_hydra.errors import HydraConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


def load_config(name: str) -> PretrainedConfig:
    """The configuration that `name` stands for, with the defaults of its class."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name in list_files("models"):
        preset: PretrainedConfig = AutoConfig.for_model(**load_model_preset(name))
        return preset
    document = _read_document(name)
    try:
        if document is None:
            return AutoConfig.from_pretrained(name, trust_remote_code=False)  # type: ignore[no-any-return]
        if document.get("model_type") in CONFIG_MAPPING:
            return CONFIG_MAPPING[document["model_type"]].from_dict(document)
    except Exception as error:  # a file may hold anything
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        if "trust_remote_code" in str(error):
            raise HydraConfigError(f"--model is {name!r}, {_OWN_CODE}: {first_line}") from error
        if document is not None:
            raise HydraConfigError(
                f"--model is {name!r}, whose config.json {document['model_type']} of transformers does not read: "
                f"{first_line}"
            ) from error
        raise HydraConfigError(
            f"--model is {name!r}, which is neither a shipped preset ({', '.join(list_files('models'))}), nor a "
            f"folder with a config.json, nor a readable model of the hub: {first_line}"
        ) from error
    raise HydraConfigError(f"--model is {name!r}, {_describe_unknown(document)}")


def read_config(name: str) -> tuple[dict[str, Any], list[str]]:
    """Fields of the language model that `name` stands for, and the assumptions, one sentence
    each. Of a type that transformers does not have those that are written in config.json.
    """
    if name in list_files("models"):
        return load_model_preset(name), []
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    document = _read_document(name)
    if document is not None and document.get("model_type") not in CONFIG_MAPPING:
        note = f"model: the fields of config.json alone, {_describe_unknown(document)}"
        return dict(document.get("text_config") or document), [note, *find_quantisation(document)]
    config = load_config(name)
    text = config.get_text_config()
    notes = [] if text is config else [f"model: its part for text alone ({type(text).__name__})"]
    return all_fields(text), [*notes, *find_quantisation(config.to_dict())]


def all_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Fields of `config`, also by the names that all families have for them."""
    fields = {key: getattr(config, key, None) for key in config.attribute_map}
    return {**config.to_dict(), **fields}


def find_quantisation(config: Mapping[str, Any]) -> list[str]:
    """Describe the effect of a `quantization_config` on training; nothing where there is none."""
    found = config.get("quantization_config")
    if not found:
        return []
    method = found.get("quant_method", "of unknown kind") if isinstance(found, Mapping) else found
    return [
        f"weights: in the dtype of training; the checkpoint's are quantised ({method}, quantization_config), load "
        "them dequantised"
    ]


_OWN_CODE = "which names code of its own (auto_map); it is not run, trust_remote_code is never set"


def _read_document(name: str) -> dict[str, Any] | None:
    """The config.json that `name` is or has; None where it may be an id of the hub."""
    path = Path(name)
    if name.lower().endswith(".json"):
        return read_json_object(path)
    if (path / "config.json").is_file():
        return read_json_object(path / "config.json")
    if get_close_matches(name, list_files("models"), n=1, cutoff=0.8) and not path.exists():
        find_file("models", name)  # raises, naming the nearest
    return None


def _describe_unknown(document: Mapping[str, Any]) -> str:
    """Reason that transformers cannot read `document`, and what would do."""
    kind = document.get("model_type")
    if kind is None:
        return 'whose config.json has no model_type; add it, e.g. "model_type": "llama"'
    what = f"whose model_type {kind!r} this version of transformers does not have"
    if "auto_map" in document:
        what += f", and {_OWN_CODE}"
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for architecture in document.get("architectures") or ():
        kinds = [k for k, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture]
        if kinds:
            # Several types may have one architecture, which is named after its own; the one of text
            # alone reads fields on top
            name = architecture.lower().replace("_", "")
            own = [k for k in kinds if name.startswith(k.removesuffix("_text").replace("_", ""))]
            own.sort(key=lambda k: k.endswith("_text") == ("text_config" in document))
            return (
                f'{what}; its architecture {architecture} is there: write "model_type": '
                f'"{(own or kinds)[0]}" into a copy of config.json, without auto_map'
            )
    return f"{what}; use a model that transformers has, or a newer transformers"
