"""Checkpoints in and out: Hugging Face (plain and NVFP4) and GGUF; `convert.py` is its program."""

from .gguf_files import from_gguf
from .hub_export import to_hugging_face
from .hugging_face import from_hugging_face, load_hugging_face
from .nvfp4_export import ExportOptions, to_nvfp4

__all__ = [
    "ExportOptions",
    "from_gguf",
    "from_hugging_face",
    "load_hugging_face",
    "to_hugging_face",
    "to_nvfp4",
]
