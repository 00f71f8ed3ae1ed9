"""The rules by which claims are judged: small functions of the evidence, which the notes' TOML files name."""

from claims.rules import compilers, computed, resampling, speeds

__all__ = ["compilers", "computed", "resampling", "speeds"]
