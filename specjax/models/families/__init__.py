"""Model families as tables: Hugging Face configuration keys, tensor names and their packing."""

from specjax.models.families.family import Family
from specjax.models.families.stored import Stored, stored
from specjax.models.families.tables import (
    FAMILIES,
    end_ids_of,
    family_of,
    read_config,
    write_config,
)

__all__ = [
    "FAMILIES",
    "Family",
    "Stored",
    "end_ids_of",
    "family_of",
    "read_config",
    "stored",
    "write_config",
]
