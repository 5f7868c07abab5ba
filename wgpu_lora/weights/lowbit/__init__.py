"""Low-bit tables (lut2 to lut4) and int8."""
