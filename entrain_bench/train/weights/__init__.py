"""Published weights: safetensors checkpoints of Hugging Face read into stages and written from them."""

from entrain_bench.train.weights.files import Checkpoint, load_weights, save_weights

__all__ = ["Checkpoint", "load_weights", "save_weights"]
