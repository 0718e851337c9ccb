"Fine-tuning: the gradients, the data, and what a run leaves behind"
import hashlib
import json

import numpy as np
import pytest

from synth_lab import train as T
from synth_lab.policies import features, imagine, init_weights, load_policy, logits
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


@pytest.mark.parametrize('call,said', [
    (lambda m, d: T.sft(m/'nope.jsonl', m), 'nope.jsonl cannot be read'),
    (lambda m, d: T.sft(d, m, epochs=0), 'epochs must be above 0'),
    (lambda m, d: T.sft(d, m, val_split=1.), 'val_split must be from 0 to below 1'),
    (lambda m, d: T.sft(d, m, base='random'), 'has no weights'),
    (lambda m, d: T.sft(d, m, epochs=1, lr=1e30), 'no longer finite')])
def test_what_cannot_work_is_refused(lab, call, said):
    with np.errstate(all='ignore'), pytest.raises(T.TrainError, match=said): call(*lab[:2])
