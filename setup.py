"""The packages of the wheel; everything else stands in pyproject.toml.

train_configs/ lies at the top of the clone, in the wheel it is `titan_dit.train_configs`.
pyproject.toml can find packages or list them all, but cannot find them and add one.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["titan_dit", "titan_dit.*"]), "titan_dit.train_configs"],
    package_dir={"titan_dit.train_configs": "train_configs"},
)
