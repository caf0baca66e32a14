"""Folders of latents or pictures into shards."""
