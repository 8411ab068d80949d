"""`make gpu-check`: what can be checked and measured on a machine with one CUDA GPU, in under eight minutes."""
