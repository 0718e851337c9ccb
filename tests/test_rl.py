"RL: the advantages, the loss, and what a run leaves behind"
import numpy as np
import pytest

from synth_lab import rl as R
from synth_lab.policies import Student, features, init_weights, list_models, load_policy, log_softmax, logits
from synth_lab.train import TrainError, backward, forward, sft
from synth_lab.view import effect, look
from synth_lab.world import ACTIONS, World
from test_train import check, lab, net  # noqa: F401


def test_gradient_of_ppo_with_its_clip_and_entropy():
    rng, w = np.random.default_rng(0), net(17)
    x, action, advantage = rng.normal(size=(200, 12)), rng.integers(17, size=200), rng.normal(size=200)
    h, z = forward(w, x)
    old = log_softmax(z)[np.arange(200), action] + rng.normal(0, .3, 200)
    loss, d, _ = R.ppo(z, action, old, advantage, clip=.2, entropy=.05)
    ratio = np.exp(log_softmax(z)[np.arange(200), action]-old)
    assert .2 < (abs(ratio-1) > .2).mean() < .9  # both sides of the clip are met
    check(lambda: R.ppo(logits(w, x), action, old, advantage, .2, .05)[0], backward(w, x, h, d), w)


def test_gradient_of_the_critic():
    rng, w = np.random.default_rng(0), net(1)
    x, target = rng.normal(size=(20, 12)), rng.normal(size=20)
    h, v = forward(w, x)
    check(lambda: .5*((logits(w, x)[:, 0]-target)**2).mean(), backward(w, x, h, (v[:, 0]-target)[:, None]/20), w)


def test_ppo_at_the_old_policy_is_the_policy_gradient():
    rng = np.random.default_rng(0)
    z, action, advantage = rng.normal(size=(30, 17)), rng.integers(17, size=30), rng.normal(size=30)
    loss, d, kl = R.ppo(z, action, log_softmax(z)[np.arange(30), action], advantage, .2, 0)
    want = -(np.eye(17)[action]-np.exp(log_softmax(z)))*advantage[:, None]/30
    assert np.allclose(d, want) and abs(kl) < 1e-12 and np.isclose(loss, -advantage.mean())


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


def test_play_keeps_what_happened(lab):
    weights = load_policy(lab[2].model, lab[0]).weights
    games = R.play(weights, [3, 4, 3], 60, np.random.default_rng(0))
    for b, seed in enumerate([3, 4, 3]):
        world, last = World(seed, length=60), ()
        for t in range(int(games.alive[:, b].sum())):
            obs = look(world, 60, last)
            action = int(games.action[t, b])
            assert (games.x[t, b] == features([obs])[0]).all()
            assert np.isclose(games.logprob[t, b], Student(weights).logprobs([obs])[0, action], atol=1e-4)
            *_, info = world.step(action)
            assert games.reward[t, b] == len(info['unlocked'])
            last = ((ACTIONS[action], effect(obs, ACTIONS[action], look(world, 60))),)
        assert world.done and games.scores[b] == len(world.achievements)
        assert not games.alive[t+1:, b].any() and not games.x[t+1:, b].any()
    again = R.play(weights, [3, 4, 3], 60, np.random.default_rng(0))
    assert (again.action == games.action).all() and (games.action[:, 0] != games.action[:, 2]).any()


def test_an_update_makes_better_actions_likelier():
    "A made-up game: action 5 pays, all others do not"
    rng = np.random.default_rng(0)
    learner = R.Learner(init_weights(16), R.Recipe(warmup=0, kl_stop=1, entropy=(0, 0)), None, rng)
    x = rng.random((20, 32, 528)).astype(np.float32)
    for _ in range(15):
        lp = log_softmax(logits(learner.weights, x))
        action = (lp + rng.gumbel(size=lp.shape)).argmax(-1)
        logprob = np.take_along_axis(lp, action[..., None], -1)[..., 0]
        learner.update(R.Rollouts(x, action, logprob, (action == 5).astype(np.float32), np.ones(action.shape, bool)), 0, False)
    assert np.exp(log_softmax(logits(learner.weights, x)))[..., 5].mean() > .3
    assert learner.drift(x.reshape(-1, 528))['kl'] > .3


def test_warm_up_trains_only_the_critic():
    rng = np.random.default_rng(0)
    learner = R.Learner(init_weights(16), R.Recipe(), None, rng)
    games, critic = R.play(learner.weights, [1, 2], 40, rng), {k: v.copy() for k, v in learner.critic.items()}
    said = learner.update(games, 0, warmup=True)
    assert all((learner.weights[k] == v).all() for k, v in init_weights(16).items()) and said['loss'] is None
    assert any((learner.critic[k] != v).any() for k, v in critic.items())


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
    run = R.rl(lab[2].model, lab[0], cpu_seconds=.8, **{k: v for k, v in TINY.items() if k != 'iterations'})
    assert .8 <= run.metrics['cpu_seconds'] < 4 and len(run.curves) >= 1


def test_an_interrupted_run_writes_nothing_and_says_so(lab, tmp_path):
    def stop(row):
        if row['iteration'] == 2: raise KeyboardInterrupt
    sft(lab[1], tmp_path, epochs=1)
    before = list_models(tmp_path)
    with pytest.raises(KeyboardInterrupt) as e: R.rl('student', tmp_path, on_update=stop, **TINY)
    assert e.value.__notes__ == ['RL was interrupted after 2 iterations: no checkpoint was written'] and list_models(tmp_path) == before


@pytest.mark.parametrize('call,said', [
    (lambda m: R.rl('expert', m, iterations=1), '`expert` has no weights'),
    (lambda m: R.rl('student', m, seeds=[], iterations=1), 'no worlds to train in'),
    (lambda m: R.rl('student', m, seeds=5, iterations=1), 'such as seeds=range\\(5\\)'),
    (lambda m: R.rl('student', m, iterations=0), 'iterations must be above 0, not 0'),
    (lambda m: R.rl('student', m, cpu_seconds=0), 'cpu_seconds must be above 0')])
def test_what_cannot_work_is_refused(lab, call, said):
    with pytest.raises(TrainError, match=said): call(lab[0])
