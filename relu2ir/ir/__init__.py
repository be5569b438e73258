"""Scalar expressions: what they are, how they are read, differentiated and written for a target. Needs no torch."""
