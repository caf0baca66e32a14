"""How each model is cut along the tensor-parallel axis: data, one file per model."""
