"""What a request means for a bundle on a machine: its mode, router and costs, by the policy if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from via_sd.contract.generation_options import GRAMMARS, OPTIONS, GenerationConfig, for_mode, refuse_routing
from via_sd.contract.manifest import Bundle
from via_sd.contract.mode_names import AUTO, CALIBRATED, ROUTED, SLIM_MODES, SPECULATIVE
from via_sd.errors import RequestError
from via_sd.runtime.decoding.cost_model import CostModel, StepCost
from via_sd.runtime.decoding.default_costs import default_costs
from via_sd.runtime.decoding.router import Gates, Router
from via_sd.runtime.generation.policy import Policy

#: Options that change which tokens come out, so that what `calibrate` measured with greedy decoding says less.
_UNMEASURED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", *GRAMMARS)


def resolve(config: GenerationConfig, policy: Policy | None, *, has_slim: bool) -> GenerationConfig:
    """`config` with the mode that `auto` means by `policy`, and what goes with that where `config` is silent.

    Raises:
        RequestError: a mode or router that the bundle or the policy lacks something for.
    """
    refuse_routing(config)
    if config.mode == AUTO:
        config = _resolve_auto(config, policy)
    if config.mode in SLIM_MODES and not has_slim:
        raise RequestError(
            f"mode {config.mode} needs a slim-verifier, and this bundle was exported without a mask; "
            "export it with --mask, or use mode speculative"
        )
    if _is_calibrated(config):
        if policy is None or policy.router is None:
            raise RequestError(
                "router calibrated needs a calibration that allowed some divergence, on this machine, with this "
                "backend and the same number of threads (given or left open): via-sd-export calibrate "
                "--max-divergence"
            )
        if config.max_divergence is None:
            config = replace(config, max_divergence=policy.router.max_divergence)
    return config


def router_for(config: GenerationConfig, policy: Policy | None) -> Router:
    """The router for a resolved `config`."""
    if not _is_calibrated(config):
        return Gates.of(config)
    assert policy is not None
    assert policy.router is not None
    assert config.max_divergence is not None
    return policy.router.gate(config.max_divergence)


def costs_of(bundle: Bundle, policy: Policy | None) -> CostModel:
    """What forward passes cost by `policy`, and by default where it is silent."""
    slim, described = bundle.masks.get(bundle.slim or ""), bundle.manifest["drafter"]
    costs = default_costs(bundle.precision, slim=slim, drafter=described["kind"])
    if policy is None:
        return costs
    return CostModel(
        StepCost(policy.full_cost),
        costs.slim if policy.slim_cost is None else StepCost(policy.slim_cost),
        costs.draft if policy.draft_cost is None else policy.draft_cost,
        costs.agreement,
    )


def _resolve_auto(config: GenerationConfig, policy: Policy | None) -> GenerationConfig:
    meant: Mapping[str, Any] = {"mode": SPECULATIVE}
    if policy is not None:
        as_measured = config.greedy and not any(getattr(config, name) != OPTIONS[name].default for name in _UNMEASURED)
        meant = policy.options_for(config.max_divergence, as_measured=as_measured)
    open_ = {name: value for name, value in meant.items() if name == "mode" or getattr(config, name) is None}
    # Thresholds and the calibrated router exclude each other, and the request's wins.
    if (config.alpha1, config.alpha2) != (None, None) and open_.get("router") == CALIBRATED:
        del open_["router"]
    if config.router == CALIBRATED:
        open_ = {name: value for name, value in open_.items() if name not in ("alpha1", "alpha2")}
    return GenerationConfig(**for_mode(vars(replace(config, **open_))))


def _is_calibrated(config: GenerationConfig) -> bool:
    return config.mode == ROUTED and config.router == CALIBRATED
