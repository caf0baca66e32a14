"""Pictures in and out: readers, the autoencoder, encoded datasets, files of pictures."""
