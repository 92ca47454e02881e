"""Text to batches: sources, tokenizers, packing and the resumable pipeline."""

from .config import DataConfig
from .corpus import Corpus, TokenStream, load_corpus, load_tokenizer
from .packing import Batch, count_rows, pack_rows
from .pipeline import TrainIterator, make_train_iterator, make_validation_batches
from .tokenizer import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer_file
from .unigram import unigram_loss

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "DataConfig",
    "TokenStream",
    "Tokenizer",
    "TrainIterator",
    "check_vocabulary",
    "count_rows",
    "load_corpus",
    "load_tokenizer",
    "load_tokenizer_file",
    "make_train_iterator",
    "make_validation_batches",
    "pack_rows",
    "unigram_loss",
]
