"RL on actors of Ray: the same weights whoever plays, also when an actor dies in the middle of a part"
import builtins
import os
import signal

import numpy as np
import pytest

from synth_lab import actors as A
from synth_lab import rl as R
from synth_lab.cluster import ClusterError
from synth_lab.lockstep import play
from synth_lab.policies import init_weights, load_policy
from synth_lab.train import TrainError

TINY = dict(seeds=range(5), length=40, worlds=6, iterations=3, recipe=R.Recipe(warmup=1))


def same(a, b): return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


def weights(trained, models): return load_policy(trained.model, models).weights


@pytest.mark.parametrize('worlds,parts,sizes', [(6, 2, [3, 3]), (7, 3, [3, 2, 2]), (2, 5, [1, 1]), (4, 1, [4])])
def test_every_world_is_in_one_part(worlds, parts, sizes):
    jobs = A.cut(np.arange(worlds), parts, np.random.default_rng(0))
    assert [len(s) for s, _ in jobs] == sizes and np.concatenate([s for s, _ in jobs]).tolist() == list(range(worlds))
    assert len({seed for _, seed in jobs}) == len(jobs)


def test_joined_parts_are_the_parts_side_by_side():
    w, sampler = init_weights(16), A.Parts(3)
    r = sampler.play(w, [1, 1, 2, 4, 5], 30, np.random.default_rng(3))
    jobs, at = A.cut([1, 1, 2, 4, 5], 3, np.random.default_rng(3)), 0
    for seeds, seed in jobs:
        alone = play(w, seeds, 30, np.random.default_rng(seed))
        for k, v in vars(alone).items(): assert (getattr(r, k)[:, at:at+len(seeds)] == v).all(), k
        at += len(seeds)
    assert at == 5 and sampler.cpu_seconds > 0


def test_a_training_in_parts_repeats_itself_and_goes_on(tmp_path):
    def stop(row):
        if row['iteration'] == 2: raise KeyboardInterrupt
    whole = R.rl('student', tmp_path, sampler=A.Parts(2), job='whole', **TINY)
    with pytest.raises(KeyboardInterrupt): R.rl('student', tmp_path, sampler=A.Parts(2), job='halved', state=tmp_path/'state', on_update=stop, **TINY)
    with pytest.raises(TrainError, match='sampler'): R.rl('student', tmp_path, sampler=A.Parts(3), job='halved', state=tmp_path/'state', **TINY)
    rest = R.rl('student', tmp_path, sampler=A.Parts(2), job='halved', state=tmp_path/'state', **TINY)
    assert rest.curves == whole.curves and same(weights(rest, tmp_path), weights(whole, tmp_path))
    assert not same(weights(R.rl('student', tmp_path, sampler=A.Parts(3), **TINY), tmp_path), weights(whole, tmp_path))


def test_a_budget_counts_what_the_parts_took_and_not_the_worlds(tmp_path, monkeypatch):
    class Far(A.Parts):
        "Plays for an hour, somewhere else"
        def played(self, *job): return [(r, 3600.) for r, _ in super().played(*job)]
    how = {k: v for k, v in TINY.items() if k != 'iterations'}
    assert len(R.rl('student', tmp_path, sampler=Far(2), cpu_seconds=3*7200, **how).curves) == 3


def test_groups_are_cut_without_being_told_apart(tmp_path):
    recipe = R.Recipe(advantage='group', group_size=4)
    run = R.rl('student', tmp_path, seeds=range(3), length=20, worlds=12, iterations=1, sampler=A.Parts(5), recipe=recipe)
    assert run.curves[0]['groups'] == 3


@pytest.mark.parametrize('wrong,said', [(lambda: A.Parts(0), 'parts is 0'), (lambda: A.Actors(2, actors=0), 'actors is 0')])
def test_no_parts_are_refused(wrong, said):
    with pytest.raises(TrainError, match=said): wrong()


def test_nobody_judges_in_parts(tmp_path):
    with pytest.raises(TrainError, match='asks for scores of a judge'):
        R.rl('student', tmp_path, sampler=A.Parts(2), **TINY | dict(recipe=R.Recipe(blend=dict(outcome=1))))


def test_without_ray_it_says_what_to_install(monkeypatch):
    real = builtins.__import__
    def refuse(name, *rest, **more):
        if name == 'ray': raise ImportError(name)
        return real(name, *rest, **more)
    monkeypatch.setattr(builtins, '__import__', refuse)
    with pytest.raises(ClusterError, match=r'synth-lab\[ray\]'): A.Actors(1).play(init_weights(16), [1], 5, np.random.default_rng(0))


@pytest.fixture(scope='module')
def ray():
    pytest.importorskip('ray')
    ray = A.connect(cores=2)
    yield ray
    ray.shutdown()


def dying(folder, how_often):
    "A `PartPlayer` that is killed in the middle of a part, so many times"
    class Dying(A.PartPlayer):
        def play(self, *part):
            played = super().play(*part)
            for k in range(how_often):
                if not (mark := folder/str(k)).exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            return played
    return Dying


def test_a_killed_actors_part_is_played_again_with_the_same_result(ray, tmp_path, monkeypatch):
    whole = R.rl('student', tmp_path, sampler=A.Parts(3), job='whole', **TINY)
    (tmp_path/'deaths').mkdir()
    monkeypatch.setattr(A, 'PartPlayer', dying(tmp_path/'deaths', 2))
    run = R.rl('student', tmp_path, sampler=A.Actors(3, actors=2), job='killed', **TINY)
    assert len(list((tmp_path/'deaths').iterdir())) == 2
    assert run.curves == whole.curves and same(weights(run, tmp_path), weights(whole, tmp_path))


def test_a_part_that_kills_every_actor_is_given_up(ray, tmp_path, monkeypatch):
    monkeypatch.setattr(A, 'PartPlayer', dying(tmp_path, 99))
    monkeypatch.setattr(A, 'RETRIES', 1)
    with pytest.raises(TrainError, match='2 actors in a row'): A.Actors(1).play(init_weights(16), [1], 5, np.random.default_rng(0))


def test_what_goes_wrong_in_an_actor_is_told(ray):
    with pytest.raises(KeyError, match='W1'): A.Actors(1).play(dict(W2=np.zeros(3)), [1], 5, np.random.default_rng(0))
