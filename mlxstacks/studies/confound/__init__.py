"""Does a fused adapter add knowledge?"""
