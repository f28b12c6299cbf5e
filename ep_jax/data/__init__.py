"""Text or token files to batches. Reading order: documents, tokenizer, manifest, store, shards, packing, sequences,
dataset, batches. Importing this package imports NumPy but not JAX; batches for the step are in `ep_jax.data.batches`.
"""

from ep_jax.data.bigram import bigram_cross_entropy
from ep_jax.data.config import DataConfig
from ep_jax.data.dataset import Dataset, open_dataset
from ep_jax.data.sequences import Batch, Sequences

__all__ = ["Batch", "DataConfig", "Dataset", "Sequences", "bigram_cross_entropy", "open_dataset"]
