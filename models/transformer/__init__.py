"""The Transformer language model of the GPipe paper (Huang et al. 2019, section 3) as a sequence of layers."""
