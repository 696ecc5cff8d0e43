"""Seeded fuzzing of everything that reads what other people made."""
