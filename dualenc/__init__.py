"""Train, evaluate and search with dual encoders under the global contrastive loss."""

__version__ = "0.1.0"
