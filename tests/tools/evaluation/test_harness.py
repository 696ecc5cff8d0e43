"""The adapter to lm-eval gives what the harness's own adapter gives for the checkpoint in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

from via_sd.runtime import Pipeline
from via_sd.tools.evaluation.harness import BundleLM

pytestmark = pytest.mark.long  # the harness alone takes most of a minute to start

QUESTIONS = [
    {"question": "The thing in the", "options": [" king", " hat", " ocean"], "answer": 1},
    {"question": "Over the ocean there", "options": [" is a", " in", " the thing is"], "answer": 0},
    {"question": "of the king on", "options": [" the", " a thing", " er"], "answer": 2},
]


@pytest.fixture(scope="module")
def ours(tiny_bundle: Path) -> BundleLM:
    return BundleLM(Pipeline.load(tiny_bundle, threads=1), generation={"mode": "speculative"})


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint: Path) -> Any:
    return HFLM(pretrained=str(tiny_checkpoint), device="cpu", dtype="float32", batch_size=1, max_length=256)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]  # type: ignore[arg-type]


def test_a_task_from_a_local_file_gives_the_same_numbers(ours: BundleLM, theirs: Any, tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS), encoding="utf-8")

    def evaluate(model: Any) -> Any:
        task = ConfigurableTask(
            config={
                "task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
                "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
                "doc_to_choice": "{{options}}", "doc_to_target": "answer", "target_delimiter": "",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            }
        )  # fmt: skip
        return simple_evaluate(model=model, tasks=[task], log_samples=True, bootstrap_iters=0)

    found, wanted = evaluate(ours), evaluate(theirs)
    for metric in ("acc,none", "acc_norm,none"):
        assert found["results"]["local"][metric] == wanted["results"]["local"][metric]
    for mine, other in zip(found["samples"]["local"], wanted["samples"]["local"], strict=True):
        values = [float(each[0]) for each in mine["filtered_resps"]]
        assert values == pytest.approx([float(each[0]) for each in other["filtered_resps"]], abs=1e-3)


def test_rolling_likelihoods_and_answers_are_those_of_transformers(ours: BundleLM, theirs: Any) -> None:
    texts = [("The thing in the king of the hats. ",), ("over the ocean " * 60,)]
    wanted = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", *texts), disable_tqdm=True)
    found = ours.loglikelihood_rolling(instances("loglikelihood_rolling", *texts))
    assert found == pytest.approx(wanted, abs=1e-2)
    prompt = ("The thing in", {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False})
    answer = ours.generate_until(instances("generate_until", prompt))
    assert answer == theirs.generate_until(instances("generate_until", prompt), disable_tqdm=True)
