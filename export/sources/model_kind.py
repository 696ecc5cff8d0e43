"""What kind of model a directory holds, before any work: a causal language model with plain weights, or a refusal.

Each kind that is often given by mistake is named: a LoRA adapter, quantised weights, a classifier or reward model, an
encoder, a composite of a vision or audio model with a language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.files import read_json_object

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
#: Files of their own in which some quantisers say what they did.
_QUANTISER_FILES = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "NVIDIA ModelOpt",
}
_QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")
#: What a configuration of the quantisers says where it does not name a method.
_TELLING_KEYS = {
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "desc_act": "GPTQ",
    "zero_point": "AWQ",
    "config_groups": "compressed-tensors",
}
#: End of an architecture's class name -> what such a model is.
_OTHER_HEADS = {
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "an extractive question-answering model",
    "ForMultipleChoice": "a multiple-choice classifier",
    "RewardModel": "a reward model",
    "ForReward": "a reward model",
    "ForMaskedLM": "an encoder (masked language model)",
    "ForPreTraining": "an encoder (masked language model)",
    "ForConditionalGeneration": "an encoder-decoder, or a language model with a vision or audio encoder",
    "ForSpeechSeq2Seq": "a speech model",
    "ForImageTextToText": "a language model with a vision encoder",
    "Model": "a model without a language-model head (an encoder or an embedding model)",
}
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_OTHER_PARTS = ("vision_config", "audio_config", "speech_config", "image_config", "video_config", "talker_config")
_WANTED = "a causal language model with weights in float32, float16 or bfloat16"


def check_kind(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse what is no causal language model with plain weights, by its name.

    Args:
        config: contents of the directory's `config.json`.

    Raises:
        UnsupportedModelError: another kind of model, or quantised weights.
    """
    _check_quantisation(directory, config)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ExportError(f"{directory / 'config.json'} has architectures {names!r:.80}, wanted a list of class names")
    for name in names:
        kind = next((kind for end, kind in _OTHER_HEADS.items() if name.endswith(end)), None)
        if kind is not None and not name.endswith(_CAUSAL):
            raise UnsupportedModelError(f"{directory} is {kind}: its architecture is {name}; wanted {_WANTED}")
    parts = [part for part in _OTHER_PARTS if isinstance(config.get(part), Mapping)]
    if parts:
        raise UnsupportedModelError(
            f"{directory} is a composite with {', '.join(parts)} besides the language model; wanted {_WANTED}: save "
            "its language model alone"
        )
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{directory} is an encoder-decoder; wanted {_WANTED}")


def check_no_adapter(directory: Path) -> None:
    """Refuse a LoRA adapter, alone or beside the model that it changes: what is exported would not have it.

    Raises:
        UnsupportedModelError: an adapter's configuration or weights.
    """
    found = [name for name in (ADAPTER_CONFIG, *_ADAPTER_WEIGHTS) if (directory / name).exists()]
    if not found:
        return
    base, kind = "its base model", "LoRA"
    if ADAPTER_CONFIG in found:
        described = read_json_object(directory / ADAPTER_CONFIG, ExportError)
        kind = str(described.get("peft_type") or kind)
        base = str(described.get("base_model_name_or_path") or base)
    where = "beside a base model" if (directory / "config.json").is_file() else f"of {base}"
    raise UnsupportedModelError(
        f"{directory} holds an adapter ({kind}, {', '.join(found)}) {where}, which is not part of the base's weights; "
        "merge it (merge_and_unload of peft), save the result, and give that; or move the adapter away to export the "
        "base"
    )


def _check_quantisation(directory: Path, config: Mapping[str, Any]) -> None:
    text = config.get("text_config")
    for section in [config, text] if isinstance(text, Mapping) else [config]:
        for key in _QUANTISATION_KEYS:
            if section.get(key):
                raise _quantised(directory / "config.json", quantisation_method(section[key]))
    for name, method in _QUANTISER_FILES.items():
        if (directory / name).exists():
            raise _quantised(directory / name, method)


def quantisation_method(described: Any) -> str:
    """The method that a quantiser's configuration names, in the quantiser's words."""
    if not isinstance(described, Mapping):
        return str(described)
    method = described.get("quant_method") or next((m for k, m in _TELLING_KEYS.items() if k in described), None)
    details = [str(described[key]) for key in ("format", "fmt", "quant_algo") if described.get(key)]
    if isinstance(described.get("bits"), int):
        details.append(f"{described['bits']} bits")
    return f"{method or 'an unnamed method'}{' (' + ', '.join(details) + ')' if details else ''}"


def _quantised(file: Path, method: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file} says that the weights are quantised with {method}; wanted {_WANTED}: give the checkpoint that was "
        "quantised"
    )
