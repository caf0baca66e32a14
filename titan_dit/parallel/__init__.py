"""How a model is spread over ranks, applied from outside by the names of its submodules."""
