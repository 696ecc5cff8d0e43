"""What `export` writes and `runtime` reads: formats, names and shapes that both sides take from here."""
