"""Makes products known to JAX: their primitives, how they are split over devices, and how vmap batches them."""
