"""AmoebaNet-B and AmoebaNet-D (Real et al., arXiv 1802.01548) as sequences of layers."""
