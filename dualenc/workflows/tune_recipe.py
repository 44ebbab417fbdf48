"""Tune a recipe: learning rate, temperature, objective and batch, within given minutes.

Trials are equally long trainings, of which Hyperband stops the hopeless ones early. The study is a
file of optuna in the output folder, after each of whose writes a killed search may continue.
"""

from __future__ import annotations

import importlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from dualenc import distributed
from dualenc.data.store.identity import digest_of
from dualenc.errors import DualencError
from dualenc.evaluation.report_page import Table
from dualenc.io.files import atomic_path, locked, removed_if_refused, write_json
from dualenc.io.reading import read_json_object
from dualenc.recipe.resolve import Recipe, read_recipe
from dualenc.recipe.yaml_files import dump_recipe
from dualenc.types import StrPath, one_or_several
from dualenc.workflows.result_folder import PAGE, check_result_folder
from dualenc.workflows.tuning_report import TASK, Tried, Verdict, judge, tuning_table, write_tuning
from dualenc.workflows.tuning_space import (
    Space,
    Values,
    check_space,
    default_space,
    kind_of,
    own_values,
    parse_space,
    with_values,
    without_large_batches,
)
from dualenc.workflows.tuning_trial import Bench, chosen_by, is_out_of_reach

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger("dualenc.workflows")

BEGUN = "tuning.json"
STUDY = "study.sqlite"
BEST = "best.yaml"
STARTUP = 4
"""Random trials before the sampler learns from those before."""
SLACK = 0.05
"""Share of the minutes by which the last trial may end late; one that would take more is not
begun."""


@dataclass(frozen=True)
class TuneResult:
    """What a tuning tried, and which settings to take.

        result = dualenc.tune("mine.yaml", minutes=20)
        result.verdict.text, result.recipe

    Attributes:
        folder: output folder.
        recipe: best.yaml, a recipe with the settings to take.
        values: these settings by name, such as "trainer.learning_rate".
        verdict: the comparison with the recipe as it was.
        trials: all trials, in order; the first is the recipe as it was.
        table: table of the trials.
        page: report.html.
    """

    folder: Path
    recipe: Path
    values: Values
    verdict: Verdict
    trials: Sequence[Tried]
    table: Table
    page: Path


def tune(
    recipe: StrPath,
    *overrides: str,
    minutes: float = 20.0,
    space: Sequence[str] | None = None,
    trials: int = 12,
    out: StrPath | None = None,
    seed: int = 0,
    allow_module: Sequence[str] | None = None,
    progress: bool = True,
) -> TuneResult:
    """Choose learning rate, temperature, objective and batch of a recipe within some minutes.

    Trials train for equal wall-clock seconds; the first is the recipe as it is. Half of the
    held-out queries choose, the other half compares. A killed search continues by the same call.
    Needs optuna: pip install 'dualenc[tune]'. Same as `dualenc tune`.

        result = dualenc.tune("mine.yaml", minutes=20, space=["trainer.learning_rate=1e-5..5e-4"])

    Args:
        recipe: recipe in YAML.
        overrides: section.key=value pairs, as for `dualenc train`.
        minutes: minutes in total.
        space: settings to try, each section.key=low..high or section.key=value,value; objective=…
            chooses classes, with + for positive_in_softmax. By default as fits the kind of model.
        trials: number of trials of full length that the minutes would hold.
        out: output folder; by default trainer.output with -tuned.
        seed: seed of the search.
        allow_module: modules other than dualenc whose classes the recipe may name.
        progress: show a progress bar.

    Returns:
        The trials, the settings to take, and the files.

    Raises:
        DualencError: optuna is missing, a setting does not fit, the minutes are too few, or the
            folder holds another search.
    """
    started = time.perf_counter()
    _import_optuna()
    modules = list(one_or_several(allow_module or ()))
    read = read_recipe(recipe, overrides, modules)
    tried = parse_space(list(one_or_several(space)), read) if space else default_space(read)
    _check(minutes, trials)
    check_space(read, tried, modules)
    folder = Path(out or f"{read.settings['trainer']['output']}-tuned")
    check_result_folder(folder, TASK, "tuning", lambda path: (path / BEGUN).is_file())
    _log_space(read, tried, minutes, trials, is_default=not space)
    with removed_if_refused(folder, BEGUN), locked(folder, wait=False):
        search = Search(read, tried, folder, seed, modules, progress)
        search.begin(started, 60 * minutes / trials)
        search.run(60 * minutes)
        return search.finish()


def _import_optuna() -> Any:
    """Import optuna, without its notices on each trial."""
    try:
        found = importlib.import_module("optuna")
    except ImportError:
        raise DualencError(
            "tuning needs the package optuna", fix="pip install 'dualenc[tune]'"
        ) from None
    found.logging.set_verbosity(found.logging.ERROR)
    return found


def _check(minutes: float, trials: int) -> None:
    if not 0 < minutes < float("inf"):
        raise DualencError(f"minutes is {minutes}", fix="give a number above 0")
    if trials < 2:
        raise DualencError(f"trials is {trials}", fix="give at least 2")
    if distributed.launched() > 1:
        raise DualencError(
            "a tuning runs on one process", fix="run it without accelerate, on one GPU"
        )


def _log_space(recipe: Recipe, space: Space, minutes: float, trials: int, is_default: bool) -> None:
    """Say what will be tried, before it starts."""
    whose = f"default for {kind_of(recipe)}" if is_default else "given"
    logger.info("Tuning %s, settings to try (%s):", recipe.source, whose)
    for name, tried in space.items():
        own = own_values(recipe, space)[name]
        logger.info("  %s=%s (first %s)", name, tried, own)
    seconds = 60 * minutes / trials
    logger.info("Each trial trains for %.0f s by the clock; %g min in total", seconds, minutes)


class Search:
    """A search in a folder, from its beginning or where a killed one has left it.

    Args:
        recipe: recipe to tune.
        space: settings to try.
        folder: output folder, locked.
        seed: seed of the search.
        modules: modules whose classes the recipe may name.
        progress: True to show a bar.
    """

    def __init__(
        self,
        recipe: Recipe,
        space: Space,
        folder: Path,
        seed: int,
        modules: Sequence[str],
        progress: bool,
    ) -> None:
        self.recipe = recipe
        self.space = space
        self.folder = folder
        self.seed = seed
        self.modules = modules
        self.progress = progress
        self.optuna = _import_optuna()

    def begin(self, started: float, seconds: float) -> None:
        """Read the data, and open the study of the folder or a new one.

        Args:
            started: when the minutes began.
            seconds: seconds of a trial.
        """
        self.started = started
        path = self.folder / BEGUN
        if path.is_file():
            # More minutes give more trials, which must be as long as those before.
            seconds = read_json_object(path)["seconds of a trial"]
        self.bench = Bench.of(self.recipe, seconds, self.folder / "trial")
        self.space = without_large_batches(self.space, len(self.bench.pairs))
        if not path.is_file():
            self.bench.check(self.recipe)
        plan = self._checked_plan(seconds)
        self.bench.take_over(plan["evaluations"], plan["overhead"])
        self.study = self._open_study()
        self.bench.speeds.update(self.study.user_attrs.get("speeds", {}))
        # What earlier processes have spent counts.
        self.spent = sum(each.seconds for each in self.tried())
        if self.study.trials:
            logger.info(
                "Continuing %s: %s finished", self.folder, _counted(len(self.tried()), "trial")
            )

    def _checked_plan(self, seconds: float) -> dict[str, Any]:
        """Return the plan in the folder, written if it is new; refuse another search's."""
        identity = {
            "recipe": digest_of(json.dumps(self.recipe.settings, sort_keys=True)),
            "settings to try": {name: str(tried) for name, tried in self.space.items()},
            "data": digest_of([self.bench.pairs.identity(), *map(str, self.bench.evaluator.data)]),
            "seed": self.seed,
        }
        path = self.folder / BEGUN
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            measured = {"seconds of a trial": seconds}
            measured |= {name: getattr(self.bench, name) for name in ("evaluations", "overhead")}
            write_json(path, {**identity, **measured})
        plan = read_json_object(path)
        for name, own in identity.items():
            if plan.get(name) != own:
                raise DualencError(
                    f"holds another search (not the same {name})",
                    fix="choose another --out, or repeat the command that began it",
                    where=self.folder,
                )
        return plan

    def _open_study(self) -> optuna.Study:
        optuna = self.optuna
        pruner = optuna.pruners.HyperbandPruner(
            min_resource=1, max_resource=self.bench.evaluations, reduction_factor=3
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optuna.create_study(
                storage=f"sqlite:///{(self.folder / STUDY).resolve()}",
                study_name="dualenc",
                direction="maximize",
                pruner=pruner,
                load_if_exists=True,
            )

    def run(self, seconds: float) -> None:
        """Run trials until the next would end late.

        Args:
            seconds: seconds in total, those of earlier processes included.
        """
        bar = tqdm(
            total=round(seconds),
            desc="tuning",
            disable=not self.progress,
            # The total is time itself, so that what is left is not an extrapolation.
            bar_format="{percentage:3.0f}%|{bar}| {desc}",
        )

        def elapsed() -> float:
            passed = self.spent + time.perf_counter() - self.started
            bar.n = min(round(passed), round(seconds))
            bar.set_description_str(_clock(seconds - passed) + " left" + self._best_so_far())
            return passed

        try:
            with bar:
                while elapsed() + self.bench.seconds <= seconds * (1 + SLACK) or not self.tried():
                    self._run_trial(elapsed, seconds * (1 + 2 * SLACK))
        except KeyboardInterrupt:
            done = _counted(len(self.tried()), "trial")
            logger.warning("%s finished, kept in %s; the same command continues", done, self.folder)
            raise

    def _best_so_far(self) -> str:
        tried = self.tried()
        scores = [each.score for each in tried if each.score is not None]
        return f", {_counted(len(tried), 'trial')}, best {max(scores):.4f}" if scores else ""

    def _run_trial(self, elapsed: Callable[[], float], latest: float) -> None:
        """Run the next trial, or again the one that was killed."""
        optuna, begun = self.optuna, time.perf_counter()
        states = [each.state for each in self.study.trials]
        is_killed = bool(states) and states[-1] == optuna.trial.TrialState.RUNNING
        number = len(states) - is_killed
        # By number, so that a continued search draws what an uninterrupted one does.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=self.seed + number, n_startup_trials=STARTUP, multivariate=False
        )
        if number == 0 and not states:
            own = own_values(self.recipe, self.space)
            fixed = {name: own[name] for name, tried in self.space.items() if own[name] in tried}
            self.study.enqueue_trial(fixed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if is_killed:
                trial = optuna.trial.Trial(self.study, self.study.trials[-1]._trial_id)
            else:
                trial = self.study.ask()
            values = self._values(trial)
            recipe = with_values(self.recipe, values, modules=self.modules)
            self._measure(trial, values, recipe, elapsed, latest, begun)

    def _values(self, trial: optuna.Trial) -> Values:
        """Return the settings of a trial; the first is the recipe, inside its space or not."""
        own = own_values(self.recipe, self.space)
        values = {}
        for name, tried in self.space.items():
            is_outside = trial.number == 0 and own[name] not in tried
            values[name] = own[name] if is_outside else tried.suggest(trial, name)
        if trial.number == 0:
            values = own
        return values

    def _measure(
        self,
        trial: optuna.Trial,
        values: Values,
        recipe: Recipe,
        elapsed: Callable[[], float],
        latest: float,
        begun: float,
    ) -> None:
        """Train with the settings of a trial, and tell the study."""
        states = self.optuna.trial.TrialState

        def stops(number: int, score: float) -> bool:
            trial.report(score, number)
            if elapsed() > latest and trial.number:
                return True
            return bool(trial.number) and trial.should_prune()

        trial.set_user_attr("values", values)
        try:
            steps = self.bench.steps(recipe)
            self.study.set_user_attr("speeds", self.bench.speeds)
            trial.set_user_attr("steps", steps)
            result = self.bench.run(recipe, steps, stops)
        except Exception as error:
            # The recipe itself has to work; a trial may be out of reach, such as a rate too high.
            if trial.number == 0 or not is_out_of_reach(error):
                raise
            logger.info("Trial %d failed: %s", trial.number, " ".join(str(error).split())[:200])
            trial.set_user_attr("failed", True)
            trial.set_user_attr("seconds", time.perf_counter() - begun)
            trial.report(0.0, 1)
            self.study.tell(trial, state=states.PRUNED)
            return
        trial.set_user_attr("scores", [round(score, 6) for score in result.scores.tolist()])
        trial.set_user_attr("seconds", time.perf_counter() - begun)
        score = chosen_by(result.scores)
        if result.stopped:
            self.study.tell(trial, state=states.PRUNED)
        else:
            self.study.tell(trial, score)

    def tried(self) -> list[Tried]:
        """Return the finished trials, in order."""
        running = self.optuna.trial.TrialState.RUNNING
        pruned = self.optuna.trial.TrialState.PRUNED
        found = []
        for each in self.study.get_trials(deepcopy=False):
            if each.state in (running, self.optuna.trial.TrialState.WAITING):
                continue
            own: Mapping[str, Any] = each.user_attrs
            state = "failed" if own.get("failed") else "stopped"
            scores = np.array(own["scores"]) if "scores" in own else None
            found.append(
                Tried(
                    each.number,
                    own["values"],
                    state if each.state == pruned else "",
                    own.get("steps"),
                    own["seconds"],
                    scores,
                )
            )
        return found

    def finish(self) -> TuneResult:
        """Compare the trials with the first, and write best.yaml and the results."""
        tried = self.tried()
        verdict = judge(tried, self.bench.evaluator.primary)
        chosen = tried[verdict.take]
        best = with_values(self.recipe, chosen.values, modules=self.modules)
        with atomic_path(self.folder / BEST) as part:
            part.write_text(dump_recipe(best.settings), encoding="utf-8")
        table = tuning_table(tried, self.bench.evaluator.primary)
        facts = {
            "recipe": self.recipe.source,
            "held-out data": " ".join(filter(None, self.bench.evaluator.data)),
            "seconds of a trial, by the clock": round(self.bench.seconds, 1),
            "settings to try": "; ".join(f"{name}={own}" for name, own in self.space.items()),
        }
        write_tuning(self.folder, tried, verdict, table, facts)
        return TuneResult(
            self.folder,
            self.folder / BEST,
            chosen.values,
            verdict,
            tried,
            table,
            self.folder / PAGE,
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _clock(seconds: float) -> str:
    return str(tqdm.format_interval(max(seconds, 0)))
