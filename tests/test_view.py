"What the lesson of the view should not carry: any observation, any text, every effect"
from dataclasses import replace

import numpy as np, pytest
from hypothesis import given, settings, strategies as st

from synth_lab.core import digest
from synth_lab.view import (CENTRE, FAR, MEMORABLE, Memory, Observation, ObservationError, Remembered, canonical, effect, format, look, missing, nearest, observe,
    parse)
from synth_lab.world import ACHIEVEMENTS, ACTIONS, AREA, CODE, COW, ITEMS, KINDS, LAVA, RIGHT, ROW, World, cell, column_row, lay, relocate

settings.register_profile('repeatable', derandomize=True, deadline=None, database=None)
settings.load_profile('repeatable')

vital = st.integers(0, 9)
words = st.text(st.characters(codec='utf-8', exclude_characters=';\n', exclude_categories=('Cs',)), max_size=30)
far = st.integers(-FAR, FAR)
remembered = st.builds(Remembered,
    st.dictionaries(st.sampled_from(MEMORABLE), st.tuples(far, far).filter(any)).map(
        lambda d: tuple((kind,*at) for kind,at in sorted(d.items(), key=lambda o: abs(o[1][0])+abs(o[1][1])))),
    st.dictionaries(st.sampled_from(['left','right','up','down']), st.integers(1, FAR)).map(lambda d: tuple(sorted((n,side) for side,n in d.items()))))
observations = st.builds(Observation, step=st.integers(0, 10_000), limit=st.integers(1, 10_000), health=vital, food=vital, drink=vital, energy=vital,
    inventory=st.dictionaries(st.sampled_from(ITEMS), st.integers(1, 9)).map(lambda d: tuple((o,d[o]) for o in ITEMS if o in d)),
    facing=st.sampled_from(['left','right','up','down']), grid=st.lists(st.integers(0, len(KINDS)-1), min_size=63, max_size=63).map(bytes),
    daylight=st.integers(0, 100).map(lambda o: o/100), sleeping=st.booleans(),
    achievements=st.lists(st.sampled_from(ACHIEVEMENTS), unique=True).map(tuple),
    last=st.lists(st.tuples(st.sampled_from(ACTIONS), words), max_size=8).map(tuple), remembered=st.none() | remembered).map(
    lambda o: replace(o, limit=max(o.step, o.limit)))

@given(observations)
def test_the_text_of_any_observation_reads_back_equal(obs): assert parse(format(obs)) == obs

@given(observations, observations, st.text(), st.text())
def test_the_last_observation_of_a_longer_text_counts(first, second, before, after):
    assert parse(f'{before}\n{format(first)}\n{format(second)}\n{after}') == second

@given(observations, st.data())
def test_a_damaged_text_is_read_or_refused_but_never_crashes(obs, data):
    text = format(obs)
    i,j = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    try: assert isinstance(parse(text[:i] + data.draw(st.text(max_size=3)) + text[j:]), Observation)
    except ObservationError: pass

@given(observations)
def test_nearest_names_a_cell_of_that_kind_and_none_is_nearer(obs):
    found = dict(nearest(obs.grid))
    assert set(found) == {KINDS[o] for i,o in enumerate(obs.grid) if o and i != CENTRE}
    step = dict(left=(-1,0), right=(1,0), up=(0,-1), down=(0,1))
    for kind,way in found.items():
        n,ways = [int(o) for o in way.split()[::2]], way.split()[1::2]
        dx,dy = (sum(k*step[o][axis] for k,o in zip(n, ways)) for axis in (0,1))
        assert obs.rows[3+dy][4+dx] == kind
        assert sum(n) == min(abs(x-4)+abs(y-3) for y,row in enumerate(obs.rows) for x,o in enumerate(row) if o == kind and (x,y) != (4,3))

@pytest.mark.parametrize('change', [('wood 2', 'gold 2'), ('unlocked 1 of 22: wake_up', 'unlocked 1 of 22: fly'), ('stand on grass', 'stand on clouds'),
    ('health 9', 'health 99'), ('noop -> slept', 'dance -> slept'), ('noop -> slept', 'noop -> slept; noop'), ('. . @', '. @'), ('@ .', '. @'), ('@', '.')])
def test_what_crafter_does_not_have_is_refused(change):
    obs = Observation(1, 200, 9, 9, 9, 9, (('wood',2),), 'up', bytes([2]*63), .8, False, ('wake_up',), (('noop','slept'),))
    text = format(obs)
    assert change[0] in text
    with pytest.raises(ObservationError): parse(text.replace(*change))

@pytest.mark.parametrize('change', [('daylight 0.80', 'daylight 9.99'), ('wood 2', 'wood 0'), ('wood 2', 'wood 1, wood 2'), ('wood 2', 'stone 1, wood 2'),
    ('step 1 of', 'step 201 of'), ('step 1 of', 'step 01 of'), ('22: wake_up', '22: wake_up, wake_up'), ('unlocked 1', 'unlocked 2'),
    ('facing up: grass', 'facing up: lava'), ('legend: . grass', 'legend: ~ water'), ('nearest: grass 1 up', 'nearest: diamond 1 up'), ('9 wide', '90 wide')])
def test_a_text_that_contradicts_itself_is_refused(change):
    obs = Observation(1, 200, 9, 9, 9, 9, (('wood',2),), 'up', bytes([2]*63), .8, False, ('wake_up',), (('noop','slept'),))
    text = format(obs)
    assert change[0] in text
    with pytest.raises(ObservationError, match='a world would say'): parse(text.replace(*change))

def test_the_view_at_the_edge_is_void_and_reads_back():
    for pos in ((0,0), (63,63), (2,30), (61,61)):
        world = World(seed=1)
        if world.game.shown[cell(*pos)] < COW: relocate(world.game, world.player, cell(*pos))
        obs = look(world, 200)
        assert 'void' in obs.rows[0] + obs.rows[-1] and 'x void' in format(obs)
        assert parse(format(obs)) == obs

def test_without_a_memory_the_text_is_what_it_always_was():
    world,texts = World(seed=11),[]
    for i in range(150):
        texts.append(format(look(world, 200)))
        if not world.done: world.step(i*7 % 17)
    assert digest(texts) == 'd036e94653f3'

PLAIN = replace(look(World(seed=1), 200), remembered=Remembered((('water',3,-12), ('iron',0,30)), ((1,'left'), (8,'up'))))

@pytest.mark.parametrize('change', [('water 12 up 3 right', 'water 3 right 12 up'), ('water 12 up 3 right', 'water 40 right'), ('water 12', 'sand 12'), ('12 up', '12 on'),
    ('iron 30', 'water 30'), ('12 up 3 right', '90 up'), ('1 left, 8 up', '8 up, 1 left'), ('1 left', '1 north'), ('1 left, 8 up', '1 left, 8 left'),
    ('water 12 up 3 right', 'water 012 up 3 right'), ('out of view', 'in view'), ('unexplored: ', 'explored: ')])
def test_a_memory_that_contradicts_itself_is_refused(change):
    text = format(PLAIN)
    assert change[0] in text and parse(text) == PLAIN
    with pytest.raises(ObservationError): parse(text.replace(*change))

def wander(seed, steps, corner=None):
    "A memory, its world, and what a plain book-keeper has seen of it: (column, row) → kind"
    world,memory,book,random = World(seed=seed),Memory(),{},np.random.RandomState(seed)
    if corner and world.game.shown[cell(*corner)] < COW: relocate(world.game, world.player, cell(*corner))
    for _ in range(steps):
        world.player.health,way = 9,random.randint(1, 5)
        for _ in range(random.randint(1, 9)): world.step(way)
        obs = observe(world, 10_000, memory)
        x,y = column_row(world.player.pos)
        book |= {(x+i-4, y+j-3):kind for j,row in enumerate(obs.rows) for i,kind in enumerate(row)}
        yield obs,book,(x,y)

# the view is remembered at the end of each walk only, so there are holes in what was seen
@pytest.mark.parametrize('seed, corner', [(3, None), (4, (3, 3)), (5, (60, 61))])
def test_the_nearest_remembered_place_is_that_of_a_plain_search(seed, corner):
    for obs,book,(x,y) in wander(seed, 60, corner):
        away = {}
        for (i,j),kind in book.items():
            n = abs(i-x) + abs(j-y)
            if kind in MEMORABLE and n <= FAR and (abs(i-x) > 4 or abs(j-y) > 3): away[kind] = min(n, away.get(kind, n))
        assert {kind:abs(dx)+abs(dy) for kind,dx,dy in obs.remembered.places} == away
        assert all(book[x+dx,y+dy] == kind for kind,dx,dy in obs.remembered.places)
        told = {side:n for n,side in obs.remembered.unexplored}
        for side,(dx,dy) in dict(left=(-1,0), right=(1,0), up=(0,-1), down=(0,1)).items():
            line = [n for n in range(1, FAR+1) if (x+n*dx, y+n*dy) not in book]
            beyond = lambda i,j: dict(left=i < 0, right=i >= AREA[0], up=j < 0, down=j >= AREA[1])[side]
            known = line and beyond(x+line[0]*dx, y+line[0]*dy) and any(beyond(*o) for o in book) # that the world ends there
            assert told.get(side) == (line[0] if line and not known else None)

def test_nothing_is_new_beyond_the_end_of_the_world():
    world,memory = World(seed=4),Memory()
    relocate(world.game, world.player, next(cell(x,y) for x in range(3) for y in range(3) if world.game.shown[cell(x,y)] < COW))
    assert {side for _,side in observe(world, 200, memory).remembered.unexplored} == {'right', 'down'}

def test_a_memory_knows_differences_and_no_places():
    here,there = Memory(),Memory()
    for obs,_,(x,y) in wander(6, 30):
        here.see(obs.grid, (x,y))
        there.see(obs.grid, (x+1000,y-77))
        assert here.recall() == there.recall() == obs.remembered

def test_a_tree_that_was_cut_is_forgotten_and_one_out_of_sight_is_not():
    memory,grass = Memory(),[CODE['grass']]*63
    def seen(column, **cells): return memory.see(bytes(CODE[cells[f'c{i}']] if f'c{i}' in cells else o for i,o in enumerate(grass)), (column, 0))
    seen(0, c27='tree', c28='tree')
    seen(2)  # c27 and c28 are at -4 and -3, now -6 and -5: out of view
    assert ('tree',-5,0) in memory.recall().places
    seen(1, c27='tree')  # the nearer one is a meadow now, as c27 shows the tree at -4+1
    seen(1)
    seen(2)
    assert ('tree',-6,0) in memory.recall().places

def _supplied(world, random):
    "Hand out items and put useful things around the player"
    for o in ITEMS: world.player.items[o] = int(random.choice([0,1,2,4]))
    world.player.energy = int(random.choice([3,8,9]))
    for _ in range(3):
        dx,dy = random.randint(-1, 2, 2).tolist()
        pos,kind = world.player.pos + dx + dy*ROW,str(random.choice(['table','furnace','tree','stone','water','sand','path','iron','grass']))
        if 0 < world.game.shown[pos] < COW: lay(world.game, pos, CODE[kind])

@pytest.mark.parametrize('seed', range(3))
def test_effects_tell_the_truth(seed):
    world,random = World(seed=seed),np.random.RandomState(seed)
    seen = set()
    for i in range(600):
        if i % 5 == 0: _supplied(world, random)
        world.player.health = 9
        before,pos = look(world, 10_000),world.player.pos
        action = ACTIONS[random.randint(len(ACTIONS))]
        world.step(ACTIONS.index(action))
        after = look(world, 10_000)
        said = effect(before, action, after)
        assert ('moved' in said) == (world.player.pos != pos), (i, action, said)
        assert ('turned' in said) == (before.facing != after.facing and world.player.pos == pos), (i, action, said)
        assert parse(format(look(world, 10_000, ((action,said),)))).last == ((action,said),)
        if action.startswith(('make_','place_')) and not before.sleeping:
            assert ('needs' in said) == (dict(before.inventory) == dict(after.inventory)), (i, action, said)
            assert ('needs' in said) == bool(missing(before, action))
        for name in after.achievements[len(before.achievements):]: assert f'unlocked {name}' in said
        seen.add(said.split(',')[0].split()[0])
        if world.done: world.reset()
    assert {'moved','turned','blocked','placed','nothing','asleep','woke'} <= seen

def test_dying_is_told():
    world = World(seed=1)
    lay(world.game, world.player.pos+RIGHT, LAVA)
    before = look(world, 200)
    world.step(ACTIONS.index('move_right'))
    assert effect(before, 'move_right', look(world, 200)) == 'moved into lava, health -9, died'

def test_actions_have_their_own_name_and_no_alias_hides_one():
    from synth_lab.view import ALIASES
    assert all(canonical(o) == o for o in ACTIONS)
    assert not set(ALIASES) & set(ACTIONS) and set(ALIASES.values()) <= set(ACTIONS)
    assert [canonical(o) for o in (None, 5, '', 'jump', 'MOVE LEFT', 'move-left', ' do ')] == [None]*4 + ['move_left','move_left','do']
