"""privlora: private fine-tuning of language models with low-rank adapters."""

__version__ = "0.1.0"
