"""Measurements of the engine against independent references."""
