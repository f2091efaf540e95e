"""Ray Tune's searcher and schedulers with what earlier submissions have scored; no cluster."""

from types import SimpleNamespace

from tiny_job import make_run

from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed_extras.sweeps.decisions_on_ray import asha, searcher
from rayembed_extras.sweeps.optuna_space import distribution, texts, typed
from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.space import parse_domain
from rayembed_extras.sweeps.trial_store import Report, TrialRecord

RATE = "stages.retrieval.optimizer.learning_rate"
RANK = "model.lora.rank"
MASK = "model.mask"


class Trial:
    def __init__(self, trial_id):
        self.trial_id = trial_id
        checkpoints = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None))
        self.is_finished = lambda: False
        self.experiment_tag, self.evaluated_params = "", {}
        self.run_metadata = SimpleNamespace(checkpoint_manager=checkpoints)


def make_sweep(folder, space, **settings) -> Sweep:
    run = make_run(folder)
    run = override(run.model_copy(update={"stages": run.stages[:1]}), ["stages.retrieval.steps=8"])
    values = {"name": "s", "runs": {"": run.model_dump(mode="json")}, "space": space, **settings}
    return parse(Sweep, values)


def record(key, scores, values=None, state="finished") -> TrialRecord:
    reports = [Report(step, score, {}, float(step)) for step, score in scores.items()]
    final = reports[-1] if state == "finished" else None
    return TrialRecord(key, "", values or {}, state=state, reports=reports, final=final)


def told(asha, trial, step, score):
    return asha.on_trial_result(None, trial, {"global_step": step, "score": score})


def test_asha_knows_the_rungs_of_trials_that_ended_before(tmp_path):
    sweep = make_sweep(
        tmp_path, {RATE: "grid(1, 2)"}, scheduler={"kind": "asha", "reduction_factor": 2}
    )
    past = [record("a", {2: 0.5, 4: 0.6}), record("b", {2: 0.4}, state="stopped")]
    for known, expected in ((past, "STOP"), ([], "CONTINUE")):
        rungs, new = asha(sweep, known, total=8), Trial("c")
        rungs.on_trial_add(None, new)
        assert told(rungs, new, 2, 0.3) == expected
    good = asha(sweep, past, total=8)
    good.on_trial_add(None, new)
    assert told(good, new, 2, 0.7) == "CONTINUE"
    assert told(good, new, 4, 0.55) == "STOP", "below what the first trial had at the next rung"


def test_no_trial_is_ended_before_the_grace_steps(tmp_path):
    settings = {"kind": "asha", "reduction_factor": 2, "grace_steps": 4}
    sweep = make_sweep(tmp_path, {RATE: "grid(1, 2)"}, scheduler=settings)
    rungs, new = asha(sweep, [record("a", {2: 0.5, 4: 0.6})], total=8), Trial("c")
    rungs.on_trial_add(None, new)
    assert told(rungs, new, 2, 0.0) == "CONTINUE"
    assert told(rungs, new, 4, 0.0) == "STOP"


def test_optuna_draws_where_earlier_trials_scored_well(tmp_path):
    space = {
        RATE: "loguniform(1e-5, 1e-1)",
        RANK: "integers(1, 8)",
        MASK: "choice(causal, bidirectional)",
    }
    sweep = make_sweep(tmp_path, space, search={"kind": "optuna", "trials": 60})
    done = []
    for number in range(30):
        rate = 10 ** (-5 + 4 * number / 29)
        values = {
            RATE: repr(rate),
            RANK: str(1 + number % 8),
            MASK: ("causal", "bidirectional")[number % 2],
        }
        done.append(record(str(number), {8: -abs(number - 7) / 30}, values))
    found = searcher(sweep, done)
    drawn = [texts(sweep.domains, found.suggest(str(number))) for number in range(20)]
    near = sum(1e-5 <= float(values[RATE]) <= 1e-3 for values in drawn)
    blind = searcher(sweep, [])
    unguided = [texts(sweep.domains, blind.suggest(str(number))) for number in range(10)]
    assert near >= 15, [values[RATE] for values in drawn]
    assert len({values[RATE] for values in unguided}) == 10
    for values in drawn:
        assert texts(sweep.domains, typed(sweep.domains, values)) == values
    assert searcher(make_sweep(tmp_path, {RATE: "grid(1)"}), []) is None
    begun = {RATE: "0.05", RANK: "3", MASK: "causal"}
    first = searcher(sweep, [*done, record("x", {2: 0.1}, begun, state="begun")]).suggest("0")
    assert texts(sweep.domains, first) == begun


def test_domains_have_their_distributions():
    assert distribution(parse_domain("x", "loguniform(1e-5, 1e-1)")).log
    assert distribution(parse_domain("x", "choice(a, b)")).choices == ("a", "b")
    assert distribution(parse_domain("x", "integers(2, 9)")).high == 9
