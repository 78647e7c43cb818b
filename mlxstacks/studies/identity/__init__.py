"""Does a persona survive what is fused after it?"""
