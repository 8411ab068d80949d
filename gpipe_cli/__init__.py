"""gpipe: train networks too big for one accelerator with micro-batch pipeline parallelism."""

__version__ = "0.1.0"
