"""Find what `auto` should mean on a machine: pass latencies, router margins, the fastest mode."""
