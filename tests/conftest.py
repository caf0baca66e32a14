"""Every test runs with the shapes and types of titan_dit's annotations checked."""

from jaxtyping import install_import_hook

# Before the first import of titan_dit; the pure-Python config needs no shape checks.
install_import_hook(
    [
        "titan_dit.rng",
        "titan_dit.noise_schedule",
        "titan_dit.models",
        "titan_dit.objectives",
        "titan_dit.samplers",
        "titan_dit.data",
        "titan_dit.evaluation",
        "titan_dit.state.original_weights",
        "titan_dit.observe.images",
    ],
    # As for mypy, an int will do where a float is wanted.
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
