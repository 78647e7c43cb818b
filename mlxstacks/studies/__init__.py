"""Studies: what is asked, of which arms and data, and what the figures mean."""
