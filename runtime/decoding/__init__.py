"""How tokens are decided: modes, verification, router, drafters, sampling, cache."""
