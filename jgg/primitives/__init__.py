"""What JAX must know of a product: its primitive, how it is split over devices, what vmap makes of it."""
