"""Published weights: safetensors checkpoints of Hugging Face read into stages and written from them."""

from entrain_bench.train.weights.reading import Checkpoint, load_weights
from entrain_bench.train.weights.writing import save_weights

__all__ = ["Checkpoint", "load_weights", "save_weights"]
