"""How well a bundle's tiers predict given texts: divergence of slim and `routed`, and an adapter to lm-eval."""
