"""Weights to score and their records in storage, and what driver and workers make of them."""

import logging
from types import SimpleNamespace

import pytest
import torch

from rayembed.config.run_evaluation import EarlyStoppingConfig, ValidationConfig
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError
from rayembed.training.callbacks import WorkerValidation
from rayembed.training.checkpoints.weights import read_made_of, tensors_digest
from rayembed.training.validation.folder import ValidationFolder
from rayembed.training.validation.scoring import Validation, ValidationScoring

MADE_OF = {"run": "r", "plan": "p", "start": ""}
STEPS = (10, 20, 30, 40)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((2, 3), value, dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path) -> ValidationFolder:
    return ValidationFolder(str(tmp_path))


def scoring(folder, told=None, *, data="d", **config) -> ValidationScoring:
    settings = parse(ValidationConfig, {"data": {"kind": "beir", "path": "x"}, **config})
    told = [] if told is None else told
    validation = Validation(lambda *_: {}, data, lambda s: s["t"], told.append)
    return ValidationScoring("s", folder, STEPS, settings, validation)


def submit(folder, *steps, shift=0.0) -> None:
    for step in steps:
        folder.submit(step, state(step + shift), MADE_OF)


def score(scoring, folder, **by_step) -> None:
    for name, value in by_step.items():
        step = int(name.removeprefix("s"))
        scoring.scored(step, folder.content(step), {"t": value}, 1.0)


def test_steps_are_scored_in_order_and_each_once(folder):
    told = []
    found = scoring(folder, told)
    assert found.due([]) == []
    submit(folder, 20, 10)
    assert found.due([]) == [10, 20]
    assert found.due([10]) == [20]
    score(found, folder, s10=0.5)
    assert found.due([]) == [20]
    assert [(record.step, record.score, record.scores) for record in told] == [
        (10, 0.5, {"t": 0.5})
    ]
    told_again = []
    again = scoring(folder, told_again)  # as the next submission finds it
    assert again.due([]) == [20]
    assert again.choice.step == 10
    assert told_again == told  # the first may have been killed before MLflow had it


def test_the_same_weights_are_not_scored_again_and_other_ones_are(folder):
    found = scoring(folder)
    submit(folder, 10)
    score(found, folder, s10=0.5)
    submit(folder, 10)
    assert found.due([]) == []
    submit(folder, 10, shift=1.0)
    assert found.due([]) == [10]
    assert found.choice.step is None


def test_a_score_of_weights_that_were_replaced_meanwhile_counts_for_nothing(folder):
    told = []
    found = scoring(folder, told)
    submit(folder, 10)
    before = folder.content(10)
    submit(folder, 10, shift=1.0)
    found.scored(10, before, {"t": 0.9}, 1.0)
    assert found.due([]) == [10]
    assert not told


def test_weights_that_replaced_scored_ones_are_not_tidied_away(folder):
    found = scoring(folder)
    submit(folder, 10, 20)
    score(found, folder, s10=0.1, s20=0.5)
    # Between the worker's two acts: the new weights lie there, the former record still does.
    record = folder.read(10)
    submit(folder, 10, shift=1.0)
    folder.write(record)
    found.tidy()
    assert folder.steps()[0] == {10, 20}


def test_only_what_may_still_be_chosen_is_kept_and_the_best_is_handed_on(folder, tmp_path):
    found = scoring(folder)
    submit(folder, 10, 20, 30)
    score(found, folder, s10=0.1, s20=0.5)
    found.tidy()
    assert folder.steps()[0] == {20, 30}
    submit(folder, 40)
    score(found, folder, s30=0.2, s40=0.5)
    target = str(tmp_path / "weights.safetensors")
    assert found.promote(target) == 20
    assert folder.steps() == (set(), set(STEPS))
    kept = read_made_of(target)
    assert kept["content"] == tensors_digest(state(20))
    assert kept.items() >= MADE_OF.items()


def test_keeping_the_last_weights_hands_them_on_whatever_the_scores(folder, tmp_path):
    found = scoring(folder, keep="last")
    submit(folder, *STEPS)
    score(found, folder, s10=0.9, s20=0.1, s30=0.1, s40=0.1)
    found.tidy()
    assert folder.steps()[0] == {40}
    assert found.promote(str(tmp_path / "weights.safetensors")) == 40


def test_after_the_end_nothing_is_scored_and_later_weights_are_not_kept(folder, tmp_path):
    stopping = {"patience": 1}
    found = scoring(folder, early_stopping=stopping)
    submit(folder, *STEPS)
    score(found, folder, s10=0.5, s20=0.4)
    assert found.choice.ends_at == 20
    assert found.due([]) == []
    found.tidy()
    assert folder.steps()[0] == {10}
    # A better score of a later step, of a task that was under way, changes nothing.
    submit(folder, 30)
    score(found, folder, s30=0.9)
    assert found.promote(str(tmp_path / "weights.safetensors")) == 10


def test_failures_and_scores_that_are_no_numbers_are_told_and_kept(folder, caplog):
    told = []
    found = scoring(folder, told)
    submit(folder, 10, 20)
    with caplog.at_level(logging.WARNING):
        found.failed(10, folder.content(10), "its process died", 2.0)
        score(found, folder, s20=float("nan"))
    assert "step 10 could not be scored, and training continues" in caplog.text
    assert "the score of t is not a number" in caplog.text
    assert not told
    again = scoring(folder)
    assert again.due([]) == []
    assert folder.read(10).problem == "its process died"


def test_steps_that_never_got_weights_do_not_hold_up_the_choice(folder, tmp_path):
    found = scoring(folder)
    submit(folder, 30, 40)
    score(found, folder, s30=0.4, s40=0.2)
    assert not found.choice.settled
    found.training_is_done()
    assert found.choice.settled
    assert found.promote(str(tmp_path / "weights.safetensors")) == 30


def test_without_any_score_the_last_weights_go_on_with_a_warning(folder, tmp_path, caplog):
    found = scoring(folder)
    for step in STEPS:
        submit(folder, step)
        found.failed(step, folder.content(step), "no", 1.0)
        found.tidy()
    with caplog.at_level(logging.WARNING):
        assert found.promote(str(tmp_path / "weights.safetensors")) == 40
    assert "no step has a validation score" in caplog.text


def test_a_best_step_whose_weights_are_gone_is_replaced_by_the_best_of_those_left(
    folder, tmp_path, caplog
):
    found = scoring(folder)
    submit(folder, 10, 20, 30, 40)
    score(found, folder, s10=0.5, s20=0.6)
    found.tidy()  # 10 is gone
    submit(folder, 20, shift=1.0)  # other workers came by again, with other weights
    assert found.due([]) == [20, 30, 40]
    score(found, folder, s20=0.3, s30=0.4, s40=0.2)
    assert found.choice.step == 10
    with caplog.at_level(logging.WARNING):
        assert found.promote(str(tmp_path / "weights.safetensors")) == 30
    assert "the weights of step 10 are lost" in caplog.text


def test_scores_on_other_data_are_refused(folder):
    found = scoring(folder)
    submit(folder, 10)
    score(found, folder, s10=0.5)
    with pytest.raises(
        ArtifactError, match=r"step 10 was scored on the validation data 'd', but now they are 'e'"
    ):
        scoring(folder, data="e")


def test_a_record_that_is_no_record_says_what_to_do(folder, tmp_path):
    submit(folder, 10)
    (tmp_path / "validation" / "step-0000010.json").write_text("{}")
    with pytest.raises(ArtifactError, match="remove the file to have the weights scored again"):
        scoring(folder)


class Engine:
    """Weights that are as many as the steps done."""

    def __init__(self) -> None:
        self.step = 0

    def trainable_weights(self):
        yield from state(self.step).items()


def worker(folder, engine, stopping=None, *, start=0) -> WorkerValidation:
    found = WorkerValidation(folder, STEPS, stopping, MADE_OF)
    found.on_train_start(SimpleNamespace(engine=engine, device=torch.device("cpu")), start)
    return found


def test_a_worker_hands_in_the_weights_of_the_steps_that_are_scored(folder):
    engine = Engine()
    mine = worker(folder, engine)
    for step in range(1, 21):
        engine.step = step
        assert not mine.should_stop(step)
    assert folder.steps()[0] == {10, 20}
    assert folder.content(20) == tensors_digest(state(20))
    assert read_made_of(folder.weights(20)).items() >= {**MADE_OF, "step": "20"}.items()


@pytest.mark.parametrize(("last", "there"), [(13, {10, 13}), (10, {10})])
def test_weights_of_a_stage_that_another_callback_ends_are_handed_in_too(
    folder, tmp_path, last, there
):
    engine = Engine()
    mine = worker(folder, engine)
    for step in range(1, last + 1):
        engine.step = step
        mine.on_step_end({"step": step})
        mine.should_stop(step)
    mine.on_train_end()
    assert folder.steps()[0] == there
    found = scoring(folder, keep="last")
    found.training_is_done()
    assert found.promote(str(tmp_path / "weights.safetensors")) == last


def test_a_worker_ends_by_the_scores_of_steps_that_it_has_passed(folder):
    stopping = EarlyStoppingConfig(patience=1)
    found = scoring(folder, early_stopping={"patience": 1})
    engine = Engine()
    mine = worker(folder, engine, stopping)
    for step in (10, 20):
        engine.step = step
        assert not mine.should_stop(step)
    score(found, folder, s10=0.5, s20=0.4)
    engine.step = 30
    assert mine.should_stop(30)
    # From a checkpoint at step 15 on, the score of step 20 is one of the future.
    for start, ends in ((15, False), (20, True)):
        assert worker(folder, engine, stopping, start=start).should_stop(start) is ends
    # With other weights at step 20 its former score counts no more.
    engine.step = 21
    again = worker(folder, engine, stopping)
    assert not again.should_stop(20)


def test_without_early_stopping_a_worker_never_ends(folder):
    found = scoring(folder)
    submit(folder, 10, 20)
    score(found, folder, s10=0.5, s20=0.1)
    assert not worker(folder, Engine(), start=40).should_stop(40)
