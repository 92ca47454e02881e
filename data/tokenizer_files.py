"""Finds out which tokenizer a file or folder holds, and loads it."""

from pathlib import Path

from ..errors import UserError
from .hugging_face_tokenizer import HuggingFaceTokenizer
from .sentencepiece_tokenizer import SentencePieceTokenizer
from .tokenizer import BYTES_FILE, HUGGING_FACE_FILE, SENTENCEPIECE_FILE, ByteTokenizer, Tokenizer
from .tokenizer_settings import TokenizerSettings


def load_tokenizer_file(path: str | Path) -> Tokenizer:
    """Loads "bytes", a SentencePiece `.model`, a `tokenizer.json`, or a directory with one of them.

    Raises:
      UserError: nothing there, or not a tokenizer.
    """
    if str(path) == "bytes":
        return ByteTokenizer()
    file = Path(path).expanduser()
    if file.is_dir():
        names = (HUGGING_FACE_FILE, SENTENCEPIECE_FILE, BYTES_FILE)
        found = [file / name for name in names if (file / name).is_file()]
        if not found:
            raise UserError(f"no tokenizer in {path}: it should hold {' or '.join(names)}")
        file = found[0]
    if not file.is_file():
        raise UserError(
            f"data.tokenizer={path} does not exist: name a .model, a tokenizer.json, a directory "
            "with one of them, or bytes"
        )
    if file.name == BYTES_FILE:
        return ByteTokenizer()
    try:
        content, settings = file.read_bytes(), TokenizerSettings.beside(file)
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer {file} ({error.strerror}): correct the permissions"
        ) from error
    kind = HuggingFaceTokenizer if file.suffix == ".json" else SentencePieceTokenizer
    return kind(content, str(file), settings)
