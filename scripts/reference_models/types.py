"""The model types of transformers and the classes that stand for them."""

from __future__ import annotations

from collections.abc import Mapping

from transformers.models.auto import configuration_auto, modeling_auto

HEADS = (
    "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CTC",
    "PRETRAINING", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
    "OBJECT_DETECTION", "DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION", "VISUAL_QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING",
    "TABLE_QUESTION_ANSWERING", "MASK_GENERATION", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "IMAGE_TO_IMAGE",
    "IMAGE_SEGMENTATION",
    "INSTANCE_SEGMENTATION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "TIME_SERIES_PREDICTION", "POSE_ESTIMATION",
    "IMAGE_MATTING", "RNNT", "TDT", "RETRIEVAL", "TABLE_RECOGNITION", "TEXT_RECOGNITION", "NORMAL_ESTIMATION",
    "POINTMAP_ESTIMATION", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "BACKBONE",
)  # fmt: skip
"""The heads, the most telling first."""


def model_types() -> tuple[str, ...]:
    """Every model type."""
    names: Mapping[str, str] = getattr(configuration_auto, "CONFIG_MAPPING_NAMES", {})
    return tuple(sorted(names))


def classes(model_type: str) -> tuple[str, ...]:
    """The usual head's class, then the base model's; none for a part of other models."""
    names: list[str] = []
    for kind in HEADS:
        names += _named(f"MODEL_FOR_{kind}_MAPPING_NAMES", model_type)
        if names:
            break
    names = names[:1] + _named("MODEL_MAPPING_NAMES", model_type)[:1]
    return tuple(dict.fromkeys(names))


def _named(table: str, model_type: str) -> list[str]:
    mapping: Mapping[str, str | tuple[str, ...] | list[str]] = getattr(modeling_auto, table, {})
    found = mapping.get(model_type, ())
    return [found] if isinstance(found, str) else list(found)
