"""Optimizers that quantise the moments of tiny models, too."""

from dataclasses import dataclass

from titan_dit.optim.sections import AdamW4bitConfig, AdamW8bitConfig, AdamWFp8Config


@dataclass(frozen=True, kw_only=True)
class Small8bit(AdamW8bitConfig):
    least_elements = 256
    least_block = 4


@dataclass(frozen=True, kw_only=True)
class Small4bit(AdamW4bitConfig):
    least_elements = 256
    least_block = 4


@dataclass(frozen=True, kw_only=True)
class SmallFp8(AdamWFp8Config):
    least_elements = 256
    least_block = 4
