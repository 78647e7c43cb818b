"""Whether rank moves the number of live buffers."""
