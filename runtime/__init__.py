"""The runtime: sessions that run the network, and the diffusion loop around them."""
