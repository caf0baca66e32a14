"""Pack folders of latents or images into shards."""
