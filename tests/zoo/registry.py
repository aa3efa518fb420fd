"""Every family and every row. Families of another task: a module of them, and its tuple here."""

from __future__ import annotations

from tests.zoo import encoder_decoders, encoders, families, multimodal
from tests.zoo.row import Family, Row

FAMILIES: tuple[Family, ...] = (
    *families.FAMILIES,
    *encoder_decoders.FAMILIES,
    *multimodal.FAMILIES,
    *encoders.FAMILIES,
)
ROWS = tuple(Row(family, placement) for family in FAMILIES for placement in family.placements)
