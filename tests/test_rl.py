"RL: the advantages, the rewards, the loss, what a run leaves behind, and where it goes on after a stop"
import json
import os
import random
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open

from synth_lab import rl as R
from synth_lab.client import AsyncInferenceClient
from synth_lab.judges import LocalJudge
from synth_lab.labels import Store
from synth_lab.lockstep import Rollouts, play
from synth_lab.policies import init_weights, list_models, load_policy, log_softmax, logits, save_checkpoint
from synth_lab.serve import create_app, serving_process
from synth_lab.train import TrainError, backward, forward, sft
from synth_lab.world import ACHIEVEMENTS
from test_train import check, lab, net  # noqa: F401


def test_gradient_of_the_whole_loss():
    "Clip, entropy and examples at once, against central differences; the steps use nine of the twelve inputs"
    rng, w, used = np.random.default_rng(0), net(17), np.delete(np.arange(12), [0, 5, 6])
    x, action, advantage, y = np.zeros((200, 12)), rng.integers(17, size=200), rng.normal(size=200), rng.integers(17, size=60)
    x[:, used], more = rng.normal(size=(200, 9)), rng.normal(size=(60, 12))
    old = log_softmax(logits(w, x))[np.arange(200), action] + rng.normal(0, .3, 200)
    said, grads = R.objective(w, x[:, used], used, action, old, advantage, (more, y), .2, .05, .3)
    assert .1 < said['clip_share'] < .9  # both sides of the clip are met
    check(lambda: R.objective(w, x, slice(None), action, old, advantage, (more, y), .2, .05, .3)[0]['loss'], grads, w)
    alone, _ = R.objective(w, x, slice(None), action, old, advantage, None, .2, .05, 0)
    assert np.isclose(said['loss'], alone['loss'] + .3*said['bc_loss']) and alone['bc_loss'] is None


def test_gradient_of_the_critic():
    rng, w = np.random.default_rng(0), net(1)
    x, target = rng.normal(size=(20, 12)), rng.normal(size=20)
    h, v = forward(w, x)
    check(lambda: .5*((logits(w, x)[:, 0]-target)**2).mean(), backward(w, x, h, (v[:, 0]-target)[:, None]/20), w)


def test_ppo_at_the_old_policy_is_the_policy_gradient():
    rng = np.random.default_rng(0)
    z, action, advantage = rng.normal(size=(30, 17)), rng.integers(17, size=30), rng.normal(size=30)
    loss, d, kl, held = R.ppo(z, action, log_softmax(z)[np.arange(30), action], advantage, .2, 0)
    want = -(np.eye(17)[action]-np.exp(log_softmax(z)))*advantage[:, None]/30
    assert np.allclose(d, want) and abs(kl) < 1e-12 and held == 0 and np.isclose(loss, -advantage.mean())


def test_gae_is_the_sum_of_discounted_surprises():
    rng, gamma, lam = np.random.default_rng(0), .97, .8
    reward, value = rng.random((30, 5)), rng.random((30, 5))
    ends = [30, 1, 7, 29, 15]
    alive = np.arange(30)[:, None] < ends
    got = R.gae(reward*alive, value, alive, gamma, lam)
    for b, end in enumerate(ends):
        v = [*value[:end, b], 0]
        delta = [reward[t, b] + gamma*v[t+1] - v[t] for t in range(end)]
        want = [sum((gamma*lam)**(k-t)*delta[k] for k in range(t, end)) for t in range(end)]
        assert np.allclose(got[:end, b], want) and not got[end:, b].any()


def test_warm_up_trains_only_the_critic():
    rng = np.random.default_rng(0)
    learner = R.Learner(init_weights(16), R.Recipe(), None, rng)
    games, critic = play(learner.weights, [1, 2], 40, rng), {k: v.copy() for k, v in learner.critic.items()}
    said = learner.update(games, games.reward, 0, warmup=True)
    assert all((learner.weights[k] == v).all() for k, v in init_weights(16).items()) and said['loss'] is None
    assert any((learner.critic[k] != v).any() for k, v in critic.items())


def groups(reward, ends):
    alive = np.arange(len(reward))[:, None] < ends
    return reward*alive, alive


def test_a_group_is_compared_step_by_step():
    rng, gamma = np.random.default_rng(0), .9
    reward, alive = groups(rng.random((12, 8)), [12, 3, 12, 7, 12, 12, 1, 12])
    got, says = R.group_advantage(reward, alive, 4, gamma)
    for b in range(8):
        togo = lambda t, i: sum(gamma**(k-t)*reward[k, i] for k in range(t, 12))
        for t in range(12):
            mean = np.mean([togo(t, i) for i in range(b//4*4, b//4*4+4)])  # the dead get nothing more
            assert np.isclose(got[t, b], (togo(t, b)-mean)*alive[t, b])
    assert says.tolist() == [True, True]


def test_an_episode_has_one_number():
    reward, alive = groups(np.array([[1., 0, 0, 0, 1, 1], [0, 2, 0, 0, 0, 0]]), [2, 2, 1, 2, 1, 2])
    got, says = R.episode_advantage(reward, alive, 3)
    spread = np.std([1, 2, 0])
    assert np.allclose(got[:, :3], [[0, 1/spread, -1/spread], [0, 1/spread, 0]]) and says.tolist() == [True, True]
    same, says = R.episode_advantage(np.ones((2, 4)), np.ones((2, 4), bool), 2)
    assert not same.any() and says.tolist() == [False, False]


def turns(*rows):
    "Counts of one episode: a dict of achievements for each turn"
    counts = np.zeros((len(rows), 1, 22), int)
    for t, row in enumerate(rows):
        for k, n in row.items(): counts[t, 0, ACHIEVEMENTS.index(k)] = n
    return counts


@pytest.mark.parametrize('how,want', [
    (dict(), [1, 0, 1, 1]),
    (dict(indicator_lambda=.25), [.25, 0, .25, .25]),
    (dict(indicator_lambda=0), [1, 0, 1, 1]),
    (dict(strategy='per_achievement'), [1, 0, 2, 0]),
    (dict(strategy='per_achievement', weights=dict(collect_wood=.5, place_table=3)), [.5, 0, 4, 0]),
    (dict(strategy='per_achievement', k_limits=dict(collect_wood=3)), [2, 0, 3, 0]),
    (dict(strategy='per_achievement', k_limits=dict(collect_wood=0)), [2, 0, 3, 1]),
    (dict(strategy='per_achievement', k_limits=dict(collect_wood=-1), weights=dict(collect_wood=.1, collect_drink=0)), [.2, 0, 1.1, .1])])
def test_turns_are_paid_by_the_step_rewards(how, want):
    counts = turns(dict(collect_wood=2), {}, dict(collect_wood=1, place_table=1, collect_drink=1), dict(collect_wood=1))
    assert np.allclose(R.step_rewards(counts, **how)[:, 0], want)


def test_absolute_counts_each_time_and_unique_the_first(lab):
    seeds = [3, 4, 5]
    r = play(load_policy(lab[2].model, lab[0]).weights, seeds, 120, np.random.default_rng(0))
    done = R.done(seeds, r.action, r.alive)
    assert (done & (done.cumsum(0) == 1) == r.unlocked).all() and done.sum() > r.unlocked.sum() + 5
    unlimited = dict(strategy='per_achievement', k_limits=dict.fromkeys(ACHIEVEMENTS, 0))
    absolute, unique = (R.pay(r, R.Recipe(reward='turn', step_rewards=unlimited | dict(mode=m)), seeds) for m in ('absolute', 'unique'))
    assert (absolute == done.sum(-1)).all() and (unique == r.reward).all()
    assert (R.pay(r, R.Recipe(reward='turn'), seeds) == r.unlocked.any(-1)).all()
    assert (R.pay(r, R.Recipe(reward='env', blend=dict(env=2)), seeds) == 2*r.env).all() and (R.pay(r, R.Recipe(), seeds) == r.reward).all()


def judged():
    "Two episodes of three steps, the second dead after two: turns of 2 + 1 and of 1 + 1 steps"
    r = R.Judged.blank(3, 2)
    r.alive[:] = [[1, 1], [1, 1], [1, 0]]
    r.ends[:] = [[0, 1], [1, 1], [1, 0]]
    wood, drink = (ACHIEVEMENTS.index(o) for o in ('collect_wood', 'collect_drink'))
    r.unlocked[0, 0, wood] = r.unlocked[1, 0, drink] = r.unlocked[1, 1, wood] = True
    r.reward[:], r.event[:], r.outcome[:] = r.unlocked.sum(-1), [[0, 1], [2, 0], [3, 0]], [10, 20]
    return r


@pytest.mark.parametrize('recipe,want', [
    (dict(), [[1, 0], [1, 1], [0, 0]]),
    (dict(reward='turn'), [[0, 0], [1, 1], [0, 0]]),
    (dict(reward='turn', step_rewards=dict(strategy='per_achievement')), [[0, 0], [2, 1], [0, 0]]),
    (dict(blend=dict(event=.5)), [[0, .5], [1, 0], [1.5, 0]]),
    (dict(blend=dict(env=1, outcome=.1)), [[1, 0], [1, 3], [1, 0]]),
    (dict(blend=dict(env=2, event=1, outcome=1)), [[2, 1], [4, 22], [13, 0]])])
def test_judges_are_blended_where_they_belong(recipe, want): assert np.allclose(R.pay(judged(), R.Recipe(**recipe), [1, 2]), want)


@pytest.mark.parametrize('wrong,said', [
    (dict(advantage='critic'), 'there is `gae`, `group`, `episode`'), (dict(reward='achievement'), 'did you mean `achievements`'),
    (dict(reward='turn', step_rewards=dict(stratgy='consistent')), 'did you mean `strategy`'),
    (dict(reward='turn', step_rewards=dict(mode='uniqe')), 'did you mean `unique`'),
    (dict(reward='turn', step_rewards=dict(k_limits=dict(collect_stones=1))), 'did you mean `collect_stone`'),
    (dict(step_rewards=dict(mode='unique')), "set reward='turn'"), (dict(blend=dict(outcom=1)), 'did you mean `outcome`'),
    (dict(blend=dict(env=-1)), '0 or more'), (dict(blend=dict(env=0, event=0)), 'one of them above 0'), (dict(group_size=1), 'at least 2')])
def test_a_recipe_that_cannot_be_meant_is_refused(wrong, said):
    with pytest.raises(TrainError, match=said): R.Recipe(**wrong)


@pytest.mark.parametrize('advantage', ['gae', 'group'])
def test_an_update_makes_better_actions_likelier(advantage):
    "A made-up game: action 5 pays, all others do not"
    rng = np.random.default_rng(0)
    learner = R.Learner(init_weights(16), R.Recipe(advantage=advantage, warmup=0, kl_stop=1, entropy=(0, 0)), None, rng)
    x = rng.random((20, 32, 528)).astype(np.float32)
    for _ in range(15):
        lp = log_softmax(logits(learner.weights, x))
        action = (lp + rng.gumbel(size=lp.shape)).argmax(-1)
        logprob = np.take_along_axis(lp, action[..., None], -1)[..., 0]
        paid = (action == 5).astype(np.float32)
        r = Rollouts(**vars(Rollouts.blank(20, 32)) | dict(x=x, action=action, logprob=logprob, reward=paid, alive=np.ones(action.shape, bool)))
        said = learner.update(r, paid, 0, False)
    assert np.exp(log_softmax(logits(learner.weights, x)))[..., 5].mean() > .25
    assert learner.drift(x.reshape(-1, 528))['kl'] > .2
    assert said.get('groups') == (4 if advantage == 'group' else None) and (said['value_loss'] is None) == (advantage == 'group')


def test_the_student_rests_once_it_moved_too_far():
    rng, moved = np.random.default_rng(0), {}
    for kl_stop in (1e-9, 9):
        learner = R.Learner(init_weights(16), R.Recipe(warmup=0, kl_stop=kl_stop, batch=32), None, rng)
        games = play(learner.weights, [1, 2], 40, np.random.default_rng(0))
        games.reward[5] = 1
        learner.update(games, games.reward, 0, False)
        moved[kl_stop] = learner.adam.n, learner.critic_adam.n
    assert moved == {1e-9: (2, 6), 9: (6, 6)}


TINY = dict(seeds=range(4), length=50, worlds=4, iterations=3, recipe=R.Recipe(warmup=1))


def test_rl_repeats_itself_and_keeps_its_curves(lab):
    models, dataset, tuned = lab
    seen = []
    a, b = (R.rl(tuned.model, models, dataset=dataset, on_update=seen.append, **TINY) for _ in range(2))
    assert a.model == b.model and a.curves == b.curves == seen[:3] == seen[3:]
    assert [o['iteration'] for o in a.curves] == [1, 2, 3] and a.curves[0]['loss'] is None
    assert a.curves[0]['kl'] == 0 < a.curves[2]['kl'] and all(0 < o['entropy'] < np.log(17) for o in a.curves)
    config = load_policy(a.model, models).config
    assert (config['parent'], config['base'], config['recipe']['gamma'], config['seeds']) == (tuned.model, 'student', .99, [0, 1, 2, 3])
    assert a.model.startswith('rl:student:job_') and a.model in {o['id'] for o in list_models(models)}
    assert R.rl(tuned.model, models, dataset=dataset, seed=1, **TINY).model != a.model


def test_rl_stops_when_its_cpu_time_is_spent(lab):
    run = R.rl(lab[2].model, lab[0], cpu_seconds=.4, **{k: v for k, v in TINY.items() if k != 'iterations'})
    assert .4 <= run.metrics['cpu_seconds'] < 3 and len(run.curves) >= 1


def test_an_interrupted_run_writes_nothing_and_says_so(lab, tmp_path):
    def stop(row):
        if row['iteration'] == 2: raise KeyboardInterrupt
    sft(lab[1], tmp_path, epochs=1)
    before = list_models(tmp_path)
    with pytest.raises(KeyboardInterrupt) as e: R.rl('student', tmp_path, on_update=stop, **TINY)
    assert e.value.__notes__ == ['RL was interrupted after 2 iterations: no checkpoint was written'] and list_models(tmp_path) == before


def test_a_checkpoint_each_so_many_iterations(lab):
    models, dataset, tuned = lab
    run = R.rl(tuned.model, models, dataset=dataset, job='mine', checkpoint_every=2, extra=dict(promoted=False), **TINY)
    assert run.model == 'rl:student:job_mine' and load_policy(run.model, models).config['promoted'] is False
    half = load_policy('rl:student:job_mine:checkpoint-epoch-2', models)
    assert half.config['metrics'] == run.curves[1] and half.config['curves'] == run.curves[:2] and half.config['parent'] == tuned.model
    assert [o['id'] for o in list_models(models) if 'job_mine' in o['id']] == ['rl:student:job_mine:checkpoint-epoch-2', 'rl:student:job_mine']


def test_groups_that_say_nothing_are_counted(lab):
    run = R.rl(lab[2].model, lab[0], seeds=range(4), length=3, worlds=8, iterations=1, recipe=R.Recipe(advantage='episode', group_size=2))
    assert run.curves[0]['groups'] == 4 and run.curves[0]['zero_variance'] == 1 and run.curves[0]['score'] == 0


def same(a, b): return all((a[k] == b[k]).all() for k in a)


KILLED = """
import json, sys
from synth_lab import rl as R
how = json.loads(sys.argv[1])
R.rl(how.pop('start'), how.pop('models'), recipe=R.Recipe(**how.pop('recipe')), on_update=lambda row: print(row['iteration'], flush=True), **how)
"""


def test_what_was_killed_goes_on_bit_for_bit(lab, tmp_path):
    models, dataset, tuned = lab
    how = dict(seeds=list(range(4)), length=40, worlds=4, iterations=8, dataset=str(dataset))
    whole = R.rl(tuned.model, models, recipe=R.Recipe(warmup=1), job='whole', **how)
    asked = how | dict(start=tuned.model, models=str(models), recipe=dict(warmup=1), state=str(tmp_path/'state'), job='killed')
    command, env = [sys.executable, '-c', KILLED, json.dumps(asked)], os.environ | dict(OPENBLAS_NUM_THREADS='1')
    last = random.randrange(2, 7)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        for line in child.stdout:
            if int(line) == last: break
        child.kill()
    assert (tmp_path/'state').exists() and not any('killed' in o['id'] for o in list_models(models))
    seen = []
    rest = R.rl(tuned.model, models, recipe=R.Recipe(warmup=1), state=tmp_path/'state', job='killed', on_update=seen.append, **how)
    assert same(load_policy(rest.model, models).weights, load_policy(whole.model, models).weights) and rest.curves == whole.curves
    assert 0 < len(seen) < 8 and not (tmp_path/'state').exists()


def stop_at(n):
    def stop(row):
        if row['iteration'] == n: raise KeyboardInterrupt
    return stop


def test_groups_go_on_after_a_stop(lab, tmp_path):
    how = dict(seeds=range(4), length=30, worlds=4, iterations=4, recipe=R.Recipe(advantage='group', group_size=2, reward='turn'))
    whole = R.rl(lab[2].model, lab[0], **how)
    with pytest.raises(KeyboardInterrupt): R.rl(lab[2].model, lab[0], state=tmp_path, on_update=stop_at(3), **how)
    assert json.loads(safe_open(tmp_path/'state.safetensors', 'numpy').metadata()['said'])['curves'] == whole.curves[:2]
    rest = R.rl(lab[2].model, lab[0], state=tmp_path, **how)
    assert rest.model == whole.model and rest.curves == whole.curves


def test_the_state_of_another_call_is_refused_by_name(lab, tmp_path):
    with pytest.raises(KeyboardInterrupt) as e: R.rl(lab[2].model, lab[0], state=tmp_path, on_update=stop_at(2), **TINY)
    assert 'the same call goes on from' in e.value.__notes__[0]
    with pytest.raises(TrainError, match='another call: seed was 0, is 1'): R.rl(lab[2].model, lab[0], state=tmp_path, seed=1, **TINY)
    other = TINY | dict(recipe=R.Recipe(warmup=1, lam=.9))
    said = 'parent was .*, is .student.*; recipe.lam was 0.8, is 0.9; weights was'
    with pytest.raises(TrainError, match=said): R.rl('student', lab[0], state=tmp_path, **other)
    assert len(R.rl(lab[2].model, lab[0], state=tmp_path, **TINY).curves) == 3


def test_cpu_seconds_before_a_stop_count(lab, tmp_path):
    how = {k: v for k, v in TINY.items() if k != 'iterations'} | dict(cpu_seconds=.6, state=tmp_path)
    with pytest.raises(KeyboardInterrupt): R.rl(lab[2].model, lab[0], on_update=stop_at(3), **how)
    before = json.loads(safe_open(tmp_path/'state.safetensors', 'numpy').metadata()['said'])['spent']
    run = R.rl(lab[2].model, lab[0], **how)
    assert before > .02 and .6 <= run.metrics['cpu_seconds'] < 3 and [o['iteration'] for o in run.curves] == [*range(1, len(run.curves)+1)]


@pytest.fixture
def at_hand(lab, tmp_path):
    "A client of an app that serves the models, and where the traces go"
    return Store(tmp_path/'lab'), AsyncInferenceClient(app=create_app(lab[0]))


def test_traces_give_back_what_the_student_saw_and_did(lab, at_hand):
    models, store = lab[0], at_hand[0]
    weights, seeds = load_policy(lab[2].model, models).weights, [3, 3, 5, 5]
    r = R.Served(*at_hand).play(lab[2].model, weights, seeds, 60, 'a', 7)
    mine = np.take_along_axis(log_softmax(logits(weights, r.x)), r.action[..., None], -1)[..., 0]
    assert np.abs(mine-r.logprob)[r.alive].max() < 1e-5
    e = store.sql("SELECT * FROM episodes WHERE run_id = 'a' ORDER BY seed, sample")
    assert r.alive.sum(0).tolist() == e.steps.tolist() and r.scores.tolist() == e.n_achievements.tolist() and r.ends.sum(0).tolist() == e.turns.tolist()
    assert np.allclose(r.env.sum(0), e['return'].astype(float)) and e.turns.sum() < .6*e.steps.sum()  # calls of several actions
    assert (R.done(seeds, r.action, r.alive) & (R.done(seeds, r.action, r.alive).cumsum(0) == 1) == r.unlocked).all()
    last = r.alive.sum(0)-1
    assert r.ends[last, range(4)].all() and not (r.ends & ~r.alive).any()


def test_a_judge_counts_by_its_total_or_by_its_sum(lab, at_hand):
    store, rl = at_hand[0], R.Served(*at_hand)
    weights = load_policy(lab[2].model, lab[0]).weights
    rl.play(lab[2].model, weights, [3, 4], 20, 'c', 0)
    def given(source, at=({},), **values):
        rows = [dict(episode_id=f'c:{s}:0', name=k, value=v) | t for s in (3, 4) for k, v in values.items() for t in at]
        store.score(pd.DataFrame(rows), source=source)
    given('rubric', care=.5, speed=.25, rubric=.75)
    given('plain', a=1, b=2)
    given('turns', at=[dict(turn=1), dict(turn=2)], step=.5)
    r = R.read_run(store, 'c', ['c:4:0', 'c:3:0'], 20)
    assert r.outcome.tolist() == [.75+3]*2 and r.event.sum(0).tolist() == [1, 1] and ((r.event > 0) <= r.ends).all()


def test_a_judge_that_fails_stops_the_training_until_it_does_not(lab, at_hand, tmp_path):
    store, broken = at_hand[0], [True]
    def length(case):
        if broken and case['seed'] == 2: raise ZeroDivisionError
        return float(case['metrics']['num_steps'])
    how = TINY | dict(sampler=R.Served(*at_hand, LocalJudge(length)), recipe=R.Recipe(warmup=0, blend=dict(outcome=1.)), state=tmp_path/'state', iterations=1)
    with pytest.raises(TrainError, match='is not judged: <length: 3 episodes scored, 1 failed>'): R.rl(lab[2].model, lab[0], **how)
    broken.clear()
    run = R.rl(lab[2].model, lab[0], **how)
    assert run.curves[0]['return'] == store.sql('SELECT avg(steps) AS n FROM episodes').n[0] and len(store.sql('FROM runs')) == 1


def test_replies_of_other_weights_are_refused(lab, at_hand):
    with pytest.raises(TrainError, match='log-probabilities differ'): R.Served(*at_hand).play(lab[2].model, init_weights(128, 5), [3], 20, 'b', 0)


def few_moves(store, run_id):
    store.score(lambda call: -float(sum(a.startswith('move') for a in call['actions'])), name='moves', scope='turn', where=f"run_id = '{run_id}'")
    store.score(lambda e: e['steps']/10, name='long', where=f"run_id = '{run_id}'")


@pytest.mark.parametrize('recipe', [dict(warmup=1), dict(advantage='group', group_size=2, blend=dict(env=1, event=.1, outcome=.2))])
def test_rl_through_a_server(lab, at_hand, recipe):
    models, store = lab[0], at_hand[0]
    sampler = R.Served(*at_hand, few_moves if 'blend' in recipe else None)
    run = R.rl(lab[2].model, models, dataset=lab[1], sampler=sampler, **TINY | dict(iterations=2, recipe=R.Recipe(**recipe)))
    assert [o['iteration'] for o in run.curves] == [1, 2] and all(v is None or np.isfinite(v) for o in run.curves for v in o.values())
    assert store.sql("SELECT n_achievements FROM episodes").n_achievements.mean() == pytest.approx(np.mean([o['score'] for o in run.curves]))
    assert not any(o['id'].endswith(':sampler') for o in list_models(models))
    if 'blend' not in recipe: return
    e = store.sql("SELECT n_achievements + .2*steps/10 AS paid FROM episodes")
    moves = store.sql("SELECT sum(value) AS n FROM rewards WHERE name = 'moves'").n[0]
    assert np.mean([o['return'] for o in run.curves]) == pytest.approx((e.paid.sum() + .1*moves)/len(e), abs=1e-4)


def test_rl_over_loopback_goes_on_after_a_judge_that_broke(lab, tmp_path):
    "The weights change each iteration behind one model id, in another process; the run that was played is not played again"
    models, store, calls = lab[0], Store(tmp_path/'lab'), []
    def judge(store, run_id):
        calls.append(run_id)
        if len(calls) == 2: raise ConnectionError('the judge is away')
        few_moves(store, run_id)
    how = TINY | dict(recipe=R.Recipe(warmup=0, blend=dict(env=1, event=.1)))
    with serving_process('synth_lab.serve:create_app', dict(models=str(models))) as url:
        sampler = R.Served(store, AsyncInferenceClient(base_url=url), judge)
        with pytest.raises(ConnectionError): R.rl(lab[2].model, models, sampler=sampler, state=tmp_path/'state', **how)
        run = R.rl(lab[2].model, models, sampler=sampler, state=tmp_path/'state', **how)
    assert len(run.curves) == 3 and calls[1] == calls[2] and len(calls) == 4 and len(store.sql('FROM runs')) == 3
    assert run.curves[2]['kl'] > 0
    whole = R.rl(lab[2].model, models, sampler=R.Served(Store(tmp_path/'other'), AsyncInferenceClient(app=create_app(models)), judge), **how)
    assert same(load_policy(whole.model, models).weights, load_policy(run.model, models).weights)


@pytest.mark.parametrize('call,said', [
    (lambda m: R.rl('expert', m, iterations=1), '`expert` has no weights'),
    (lambda m: R.rl('student', m, seeds=[], iterations=1), 'no worlds to train in'),
    (lambda m: R.rl('student', m, seeds=5, iterations=1), 'such as seeds=range\\(5\\)'),
    (lambda m: R.rl('student', m, iterations=0), 'iterations must be above 0, not 0'),
    (lambda m: R.rl('student', m, cpu_seconds=0), 'cpu_seconds must be above 0'),
    (lambda m: R.rl('student', m, worlds=12, recipe=R.Recipe(advantage='group')), 'give worlds=8'),
    (lambda m: R.rl('student', m, recipe=R.Recipe(blend=dict(event=1))), 'sampler=Served'),
    (lambda m: R.rl('student', m, worlds=6, seeds=range(4), sampler=R.Served(None, None)), 'equally often'),
    (lambda m: R.rl('student', m, checkpoint_every=-1), 'checkpoint_every')])
def test_what_cannot_work_is_refused(lab, call, said):
    with pytest.raises(TrainError, match=said): call(lab[0])
