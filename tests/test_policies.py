"The models in the box against slow, plain re-statements of what they compute, and against the world"
import json
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
from crafter import constants

from synth_lab import policies as P
from synth_lab.core import digest
from synth_lab.view import Memory, Observation, Remembered, effect, format, look, parse
from synth_lab.world import ACTIONS, KINDS, World, column_row

SHIFT = dict(left=(-1, 0), right=(1, 0), up=(0, -1), down=(0, 1))


def play(policy, seed, length=200, max_actions=8, noise=0., memory=None):
    "Observations, actions and what followed, step by step; the policy sees only parsed text"
    world, last, rng, steps, calls = World(seed, length=length), (), np.random.default_rng(seed), [], []
    if memory: memory.see(world.window(), column_row(world.player.pos))
    while not world.done:
        decision = policy.decide(parse(format(replace(look(world, length, last), remembered=memory and memory.recall()))), max_actions, rng=rng)
        calls.append(decision)
        before, last = look(world, length, last), ()
        for action in decision.actions:
            if world.done: break
            if rng.random() < noise: action = ACTIONS[rng.integers(17)]
            world.step(ACTIONS.index(action))
            after = look(world, length)
            if memory: memory.see(after.grid, column_row(world.player.pos))
            last += ((action, effect(before, action, after)),)
            steps.append((before, action, before := replace(after, last=last)))
    return world, steps, calls


@pytest.fixture(scope='module')
def seen():
    "Observations of half-random play, with creatures, caves, crafts and nights among them"
    return [o for seed in range(6) for o, *_ in play(P.Expert(), seed, max_actions=1, noise=.2)[1]]


def plain(obs):
    "Shortest walks by a queue: kind → (steps, first sides)"
    rows, found, queue, dist = obs.rows, {}, deque([(4, 3)]), {(4, 3): (0, set())}
    while queue:
        x, y = queue.popleft()
        n, firsts = dist[x, y]
        for side, (dx, dy) in SHIFT.items():
            at = x+dx, y+dy
            if not (0 <= at[0] < 9 and 0 <= at[1] < 7): continue
            begin = {side} if n == 0 else firsts
            if at in dist and dist[at][0] < n+1: continue
            kind, new = rows[at[1]][at[0]], at not in dist
            dist.setdefault(at, (n+1, set()))[1].update(begin)
            if found.setdefault(kind, (n+1, set()))[0] == n+1: found[kind][1].update(begin)
            if new and kind in constants.walkable: queue.append(at)
    return found


def test_walks_are_those_of_a_plain_search(seen):
    rng = np.random.default_rng(0)
    common = [KINDS.index(o) for o in ('grass', 'grass', 'grass', 'path', 'sand')]
    mazes = [replace(seen[0], grid=bytes(rng.choice([*common, *range(19)], 63).tolist())) for _ in range(200)]
    for o, row in zip(seen+mazes, P.features(seen+mazes)):
        said, want = P.describe(row), {k: v for k, v in plain(o).items() if k in P.TARGETS}
        assert set(said.get('found', {})) == set(want)
        assert said.get('closeness', {}) == {k: round(1/(1+n), 2) for k, (n, _) in want.items()}
        firsts = {f'{k} {s}' for k, (_, sides) in want.items() for s in sides}
        assert set(said.get('walk', {})) | set(said.get('touch', {})) == firsts
        assert set(said.get('adjacent', {})) == {k for k, (n, _) in want.items() if n == 1}


def test_sight_points_at_the_nearest_tile_that_no_walk_reaches(seen):
    for o, row in zip(seen, P.features(seen)):
        said, reached = P.describe(row).get('sight', {}), plain(o)
        cells = [(abs(x-4)+abs(y-3), x-4, y-3, k) for y, r in enumerate(o.rows) for x, k in enumerate(r) if (x, y) != (4, 3)]
        for kind in P.TARGETS:
            mine = [c for c in cells if c[3] == kind]
            sides = {s for s in SHIFT if f'{kind} {s}' in said}
            if kind in reached or not mine: assert not sides
            else: assert sides in [{s for s, (dx, dy) in SHIFT.items() if dx*c[1] + dy*c[2] > 0} for c in mine if c[0] == min(mine)[0]]


def test_the_rest_of_a_row_says_what_the_text_says(seen):
    for o, row in zip(seen, P.features(seen)):
        said = P.describe(row)
        held = dict(o.inventory) | {k: getattr(o, k) for k in P.VITALS}
        assert set(said.get('stats', {})) == {f'{k} {n}' for k in P.STATS for n in P.LEVELS if held.get(k, 0) >= int(n)}
        assert set(said.get('unlocked', {})) == set(o.achievements)
        assert list(said.get('last', {})) == [a for a, _ in o.last[-1:]]
        assert list(said['facing']) == [o.facing]
        assert ('moved' in said) == (bool(o.last) and 'moved' in o.last[-1][1])
        assert ('sleeping' in said, 'dark' in said) == (o.sleeping, o.daylight < .5)
        beside = {s: o.rows[3+dy][4+dx] for s, (dx, dy) in SHIFT.items()}
        assert set(said['around']) == {f'{s} {k}' for s, k in (beside | {'faced': o.faced}).items()}
        nine = {o.rows[y][x] for y in (2, 3, 4) for x in (3, 4, 5)}
        assert set(said.get('near', {})) == nine & {'table', 'furnace'}
        assert said['share'] == {k: round(n/63, 2) for k, n in sorted(Counter(sum(o.rows, [])).items(), key=lambda p: KINDS.index(p[0]))}
        def affordable(name):
            rule = constants.make[name[5:]] if name.startswith('make') else constants.place[name[6:]]
            return nine.issuperset(rule.get('nearby', ())) and all(held.get(k, 0) >= n for k, n in rule['uses'].items())
        assert set(said.get('affordable', {})) == {o for o in P.CRAFTS if affordable(o)}


def test_a_row_does_not_depend_on_its_batch(seen):
    together = P.features(seen[:64])
    assert together.dtype == np.float32 and together.shape == (64, 528)
    assert all((P.features([o])[0] == row).all() for o, row in zip(seen, together))


MOVES_BY_ITSELF = {'cow', 'zombie', 'skeleton', 'arrow', 'sapling', 'ripe_plant'}


@pytest.mark.parametrize('noise', [0, .6])
def test_what_is_imagined_of_the_player_happens(noise):
    sure = unsure = 0
    for seed in range(12):
        for before, action, after in play(P.Expert(), seed, length=300, max_actions=1, noise=noise)[1]:
            guess = P.imagine(before, action)
            if guess is None: unsure += 1; continue
            sure += 1
            for field in ('step', 'limit', 'inventory', 'facing', 'daylight', 'sleeping', 'achievements'):
                assert getattr(guess, field) == getattr(after, field), (seed, before.step, action, field)
            assert ('moved' in guess.last[-1][1]) == ('moved' in after.last[-1][1]) and guess.last[-1][0] == action
            assert all(abs(getattr(guess, v)-getattr(after, v)) <= 1 for v in P.VITALS)
            for mine, real in zip(sum(guess.rows, []), sum(after.rows, [])):
                if mine == 'void' or {mine, real} & MOVES_BY_ITSELF: continue
                assert mine == real or (mine in ('table', 'furnace') and real == 'path'), (seed, before.step, action)  # an arrow breaks a table
            beside = [guess.rows[3+dy][4+dx] for dx, dy in SHIFT.values()]
            assert beside == [after.rows[3+dy][4+dx] for dx, dy in SHIFT.values()]
    assert sure > 2*unsure > 0


def meadow(**fields):
    "A plain with the player in the middle"
    return replace(Observation(10, 200, 9, 9, 9, 8, (), 'down', bytes([KINDS.index('grass')])*63, .9, False, ()), **fields)


def put(obs, **tiles):
    "The observation with other tiles beside the player"
    grid = bytearray(obs.grid)
    for side, kind in tiles.items():
        dx, dy = SHIFT[side]
        grid[31+dx+9*dy] = KINDS.index(kind)
    return replace(obs, grid=bytes(grid))


@pytest.mark.parametrize('obs,action', [
    (meadow(), 'do'), (put(meadow(), left='lava'), 'move_left'), (put(meadow(), left='void'), 'noop'), (put(meadow(), up='zombie'), 'noop'),
    (meadow(drink=0), 'noop'), (meadow(step=199), 'noop'), (meadow(sleeping=True, last=(('sleep', 'asleep, health -2'),)), 'sleep')])
def test_what_depends_on_chance_is_not_imagined(obs, action): assert P.imagine(obs, action) is None


def test_a_chain_of_imagined_actions_keeps_count():
    obs = put(meadow(inventory=(('wood', 4),)), down='tree')
    for action in ('do', 'place_table', 'make_wood_pickaxe', 'make_wood_sword', 'make_stone_pickaxe'): obs = P.imagine(obs, action)
    left = 5 - constants.place['table']['uses']['wood'] - 2
    assert obs.inventory == tuple((k, n) for k, n in (('wood', left), ('wood_pickaxe', 1), ('wood_sword', 1)) if n)
    assert obs.achievements == ('collect_wood', 'place_table', 'make_wood_pickaxe', 'make_wood_sword')
    assert obs.step == 15 and obs.faced == 'table' and [a for a, _ in obs.last][-1] == 'make_stone_pickaxe'


def test_the_expert_reaches_thirteen_achievements_through_the_text():
    scores, lengths = zip(*[(len(w.achievements), [len(c.actions) for c in calls]) for w, _, calls in (play(P.Expert(), s) for s in range(1000, 1016))])
    assert np.mean(scores) >= 13
    assert max(map(max, lengths)) <= 8 and np.mean(sum(lengths, [])) > 2


def test_without_a_memory_the_expert_plays_as_it_always_did():
    played = {k: digest([[a for _, a, _ in play(P.Expert(), s, max_actions=k)[1]] for s in (0, 7, 1003, 1031)]) for k in (8, 1)}
    assert played == {8: 'bf1b4376f32d', 1: '8acb9a192244'}


@pytest.mark.parametrize('max_actions', [8, 1])
def test_with_a_memory_the_expert_reaches_sixteen_achievements_through_the_text(max_actions):
    scores = [len(play(P.Expert(), s, max_actions=max_actions, memory=Memory())[0].achievements) for s in range(1000, 1016)]
    assert np.mean(scores) >= 16


def test_an_expert_with_a_memory_repeats_itself():
    a, b = (play(P.Expert(), 5, memory=Memory())[2] for _ in range(2))
    assert a == b and len(a) > 20


def remembering(*places, unexplored=((5, 'left'), (5, 'right'), (4, 'down'), (4, 'up')), **fields):
    return meadow(remembered=Remembered(places, unexplored), **fields)


WENT = ('collect_wood', 'collect_sapling', 'place_plant', 'collect_drink', 'eat_cow', 'wake_up', 'place_table', 'place_furnace', 'place_stone')
TOOLS = tuple((o.removeprefix('make_'), 1) for o in P.TOOLS)


@pytest.mark.parametrize('obs,action,aim', [
    (remembering(('water', -9, 0), drink=2, limit=10_000, achievements=WENT), 'move_left', 'I am thirsty'),
    (remembering(('water', -9, 0), ('tree', 12, 0), drink=2, step=180, achievements=WENT), 'move_right', 'Wood for tools'),  # the water in me lasts to the end
    (remembering(('iron', 0, -8), inventory=(('wood', 4), ('stone', 5), ('coal', 2), *TOOLS[:4]), achievements=WENT), 'move_up', 'Iron for tools'),
    (remembering(('table', 0, 8), ('stone', 9, 0), inventory=(('wood', 1), ('stone', 1), *TOOLS[:2]), achievements=WENT), 'move_down', 'Walk to the table'),
    (remembering(inventory=TOOLS, achievements=WENT, unexplored=((4, 'up'), (30, 'down'))), 'move_up', 'Explore up'),
    (remembering(inventory=TOOLS, achievements=WENT, unexplored=((9, 'left'), (10, 'down'))), 'move_down', 'Explore down')])
def test_what_is_remembered_is_gone_for(obs, action, aim):
    decision = P.Expert().decide(obs, rng=np.random.default_rng(0))
    assert decision.thought.startswith(aim) and decision.actions == (action,)


def test_iron_tools_are_made_where_table_and_furnace_are_both_near():
    held = dict(inventory=(('wood', 3), ('stone', 5), ('coal', 1), ('iron', 1), *TOOLS[:4]), achievements=WENT)
    obs = put(remembering(('table', 20, 0), **held), left='table')
    assert P.Expert().decide(obs, rng=np.random.default_rng(0)).actions == ('place_furnace',)
    assert P.Expert().decide(put(obs, up='furnace'), rng=np.random.default_rng(0)).actions == ('make_iron_pickaxe',)


def test_what_is_remembered_moves_with_the_player_and_changes_no_feature():
    obs = remembering(('water', -12, 3), ('iron', 0, -8))
    after = P.imagine(obs, 'move_left')
    assert after.remembered == Remembered((('water', -11, 3), ('iron', 1, -8)), ((4, 'left'), (6, 'right'), (4, 'down'), (4, 'up')))
    assert P.imagine(put(obs, left='stone'), 'move_left').remembered == obs.remembered
    assert replace(after, remembered=None) == P.imagine(meadow(), 'move_left')
    assert (P.features([obs]) == P.features([meadow()])).all() and P.FEATURE_HASH == P.digest(P.FEATURE_SPEC)


def test_the_expert_says_its_aim_in_one_line_and_repeats_itself():
    for before, *_ in play(P.Expert(), 3, max_actions=1)[1][::10]:
        a, b = (P.Expert().decide(o, 8, rng=np.random.default_rng(5)) for o in (before, parse(format(before))))
        assert a == b and a.logprobs is None
        assert '\n' not in a.thought and a.thought.endswith('.') and len(a.thought) > 10


def test_the_expert_reads_prices_from_the_rules(monkeypatch):
    obs = meadow(inventory=(('wood', 3),), achievements=('collect_wood', 'collect_sapling', 'place_plant', 'collect_drink', 'eat_cow', 'wake_up'))
    assert P.Expert().decide(obs, rng=np.random.default_rng(0)).actions == ('place_table',)
    monkeypatch.setitem(constants.place['table']['uses'], 'wood', 5)
    assert P.Expert().decide(obs, rng=np.random.default_rng(0)).actions != ('place_table',)


def test_the_student_reports_the_probability_of_what_it_did(seen):
    weights = P.init_weights(seed=3)
    weights['W2'] *= 100
    student = P.Student(weights)
    for obs in seen[::50]:
        decision = student.decide(obs, 8, temperature=.7, rng=np.random.default_rng(0))
        o, again = obs, []
        for action in decision.actions:
            z = P.logits(weights, P.features([o])).astype(float)[0]/.7
            again.append(z[ACTIONS.index(action)] - np.log(np.exp(z).sum()))
            o = P.imagine(o, action)
        assert np.allclose(again, decision.logprobs, atol=1e-4)
        assert len(decision.actions) == 8 or o is None
        assert decision == student.decide(parse(format(obs)), 8, temperature=.7, rng=np.random.default_rng(0))


def test_the_student_chooses_as_often_as_it_says(seen):
    weights = P.init_weights(seed=3)
    weights['W2'] *= 100
    student, rng = P.Student(weights), np.random.default_rng(0)
    picks = Counter(student.decide(seen[40], rng=rng).actions[0] for _ in range(2000))
    says = np.exp(student.logprobs([seen[40]])[0])
    assert abs(np.array([picks[a]/2000 for a in ACTIONS]) - says).max() < .04
    assert student.decide(seen[40], temperature=0).actions == (ACTIONS[says.argmax()],)


def test_a_fresh_student_is_nearly_uniform(seen):
    lp = P.load_policy('student').logprobs(seen[:100])
    assert abs(lp + np.log(17)).max() < .6 and np.allclose(np.exp(lp).sum(1), 1, atol=1e-5)


def test_random_is_uniform():
    decision = P.load_policy('random').decide(meadow(), 3000, rng=np.random.default_rng(0))
    assert set(decision.logprobs) == {-float(np.log(17))} and max(Counter(decision.actions).values()) < 240


@pytest.fixture
def models(tmp_path):
    P.save_checkpoint(tmp_path, 'ft:student:job_a', P.init_weights(16, seed=1), parent='student', metrics=dict(val_loss=1.5))
    return tmp_path


def test_a_checkpoint_comes_back_and_can_be_replaced(models):
    policy = P.load_policy('ft:student:job_a', models)
    assert all((policy.weights[k] == v).all() for k, v in P.init_weights(16, seed=1).items())
    assert (policy.model, policy.kind, policy.config['parent'], policy.config['features']) == ('ft:student:job_a', 'student', 'student', P.FEATURE_HASH)
    P.save_checkpoint(models, 'ft:student:job_a', P.init_weights(8, seed=2), parent='student')
    assert len(P.load_policy('ft:student:job_a', models).weights['b1']) == 8
    assert [o.name for o in models.iterdir()] == ['ft-student-job_a']


def edit(folder, **fields): (folder/'config.json').write_text(json.dumps(json.loads((folder/'config.json').read_text()) | fields))


def test_weights_for_other_features_are_refused(models):
    edit(models/'ft-student-job_a', features='0123456789ab')
    with pytest.raises(P.CheckpointError, match=f'0123456789ab.*{P.FEATURE_HASH}.*train it again'): P.load_policy('ft:student:job_a', models)


def flip(file, at):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize('damage,said', [
    (lambda f: (f/'model.safetensors').write_bytes(b'junk'), 'model.safetensors cannot be read'),
    (lambda f: (f/'model.safetensors').unlink(), 'model.safetensors cannot be read'),
    (lambda f: flip(f/'model.safetensors', -5), 'is not the file that was written'),
    (lambda f: (f/'config.json').write_text('{'), 'config.json cannot be read'),
    (lambda f: edit(f, hidden=32), 'expected tensors'),
    (lambda f: (f/'model.safetensors').write_bytes(P.save({k: v*np.nan for k, v in P.init_weights(16).items()})), 'not finite')])
def test_a_damaged_checkpoint_is_refused(models, damage, said):
    damage(models/'ft-student-job_a')
    with pytest.raises(P.CheckpointError, match=said): P.load_policy('ft:student:job_a', models)


def test_an_unknown_model_gets_the_nearest_name(models):
    with pytest.raises(P.ModelNotFound, match='did you mean `ft:student:job_a`'): P.load_policy('ft:student:job_b', models)
    with pytest.raises(P.ModelNotFound, match='did you mean `expert`'): P.load_policy('expret')


def test_the_list_of_models_shows_what_cannot_be_read(models):
    (models/'broken').mkdir()
    (models/'broken'/'config.json').write_text('{}')
    rows = {o['id']: o for o in P.list_models(models)}
    assert list(rows) == ['random', 'expert', 'student', 'broken', 'ft:student:job_a']
    assert rows['ft:student:job_a']['metrics'] == {'val_loss': 1.5} and 'cannot be read' in rows['broken']['problem']
