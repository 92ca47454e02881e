"""Text to batches: sources, tokenizers, packing and the resumable pipeline."""

from .config import DataConfig, SourceConfig
from .corpus import Corpus, load_corpus
from .default_tokenizer import load_tokenizer
from .packing import Batch, Packing, count_rows, make_packing, pack_rows
from .pipeline import TrainIterator, make_train_iterator, make_validation_batches
from .streams import TokenStream
from .tokenizer import ByteTokenizer, Tokenizer, check_vocabulary
from .tokenizer_files import load_tokenizer_file
from .unigram import unigram_loss

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "DataConfig",
    "Packing",
    "SourceConfig",
    "TokenStream",
    "Tokenizer",
    "TrainIterator",
    "check_vocabulary",
    "count_rows",
    "load_corpus",
    "load_tokenizer",
    "load_tokenizer_file",
    "make_packing",
    "make_train_iterator",
    "make_validation_batches",
    "pack_rows",
    "unigram_loss",
]
