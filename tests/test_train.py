"Training: the gradients, the advantages, the data, and what a run leaves behind"
import hashlib
import json

import numpy as np
import pytest

from synth_lab import train as T
from synth_lab.policies import Student, features, imagine, init_weights, list_models, load_policy, log_softmax, logits
from synth_lab.view import effect, format, look
from synth_lab.world import ACTIONS, World


def row(obs, actions, **more):
    call = dict(id='c', type='function', function=dict(name='interact_many', arguments=json.dumps(dict(actions=list(actions)))))
    return dict(messages=[dict(role='system', content='play'), dict(role='user', content=format(obs)), dict(role='assistant', content='hm', tool_calls=[call])], **more)


def expert_rows(seed, length=150):
    world, last, rng, expert, rows = World(seed, length=length), (), np.random.default_rng(seed), load_policy('expert'), []
    while not world.done:
        obs = look(world, length, last)
        actions = expert.decide(obs, 8, rng=rng).actions
        rows.append(row(obs, actions))
        last = ()
        for action in actions:
            if world.done: break
            before = look(world, length)
            world.step(ACTIONS.index(action))
            last += ((action, effect(before, action, look(world, length))),)
    return rows


def write(path, rows):
    path.write_text('\n'.join(o if isinstance(o, str) else json.dumps(o) for o in rows))
    return path


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    "A folder with a dataset of ten episodes, and a student that was fine-tuned on it"
    folder = tmp_path_factory.mktemp('lab')
    dataset = write(folder/'expert.jsonl', [r for seed in range(10) for r in expert_rows(seed)])
    return folder/'models', dataset, T.sft(dataset, folder/'models', epochs=12)


def slopes(loss, weights, eps=1e-6):
    "Central differences of `loss` at ten entries of every weight"
    rng = np.random.default_rng(1)
    for name, w in weights.items():
        for i in rng.choice(w.size, min(10, w.size), replace=False):
            kept = w.flat[i]
            w.flat[i] = kept+eps; up = loss()
            w.flat[i] = kept-eps; down = loss()
            w.flat[i] = kept
            yield name, i, (up-down)/(2*eps)


def net(outputs, seed=0, scale=30):
    return {k: v.astype(float)*(scale if k == 'W2' else 1) for k, v in init_weights(7, seed, outputs, inputs=12).items()}


def check(loss, gradient, weights):
    worst = max(abs(gradient[name].flat[i]-slope) for name, i, slope in slopes(loss, weights))
    assert worst < 1e-6 and max(abs(g).max() for g in gradient.values()) > 1e-3


def test_gradient_of_the_cross_entropy():
    rng, w = np.random.default_rng(0), net(17)
    x, y = rng.normal(size=(20, 12)), rng.integers(17, size=20)
    h, z = T.forward(w, x)
    check(lambda: T.cross_entropy(logits(w, x), y)[0], T.backward(w, x, h, T.cross_entropy(z, y)[1]), w)


def test_gradient_of_ppo_with_its_clip_and_entropy():
    rng, w = np.random.default_rng(0), net(17)
    x, action, advantage = rng.normal(size=(200, 12)), rng.integers(17, size=200), rng.normal(size=200)
    h, z = T.forward(w, x)
    old = log_softmax(z)[np.arange(200), action] + rng.normal(0, .3, 200)
    loss, d, _ = T.ppo(z, action, old, advantage, clip=.2, entropy=.05)
    ratio = np.exp(log_softmax(z)[np.arange(200), action]-old)
    assert .2 < (abs(ratio-1) > .2).mean() < .9  # both sides of the clip are met
    check(lambda: T.ppo(logits(w, x), action, old, advantage, .2, .05)[0], T.backward(w, x, h, d), w)


def test_gradient_of_the_critic():
    rng, w = np.random.default_rng(0), net(1)
    x, target = rng.normal(size=(20, 12)), rng.normal(size=20)
    h, v = T.forward(w, x)
    check(lambda: .5*((logits(w, x)[:, 0]-target)**2).mean(), T.backward(w, x, h, (v[:, 0]-target)[:, None]/20), w)


def test_ppo_at_the_old_policy_is_the_policy_gradient():
    rng = np.random.default_rng(0)
    z, action, advantage = rng.normal(size=(30, 17)), rng.integers(17, size=30), rng.normal(size=30)
    loss, d, kl = T.ppo(z, action, log_softmax(z)[np.arange(30), action], advantage, .2, 0)
    want = -(np.eye(17)[action]-np.exp(log_softmax(z)))*advantage[:, None]/30
    assert np.allclose(d, want) and abs(kl) < 1e-12 and np.isclose(loss, -advantage.mean())


def test_gae_is_the_sum_of_discounted_surprises():
    rng, gamma, lam = np.random.default_rng(0), .97, .8
    reward, value = rng.random((30, 5)), rng.random((30, 5))
    ends = [30, 1, 7, 29, 15]
    alive = np.arange(30)[:, None] < ends
    got = T.gae(reward*alive, value, alive, gamma, lam)
    for b, end in enumerate(ends):
        v = [*value[:end, b], 0]
        delta = [reward[t, b] + gamma*v[t+1] - v[t] for t in range(end)]
        want = [sum((gamma*lam)**(k-t)*delta[k] for k in range(t, end)) for t in range(end)]
        assert np.allclose(got[:end, b], want) and not got[end:, b].any()


def test_adam_takes_the_step_of_the_paper_and_clips():
    w = dict(a=np.array([1., 2.]))
    adam, m, v, want = T.Adam(w, decay=.1), 0, 0, np.array([1., 2.])
    for n in range(1, 5):
        g = np.array([.5, -3.])*n
        m, v = .9*m+.1*g, .999*v+.001*g*g
        want = want - .01*(m/(1-.9**n)/(np.sqrt(v/(1-.999**n))+1e-8) + .1*want)
        adam.step(dict(a=g), .01)
    assert np.allclose(w['a'], want)
    clipped = T.Adam(dict(a=np.zeros(2)), clip=.5)
    clipped.step(dict(a=np.array([3., 4.])), .01)
    assert np.allclose(clipped.m['a'], [.1*.3, .1*.4])


def test_every_action_of_a_call_becomes_an_example(tmp_path):
    obs = look(World(7, length=200), 200)
    data = T.read_examples(write(tmp_path/'d.jsonl', [row(obs, ['move_left', 'move_up', 'noop'])]))
    chain = [obs, imagine(obs, 'move_left'), imagine(imagine(obs, 'move_left'), 'move_up')]
    assert [ACTIONS[i] for i in data.y] == ['move_left', 'move_up', 'noop'] and data.row.tolist() == [0, 0, 0]
    assert (data.x == features(chain)).all() and data.rejected == {}
    assert data.sha256 == hashlib.sha256((tmp_path/'d.jsonl').read_bytes()).hexdigest()


def test_what_gives_no_example_is_named_and_counted(tmp_path):
    obs = look(World(7, length=200), 200)
    good = row(obs, ['noop'])
    blind = dict(messages=[dict(role='user', content='hello'), good['messages'][-1]])
    mute = dict(messages=[*good['messages'][:2], dict(role='assistant', content='I wait')])
    open_end = dict(messages=good['messages'][:2])
    data = T.read_examples(write(tmp_path/'d.jsonl', [good, row(obs, ['do', 'noop', 'noop']), row(obs, ['fly']), blind, mute, open_end, '{"messages"', '[]']))
    assert data.rejected == {'actions behind an uncertain outcome': 2, 'rows whose call is invalid_action': 1, 'rows without an observation': 1,
        'rows whose call is no_call': 1, 'rows that do not end on an answer': 2, 'rows that are not JSON': 1}
    assert data.row.tolist() == [0, 1]
    with pytest.raises(T.TrainError, match="holds no example.*'rows without an observation': 1"): T.read_examples(write(tmp_path/'e.jsonl', [blind]))


def test_fine_tuning_learns_to_imitate(lab):
    models, dataset, tuned = lab
    first, last = tuned.curves[0], tuned.curves[-1]
    assert last['val_loss'] < first['val_loss'] - .3 and last['val_accuracy'] > .4
    data = T.read_examples(dataset)
    z = logits(load_policy(tuned.model, models).weights, data.x)
    assert (z.argmax(-1) == data.y).mean() > .5
    assert tuned.model.startswith('ft:student:job_') and tuned.folder.parent == models


def test_the_same_seed_gives_the_same_weights(lab):
    models, dataset, tuned = lab
    same, other = T.sft(dataset, models, epochs=12), T.sft(dataset, models, epochs=12, seed=1)
    assert same.model == tuned.model and same.curves == tuned.curves and other.model != tuned.model


def test_a_checkpoint_says_where_it_comes_from(lab):
    models, dataset, tuned = lab
    config = load_policy(tuned.model, models).config
    assert config['data_sha256'] == hashlib.sha256(dataset.read_bytes()).hexdigest()
    assert (config['parent'], config['base'], config['seed'], config['epochs']) == ('student', 'student', 0, 12)
    assert config['curves'] == tuned.curves
    more = T.sft(dataset, models, base=tuned.model, epochs=1, lr=1e-4)
    assert load_policy(more.model, models).config['parent'] == tuned.model and more.model.startswith('ft:student:job_')
    assert more.curves[0]['val_loss'] < tuned.curves[0]['val_loss']  # it went on from the tuned weights


def test_play_keeps_what_happened(lab):
    weights = load_policy(lab[2].model, lab[0]).weights
    games = T.play(weights, [3, 4, 3], 60, np.random.default_rng(0))
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
    again = T.play(weights, [3, 4, 3], 60, np.random.default_rng(0))
    assert (again.action == games.action).all() and (games.action[:, 0] != games.action[:, 2]).any()


def test_an_update_makes_better_actions_likelier():
    "A made-up game: action 5 pays, all others do not"
    rng = np.random.default_rng(0)
    learner = T.Learner(init_weights(16), T.Recipe(warmup=0, kl_stop=1, entropy=(0, 0)), None, rng)
    x = rng.random((20, 32, 528)).astype(np.float32)
    for _ in range(15):
        lp = log_softmax(logits(learner.weights, x))
        action = (lp + rng.gumbel(size=lp.shape)).argmax(-1)
        logprob = np.take_along_axis(lp, action[..., None], -1)[..., 0]
        learner.update(T.Rollouts(x, action, logprob, (action == 5).astype(np.float32), np.ones(action.shape, bool)), 0, False)
    assert np.exp(log_softmax(logits(learner.weights, x)))[..., 5].mean() > .3
    assert learner.drift(x.reshape(-1, 528))['kl'] > .3


def test_warm_up_trains_only_the_critic():
    rng = np.random.default_rng(0)
    learner = T.Learner(init_weights(16), T.Recipe(), None, rng)
    games, critic = T.play(learner.weights, [1, 2], 40, rng), {k: v.copy() for k, v in learner.critic.items()}
    said = learner.update(games, 0, warmup=True)
    assert all((learner.weights[k] == v).all() for k, v in init_weights(16).items()) and said['loss'] is None
    assert any((learner.critic[k] != v).any() for k, v in critic.items())


TINY = dict(seeds=range(4), length=50, worlds=4, iterations=3, recipe=T.Recipe(warmup=1))


def test_rl_repeats_itself_and_keeps_its_curves(lab):
    models, dataset, tuned = lab
    seen = []
    a, b = (T.rl(tuned.model, models, dataset=dataset, on_update=seen.append, **TINY) for _ in range(2))
    assert a.model == b.model and a.curves == b.curves == seen[:3] == seen[3:]
    assert [o['iteration'] for o in a.curves] == [1, 2, 3] and a.curves[0]['loss'] is None
    assert a.curves[0]['kl'] == 0 < a.curves[2]['kl'] and all(0 < o['entropy'] < np.log(17) for o in a.curves)
    config = load_policy(a.model, models).config
    assert (config['parent'], config['base'], config['recipe']['gamma'], config['seeds']) == (tuned.model, 'student', .99, [0, 1, 2, 3])
    assert a.model.startswith('rl:student:job_') and a.model in {o['id'] for o in list_models(models)}
    assert T.rl(tuned.model, models, dataset=dataset, seed=1, **TINY).model != a.model


def test_rl_stops_when_its_cpu_time_is_spent(lab):
    run = T.rl(lab[2].model, lab[0], cpu_seconds=.8, **{k: v for k, v in TINY.items() if k != 'iterations'})
    assert .8 <= run.metrics['cpu_seconds'] < 4 and len(run.curves) >= 1


def test_an_interrupted_run_writes_nothing_and_says_so(lab, tmp_path):
    def stop(row):
        if row['iteration'] == 2: raise KeyboardInterrupt
    T.sft(lab[1], tmp_path, epochs=1)
    before = list_models(tmp_path)
    with pytest.raises(KeyboardInterrupt) as e: T.rl('student', tmp_path, on_update=stop, **TINY)
    assert e.value.__notes__ == ['RL was interrupted after 2 iterations: no checkpoint was written'] and list_models(tmp_path) == before


@pytest.mark.parametrize('call,said', [
    (lambda m, d: T.rl('expert', m, iterations=1), '`expert` has no weights'),
    (lambda m, d: T.rl('student', m, seeds=[], iterations=1), 'no worlds to train in'),
    (lambda m, d: T.rl('student', m, seeds=5, iterations=1), 'such as seeds=range\\(5\\)'),
    (lambda m, d: T.sft(m/'nope.jsonl', m), 'nope.jsonl cannot be read'),
    (lambda m, d: T.rl('student', m, iterations=0), 'iterations must be above 0, not 0'),
    (lambda m, d: T.rl('student', m, cpu_seconds=0), 'cpu_seconds must be above 0'),
    (lambda m, d: T.sft(d, m, epochs=0), 'epochs must be above 0'),
    (lambda m, d: T.sft(d, m, val_split=1.), 'val_split must be from 0 to below 1'),
    (lambda m, d: T.sft(d, m, base='random'), 'has no weights'),
    (lambda m, d: T.sft(d, m, epochs=1, lr=1e30), 'no longer finite')])
def test_what_cannot_work_is_refused(lab, call, said):
    with np.errstate(all='ignore'), pytest.raises(T.TrainError, match=said): call(*lab[:2])
