"Fine-tuning: the gradients, the data, and what a run leaves behind"
import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from synth_lab import train as T
from synth_lab.policies import FEATURE_HASH, WIDTHS, features, imagine, init_weights, load_policy, logits
from synth_lab.rows import DIALECTS
from synth_lab.view import effect, format, look
from synth_lab.world import ACTIONS, World


def row(obs, actions, **more):
    call = dict(id='c', type='function', function=dict(name='interact_many', arguments=json.dumps(dict(actions=list(actions)))))
    said = dict(role='assistant', content='hm', tool_calls=[call])
    return dict(messages=[dict(role='system', content='play'), dict(role='user', content=format(obs)), said], **more)


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
    dataset = write(folder/'expert.jsonl', [r for seed in range(10) for r in expert_rows(seed, length=110)])
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


SIDES = ({'left': 'right', 'right': 'left'}, {'up': 'down', 'down': 'up'})


def seen_in_a_mirror(obs, side):
    "The observation, mirrored: view, facing, and the last action"
    swap, grid = SIDES[side], np.frombuffer(obs.grid, np.uint8).reshape(7, 9)
    last = tuple((f'move_{swap[a[5:]]}' if a.startswith('move_') and a[5:] in swap else a, e) for a, e in obs.last)
    return replace(obs, grid=(grid[:, ::-1] if side == 0 else grid[::-1]).tobytes(), facing=swap.get(obs.facing, obs.facing), last=last)


@pytest.mark.parametrize('side', [0, 1])
def test_mirrored_features_are_those_of_the_mirrored_view(side):
    "But for `sight`, which names one of several tiles that are equally near"
    world, rng, expert, obs, last = World(5), np.random.default_rng(0), load_policy('expert'), [], ()
    for _ in range(80):
        obs.append(look(world, 200, last))
        action = expert.decide(obs[-1], 1, rng=rng).actions[0] if rng.random() < .8 else ACTIONS[rng.integers(17)]
        world.step(ACTIONS.index(action))
        last = ((action, effect(obs[-1], action, look(world, 200))),)
    x, _, z = T._mirror(side, 528, 8, 17)
    there, here = features([seen_in_a_mirror(o, side) for o in obs]), features(obs)[:, x]
    ends = dict(zip(WIDTHS, np.cumsum(list(WIDTHS.values()))))
    sight = np.zeros(528, bool)
    sight[ends['sight']-WIDTHS['sight']:ends['sight']] = True
    assert (there[:, ~sight] == here[:, ~sight]).all() and (there[:, sight] == here[:, sight]).mean() > .9
    assert (features(obs)[:, ~sight] != here[:, ~sight]).any(0).sum() > 30  # there was something to mirror
    want = ['move_right', 'move_left', 'move_up', 'move_down'] if side == 0 else ['move_left', 'move_right', 'move_down', 'move_up']
    assert [ACTIONS[i] for i in z[1:5]] == want
    assert [i for i in range(17) if z[i] != i] == [1+2*side, 2+2*side] and all((o[o] == np.arange(len(o))).all() for o in T._mirror(side, 528, 8, 17))


@pytest.mark.parametrize('shape', [dict(hidden=16), dict(hidden=10), dict(hidden=8, outputs=1, inputs=530)])
def test_weights_stay_their_own_mirror_images(shape):
    w, rng = T.fresh(seed=1, **shape), np.random.default_rng(0)
    x, y = rng.random((50, len(w['W1']))).astype(np.float32), rng.integers(len(w['b2']), size=50)
    adam = T.Adam(w, decay=1e-2, clip=.5, mirror=True)
    for _ in range(5):
        h, z = T.forward(w, x)
        adam.step(T.backward(w, x, h, T.cross_entropy(z, y)[1] if len(w['b2']) > 1 else z-1), 1e-2)
    for side in (0, 1):
        image, (px, ph, pz) = T.mirrored(w, side), T._mirror(side, len(w['W1']), *w['W2'].shape)
        assert all((image[k] == w[k]).all() for k in w)
        assert np.allclose(logits(w, x[:, px]), logits(w, x)[:, pz], atol=1e-5)
        assert (shape['hidden'] == 10) == (ph[-1] == shape['hidden']-1)
    assert abs(w['W1'].std()/init_weights(**{k: v for k, v in shape.items()})['W1'].std() - 1) < .25


def test_a_symmetric_gradient_is_the_mean_over_mirrored_examples():
    w, rng = {k: v.astype(float) for k, v in T.fresh(8, seed=0).items()}, np.random.default_rng(0)
    x, y = rng.random((20, 528)), rng.integers(17, size=20)
    def gradient(x, y):
        h, z = T.forward(w, x)
        return T.backward(w, x, h, T.cross_entropy(z, y)[1])
    (a, _, b), (c, _, d) = (T._mirror(side, 528, 8, 17) for side in (0, 1))
    want = gradient(np.concatenate([x, x[:, a], x[:, c], x[:, a][:, c]]), np.concatenate([y, b[y], d[y], d[b[y]]]))
    got = T.symmetric(gradient(x, y))
    assert all(np.allclose(got[k], want[k], atol=1e-12) for k in w)


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
    context = dict(messages=[*good['messages'][:2], good['messages'][2] | dict(weight=0)])
    broken = ['{"messages"', '[]', dict(messages=3), dict(messages=[3]), '']
    rows = [good, row(obs, ['do', 'noop', 'noop']), row(obs, ['fly']), blind, mute, open_end, context, *broken]
    data = T.read_examples(write(tmp_path/'d.jsonl', [*rows, *[blind]*8]))
    want = {'actions behind an uncertain outcome': (2, [2]), 'answers whose call is invalid_action': (1, [3]),
        'answers without an observation': (9, [4, 13, 14, 15, 16]),
        'answers whose call is no_call': (1, [5]), 'rows without an answer': (1, [6]), 'rows whose answers all have weight 0': (1, [7]),
        'rows that are not JSON': (2, [8, 12]), 'rows that are no conversation': (3, [9, 10, 11])}
    assert data.rejected == {k: dict(count=n, lines=where) for k, (n, where) in want.items()}
    assert data.row.tolist() == [0, 1]
    with pytest.raises(T.TrainError, match=r'no example: 1 answers without an observation \(line 1\)'): T.read_examples(write(tmp_path/'e.jsonl', [blind]))
    with pytest.raises(T.TrainError, match='holds no example: it is empty'): T.read_examples(write(tmp_path/'f.jsonl', []))


@pytest.mark.parametrize('dialect', DIALECTS)
def test_a_row_of_many_turns_teaches_its_trainable_answers_in_every_dialect(tmp_path, dialect):
    turns, tool = expert_rows(3)[:6], dict(role='tool', tool_call_id='c', content='Done.')
    def window(learned):
        said = [(m['messages'][1], m['messages'][2] | ({} if i in learned else dict(weight=0)), tool) for i, m in enumerate(turns)]
        return dict(messages=[turns[0]['messages'][0], *[m for o in said for m in o][:-1]])
    one_by_one = T.read_examples(write(tmp_path/'a.jsonl', turns[3:]))
    data = T.read_examples(write(tmp_path/'b.jsonl', [DIALECTS[dialect].row(window({3, 4, 5}))]))
    assert data.rejected == one_by_one.rejected and (data.x == one_by_one.x).all() and (data.y == one_by_one.y).all()
    assert not data.row.any() and not data.game.any()
    if dialect == 'trl': return  # its completions are learned as a whole
    data = T.read_examples(write(tmp_path/'c.jsonl', [DIALECTS[dialect].row(window({1, 4}))]))
    want = T.read_examples(write(tmp_path/'d.jsonl', [turns[1], turns[4]]))
    assert (data.x == want.x).all() and (data.y == want.y).all()


def test_a_picture_beside_the_text_does_not_hide_it(tmp_path):
    plain = row(look(World(7, length=200), 200), ['noop'])
    parts = [dict(type='text', text=plain['messages'][1]['content']), dict(type='image_url', image_url=dict(url='data:image/png;base64,AAAA'))]
    seen = dict(messages=[plain['messages'][0], dict(role='user', content=parts), plain['messages'][2]])
    assert (T.read_examples(write(tmp_path/'a.jsonl', [seen])).x == T.read_examples(write(tmp_path/'b.jsonl', [plain])).x).all()


def test_an_answer_is_read_with_the_observation_right_before_it(tmp_path):
    "Not with an older one, when its own message shows none"
    a, b = expert_rows(3)[:2]
    blind = dict(role='user', content='what now?')
    data = T.read_examples(write(tmp_path/'a.jsonl', [dict(messages=[*a['messages'], blind, b['messages'][2]])]))
    assert (data.y == T.read_examples(write(tmp_path/'b.jsonl', [a])).y).all() and data.rejected['answers without an observation']['count'] == 1


@pytest.mark.parametrize('share', [.1, .25, .5])
def test_no_game_is_cut_in_two(lab, share):
    data = T.read_examples(lab[1])
    train, val = T._held_back(data, share)
    assert data.game.max() == 9 and not set(data.game[train]) & set(data.game[val]) and sorted([*train, *val]) == list(range(len(data.y)))
    assert abs(len(val)/len(data.y) - share) < .06 and set(data.game[val]) == set(range(data.game[val[0]], 10))


def test_one_game_alone_is_not_cut(tmp_path):
    data = write(tmp_path/'d.jsonl', expert_rows(3))
    run = T.sft(data, tmp_path/'models', epochs=2, val_split=.3)
    assert run.metrics['held_back'] == 0 and 'val_loss' not in run.curves[0] and run.metrics['examples'] == len(T.read_examples(data).y)
    with pytest.raises(T.TrainError, match='patience needs games that are held back'): T.sft(data, tmp_path/'models', epochs=2, patience=1)


def test_fine_tuning_learns_to_imitate(lab):
    models, dataset, tuned = lab
    first, last = tuned.curves[0], tuned.curves[-1]
    assert last['val_loss'] < first['val_loss'] - .3 and last['val_accuracy'] > .3
    data = T.read_examples(dataset)
    z = logits(load_policy(tuned.model, models).weights, data.x)
    assert (z.argmax(-1) == data.y).mean() > .4
    assert tuned.model.startswith('ft:student:job_') and tuned.folder.parent == models


def weights(models, run): return load_policy(run.model, models).weights


def equal(a, b): return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


def test_the_same_seed_gives_the_same_weights(lab, tmp_path):
    models, dataset, tuned = lab
    same, other = T.sft(dataset, tmp_path, epochs=12), T.sft(dataset, tmp_path, epochs=12, seed=1)
    assert same.model == tuned.model and same.curves == tuned.curves and other.model != tuned.model
    assert equal(weights(tmp_path, same), weights(models, tuned)) and not equal(weights(tmp_path, other), weights(models, tuned))


def test_the_curves_say_what_the_weights_do(lab, tmp_path):
    models, dataset, tuned = lab
    rows, data = [], T.read_examples(dataset)
    assert T.sft(dataset, tmp_path, epochs=12, on_update=rows.append).curves == rows == tuned.curves
    assert [list(o) for o in rows] == [['epoch', 'loss', 'accuracy', 'val_loss', 'val_accuracy']]*12 and [o['epoch'] for o in rows] == list(range(1, 13))
    train, val = T._held_back(data, .1)
    z = logits(weights(models, tuned), data.x)
    assert rows[-1]['val_accuracy'] == (z[val].argmax(-1) == data.y[val]).mean() and np.isclose(rows[-1]['val_loss'], T.cross_entropy(z[val], data.y[val])[0])
    assert abs(rows[-1]['accuracy'] - (z[train].argmax(-1) == data.y[train]).mean()) < .1  # it is measured while the weights move
    assert (tuned.metrics['examples'], tuned.metrics['held_back']) == (len(train), len(val))
    json.dumps(rows)


def test_patience_keeps_the_best_weights_and_stops(lab, tmp_path):
    models, dataset, _ = lab
    full = T.sft(dataset, tmp_path, epochs=40, lr=1e-2)
    best = min(full.curves, key=lambda o: o['val_loss'])['epoch']
    early = T.sft(dataset, tmp_path, epochs=40, lr=1e-2, patience=4)
    assert early.curves == full.curves[:len(early.curves)] and len(early.curves) == early.metrics['epoch']+4 < 40 and early.metrics['epoch'] <= best
    data = T.read_examples(dataset)
    val = T._held_back(data, .1)[1]
    assert T.cross_entropy(logits(weights(tmp_path, early), data.x[val]), data.y[val])[0] == pytest.approx(early.metrics['val_loss'], rel=1e-5) # another number of threads, another sum
    assert early.metrics['val_loss'] < full.curves[-1]['val_loss']


def stop_after(n):
    def stop(row):
        if row['epoch'] == n: raise KeyboardInterrupt
    return stop


@pytest.mark.parametrize('patience', [None, 2])
def test_a_stopped_training_goes_on_to_the_same_weights(lab, tmp_path, patience):
    dataset, how = lab[1], dict(epochs=20, lr=2e-2, patience=patience, job='x')
    whole = T.sft(dataset, tmp_path/'whole', **how)
    assert len(whole.curves) < 20 if patience else len(whole.curves) == 20
    for n in (1, 2, 4, len(whole.curves)):
        with pytest.raises(KeyboardInterrupt): T.sft(dataset, tmp_path/'parts', state=tmp_path/'state', on_update=stop_after(n), **how)
        assert not (tmp_path/'parts').exists()
    parts = T.sft(dataset, tmp_path/'parts', state=tmp_path/'state', **how)
    assert parts.curves == whole.curves and parts.metrics == whole.metrics and parts.model == whole.model == 'ft:student:job_x'
    assert equal(weights(tmp_path/'parts', parts), weights(tmp_path/'whole', whole)) and not (tmp_path/'state').exists()


def test_a_state_of_another_call_is_refused_by_what_differs(lab, tmp_path):
    models, dataset, tuned = lab
    with pytest.raises(KeyboardInterrupt): T.sft(dataset, tmp_path, epochs=5, state=tmp_path/'state', on_update=stop_after(3))
    other = write(tmp_path/'other.jsonl', [r for seed in range(2) for r in expert_rows(seed)])
    differ = [(dict(seed=1), 'seed was 0, is 1'), (dict(lr=.1), 'lr was 0.003, is 0.1'),
        (dict(base=tuned.model), 'base was .student., is .ft:'), (dict(hidden=16), 'hidden was 128')]
    for call, said in differ:
        with pytest.raises(T.TrainError, match=said): T.sft(dataset, models if 'base' in call else tmp_path, state=tmp_path/'state', **dict(epochs=5) | call)
    with pytest.raises(T.TrainError, match='data_sha256 was'): T.sft(other, tmp_path, epochs=5, state=tmp_path/'state')
    (tmp_path/'state'/'state.safetensors').write_bytes(b'half a file')
    with pytest.raises(T.TrainError, match='cannot be read'): T.sft(dataset, tmp_path, epochs=5, state=tmp_path/'state')


def test_a_checkpoint_says_where_it_comes_from(lab):
    models, dataset, tuned = lab
    config = load_policy(tuned.model, models).config
    assert config['data_sha256'] == hashlib.sha256(dataset.read_bytes()).hexdigest()
    assert (config['parent'], config['base'], config['seed'], config['epochs']) == ('student', 'student', 0, 12)
    assert config['curves'] == tuned.curves and config['metrics'] == tuned.metrics and config['kind'] == 'student' and config['features'] == FEATURE_HASH
    assert 'not a language model' in config['about']
    jobs = T.sft(dataset, models, epochs=1, job='job_7', extra=dict(promoted=False))
    assert jobs.model == 'ft:student:job_7' and load_policy(jobs.model, models).config['promoted'] is False and 'promoted' not in config
    more = T.sft(dataset, models, base=tuned.model, epochs=1, lr=1e-4)
    assert load_policy(more.model, models).config['parent'] == tuned.model and more.model.startswith('ft:student:job_')
    assert more.curves[0]['val_loss'] < tuned.curves[0]['val_loss']  # it went on from the tuned weights


@pytest.mark.parametrize('call,said', [
    (lambda m, d: T.sft(m/'nope.jsonl', m), 'nope.jsonl cannot be read'),
    (lambda m, d: T.sft(d, m, epochs=0), 'epochs must be above 0'),
    (lambda m, d: T.sft(d, m, patience=0), 'patience must be above 0'),
    (lambda m, d: T.sft(d, m, val_split=1.), 'val_split must be from 0 to below 1'),
    (lambda m, d: T.sft(d, m, base='random'), 'has no weights'),
    (lambda m, d: T.sft(d, m, epochs=1, lr=1e30), 'no longer finite')])
def test_what_cannot_work_is_refused(lab, call, said):
    with np.errstate(all='ignore'), pytest.raises(T.TrainError, match=said): call(*lab[:2])
