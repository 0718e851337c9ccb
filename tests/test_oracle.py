"""Upstream crafter 1.8.3 as the oracle: state, random stream, rewards and frames must be equal after every step

Upstream starts from our worlds, because it needs seconds to make one; that these are its worlds is checked on their own. `make oracle` plays half a million steps."""
import json, os, struct, subprocess, sys
from hashlib import sha256

import crafter, numpy as np, pytest
from crafter import engine, objects

from synth_lab.world import (ACHIEVEMENTS, ACTIONS, ARROW, CHUNK_CELLS, CHUNKS, CODE, COW, DIFFICULTIES, DISTANCE, DOWN, FURNACE, GRASS, ITEMS, KINDS, LAVA, LEFT, PATH, PLAYER,
    RIGHT, RIPE, SAPLING, SKELETON, STEP, TABLE, UP, WATER, ZOMBIE, World, below, cell, column_row, lay, mersenne, put, relocate, remove, seeded, state_bytes)

STEPS = int(os.environ.get('ORACLE_STEPS', 21_600)) # of free play, over all seeds

class OrderedChunks(engine.World):
    "Upstream's map with the members of a chunk in order of birth, where upstream has the order of their addresses"
    @property
    def chunks(self): return {k:sorted(v, key=lambda o: self._obj_map[tuple(o.pos)]) for k,v in self._chunks.items()}

NAMES = {objects.Cow:'cow', objects.Zombie:'zombie', objects.Skeleton:'skeleton', objects.Arrow:'arrow', objects.Plant:'plant'}
CLOCKS = {objects.Zombie:'cooldown', objects.Skeleton:'reload', objects.Plant:'grown'}

def make_env(**kwargs):
    env = crafter.Env(**kwargs)
    env._world.__class__ = OrderedChunks
    return env

@pytest.fixture(scope='module')
def env(): return make_env()

def upstream_bytes(env):
    "The bytes of `state_bytes`, written from upstream's objects"
    world,player = env._world,env._player
    rows = []
    for o in world.objects[1:]:
        more = [int(n) for n in o.facing] if type(o) is objects.Arrow else [int(getattr(o, CLOCKS[type(o)]))] if type(o) in CLOCKS else []
        rows.append([NAMES[type(o)], *o.pos.tolist(), int(o.health), *more])
    _,words,place,*_ = world.random.get_state()
    head = dict(step=env._step, pos=player.pos.tolist(), facing=[int(n) for n in player.facing], sleeping=player.sleeping, last_health=player._last_health,
        clocks=[int(2*n) for n in (player._hunger, player._thirst, player._fatigue, player._recover)], items=list(player.inventory.values()),
        achievements=sorted(k for k,n in player.achievements.items() if n), objects=rows, chunks=[(int(o[0]), int(o[2])) for o in world._chunks], place=place)
    head = json.dumps(head, separators=(',',':')).encode()
    return struct.pack('<I', len(head)) + head + world._mat_map.tobytes() + words.tobytes()

def words(world):
    "The random stream after what upstream's frame of this moment takes from it"
    stream = mersenne(world.game.random.getstate()[1])
    if world._owes: stream.getrandbits(32*6174)
    return stream.getstate()[1]

def our_bytes(world):
    "The bytes of the state, with the achievements sorted: upstream does not know their order"
    g,order = world.game,world.achievements
    g.achievements = tuple(sorted(order))
    data = state_bytes(g, words(world))
    g.achievements = order
    return data

def inject(env, world):
    "Put upstream into the state of `world`"
    g,p,theirs = world.game,world.player,env._world
    theirs.reset(seed=0)
    theirs._mat_map[:] = np.frombuffer(g.ground, np.uint8).reshape(-1,128)[4:-4,:64].T
    *key,place = words(world)
    theirs.random.set_state(('MT19937', key, place))
    for x,y in (CHUNKS[o] for o in g.chunks): theirs._chunks[theirs.chunk_key((x,y))]
    player = env._player = objects.Player(theirs, column_row(p.pos))
    player.facing,player.sleeping,player._last_health = STEP[p.way],p.sleeping,p.last_health
    player._hunger,player._thirst,player._fatigue,player._recover = (o/2 for o in (p.hunger, p.thirst, p.fatigue, p.recovery))
    player.inventory = dict(world.vitals) | dict(p.items)
    player.achievements.update(dict.fromkeys(world.achievements, 1))
    env._step,env._last_health,env._unlocked,env._length = g.step,p.health,set(world.achievements),world.length
    theirs.add(player)
    for o in g.things:
        cls = {COW:objects.Cow, ZOMBIE:objects.Zombie, SKELETON:objects.Skeleton, ARROW:objects.Arrow}.get(o.kind, objects.Plant)
        more = {ZOMBIE:(player,), SKELETON:(player,), ARROW:(np.array(STEP[o.state]) if o.kind == ARROW else None,)}.get(o.kind, ())
        thing = cls(theirs, column_row(o.pos), *more)
        thing.health = o.health
        if cls in CLOCKS: setattr(thing, CLOCKS[cls], o.state)
        theirs.add(thing)
    env._update_time()
    return env

def unequal(theirs, ours):
    "What differs between two states, by part"
    heads = [json.loads(o[4:4+struct.unpack_from('<I', o)[0]]) for o in (theirs,ours)]
    found = {k:(v,heads[1][k]) for k,v in heads[0].items() if v != heads[1][k]}
    if 'objects' in found: found['objects'] = [o for o in zip(*found['objects']) if o[0] != o[1]] or found['objects']
    return found or 'map or words of the random stream'

def both(env, world, actions, frames=False):
    "Play in both games and compare everything after every step"
    for action in actions:
        if isinstance(action, str): action = ACTIONS.index(action)
        obs,reward,done,info = env.step(action)
        _,mine,terminated,truncated,my_info = world.step(action)
        where = f'seed {world.seed}, step {world.step_count}, {ACTIONS[action]}'
        assert (reward, bool(done)) == (mine, terminated or truncated), where
        assert {k for k,n in info['achievements'].items() if n} == set(my_info['achievements']), where
        theirs,ours = upstream_bytes(env),our_bytes(world)
        if theirs != ours: pytest.fail(f'{where}: {unequal(theirs, ours)}')
        if frames: assert np.array_equal(obs, world.frame(64)), where
        if world.done: return world
    return world

def blind(env):
    "Upstream that draws nothing, as `rng='pure'`"
    env._obs = lambda: None
    return env

@pytest.fixture(scope='module')
def blind_env(): return blind(make_env())

# ---- new worlds

# state_hash of new worlds, computed from worlds that crafter 1.8.3 made
UPSTREAM = {0:'73ce8eae6c9dd7f4', 1:'a6f82afe547da6cc', 2:'52cadf86d8bafa77', 3:'8aff70660459ea7b', 4:'4fed30461210d395',
    5:'bf3ee57a38465f45', 6:'04f9a22e9ab70e0f', 7:'a40169044e1cd669', 8:'bdc5f390fc8e41bd', 9:'158adc33e793ba30',
    10:'a499232ff0963491', 11:'9e47548f14a18155', 12:'8d5d39d916218606', 13:'f41ea0261245b94b', 14:'21ebda0401f4841c',
    15:'5f60e6b6bb5acd9f', 16:'ab6cc9f8dc7d9b87', 17:'e3f806a2c9a3b2d3', 18:'c6dbf7a951da4afb', 19:'53e89825158506d1',
    20:'fceb2b81fbe4dee7', 21:'efff6ff570a36b88', 22:'b20497f87583f1d2', 23:'26a5dc77b9c1b845', 24:'032ff183d4af6a36',
    25:'a789b49993eb1994', 26:'f6ab3ecb9b382322', 27:'4609c837a986dd13', 28:'fe5698d46e73e309', 29:'e35c5907db5b4867',
    30:'80cf1eb47832c411', 31:'20f9cfd1c7519092', 32:'10ad312462759680', 33:'e3c15868a6c3b2bb', 34:'3d54bbf445e63427',
    35:'660b44ae95655442', 36:'6ac8bd86afb35c7e', 37:'14522658dc315075', 38:'3198ea107d0927db', 39:'17b51eedf89990f5',
    101:'d3b65bc550885eea', 202:'626c63f4c0ea8a29', 303:'e74ec43067a344e8', 404:'5307e231a96190e3', 999:'f14a0d1b3e23bca5',
    1000:'853418d2eb87a209', 5000:'1b136c37ca1bc2e0', 123456789:'0b88a46dea9f2b28', 2147483647:'77b69f93e201d9a3', 1099511627776:'a7d47e2d8e4425da'}

@pytest.mark.parametrize('seed', UPSTREAM)
def test_new_worlds_are_upstreams(seed): assert World(seed=seed).state_hash() == UPSTREAM[seed]

@pytest.mark.parametrize('seed', [6, 71, 2**33])
def test_upstream_makes_the_same_world_here_and_now(seed):
    env = make_env(seed=seed)
    env.reset()
    assert upstream_bytes(env) == our_bytes(World(seed=seed))

def test_the_golden_names_are_those_of_the_documented_bytes():
    assert World(seed=5).state_hash() == sha256(our_bytes(World(seed=5))).hexdigest()[:16]

def test_whole_numbers_are_drawn_as_numpy_draws_them():
    ours,numpys = seeded(3),np.random.RandomState(3)
    for n in [*range(1, 300), 2**31-1]*5: assert below(ours.getrandbits, n) == numpys.randint(0, n)
    assert ours.random() == numpys.uniform()
    before = ours.getstate()
    assert below(ours.getrandbits, 1) == 0 and ours.getstate() == before

# ---- free play

MIX = [1,2,3,4,1,2,3,4,5,5,5,5,5,5,*range(17)]

def gifts(world, random):
    "Full vitals, mostly, and some items"
    p = world.player
    p.health,p.food,p.drink,p.energy = 9,7,7,int(random.choice([2,8,9]))
    for o in ITEMS: p.items[o] = int(random.choice([0,0,1,2,5,9]))
    p.last_health = 9

def paint(world, random):
    "Strange ground and creatures around the player, who now stands somewhere else, often at the edge"
    g = world.game
    x,y = (int(random.choice([0,1,2,31,61,62,63])) for _ in 'xy')
    if g.shown[cell(x,y)] < COW: relocate(g, g.player, cell(x,y))
    for _ in range(int(random.randint(3, 25))):
        x,y = (o + int(random.randint(-3, 4)) for o in column_row(g.player.pos))
        if not (0 <= x < 64 and 0 <= y < 64) or g.shown[cell(x,y)] >= COW: continue
        lay(g, cell(x,y), int(random.randint(1, COW)))
        if random.randint(4) == 0: put(g, int(random.choice([COW,ZOMBIE,SKELETON,SAPLING])), cell(x,y))
        elif random.randint(12) == 0: put(g, ARROW, cell(x,y), int(random.choice([LEFT,RIGHT,UP,DOWN])))
    for o in g.things:
        if o.kind in (SAPLING,RIPE):
            o.state = int(random.choice([0,299,300,301,400]))
            o.kind = g.shown[o.pos] = RIPE if o.state > 300 else SAPLING

def free_play(env, seed, steps, wild):
    "Random play of a world; `wild` repaints it again and again"
    random,world = np.random.RandomState(seed),World(seed=seed)
    seen,played = set(),0
    while played < steps:
        gifts(world, random)
        if wild: paint(world, random)
        inject(env, world)
        n = int(random.randint(10, 40) if wild else 120)
        start = world.step_count
        both(env, world, random.choice(MIX, n).tolist())
        played += world.step_count - start
        seen |= set(world.achievements)
        if world.done: world = World(seed=seed + 1000*played)
        elif random.randint(3) == 0: world = World.restore(world.snapshot())
    return seen

@pytest.mark.parametrize('seed', range(24))
def test_free_play_is_upstreams_step_by_step(blind_env, seed):
    assert len(free_play(blind_env, seed, STEPS//24, wild=seed%2)) >= 6

def test_a_game_goes_on_beyond_its_usual_end(blind_env):
    world = World(seed=8, length=20_000)
    world.game.step = 9_995
    both(inject(blind_env, world), world, [5]*30)
    assert world.step_count > 10_020 and not world.done

# ---- all 22 achievements

def bare(ground=GRASS, seed=1):
    "A world of one material with nobody but the player"
    world = World(seed=seed)
    g = world.game
    for o in g.things[:]: remove(g, o)
    for pos in (o for cells in CHUNK_CELLS for o in cells): lay(g, pos, ground)
    g.shown[g.player.pos],g.player.way = PLAYER,RIGHT
    return world

def stand(world, x, y, facing=RIGHT):
    "Put the player somewhere"
    if world.player.pos != cell(x,y): relocate(world.game, world.player, cell(x,y))
    world.player.way = facing

def ahead(world, kind, steps=1, **attributes):
    "Put a kind in front of the player"
    g,p = world.game,world.player
    pos = p.pos + steps*p.way
    if g.shown[pos] >= COW: remove(g, next(o for o in g.things if o.pos == pos))
    if CODE[kind] < COW: return lay(g, pos, CODE[kind])
    lay(g, pos, GRASS)
    put(g, CODE[kind], pos)
    for k,v in attributes.items(): setattr(g.things[-1], k, v)
    g.shown[pos] = g.things[-1].kind
    return g.things[-1]

SCRIPT = [ # what is put in front of the player, what the player does, what that unlocks
    ('tree', 'do', 'collect_wood'), *[('tree', 'do', None)]*8, ('grass', 'place_table', 'place_table'),
    (None, 'make_wood_pickaxe', 'make_wood_pickaxe'), (None, 'make_wood_sword', 'make_wood_sword'),
    ('stone', 'do', 'collect_stone'), *[('stone', 'do', None)]*8, ('water', 'place_stone', 'place_stone'),
    ('table', 'make_stone_pickaxe', 'make_stone_pickaxe'), (None, 'make_stone_sword', 'make_stone_sword'), ('sand', 'place_furnace', 'place_furnace'),
    *[('coal', 'do', None)]*2, ('iron', 'do', 'collect_iron'), ('iron', 'do', None), ('furnace', 'noop', 'collect_coal'),
    ('table', 'make_iron_pickaxe', 'make_iron_pickaxe'), (None, 'make_iron_sword', 'make_iron_sword'), ('diamond', 'do', 'collect_diamond'),
    ('water', 'do', 'collect_drink'), ('cow', 'do', 'eat_cow'), ('zombie', 'do', 'defeat_zombie'), ('skeleton', 'do', 'defeat_skeleton')]

def test_all_22_achievements_by_script(blind_env):
    world = bare()
    def perform(action, wanted, tries=1):
        for _ in range(tries):
            both(inject(blind_env, world), world, [action])
            if wanted in world.achievements: return
        assert wanted is None, f'{action} did not unlock {wanted}'
    for thing,action,wanted in SCRIPT:
        world.player.health = world.player.last_health = 9
        if thing: ahead(world, thing)
        if action == 'make_iron_pickaxe': lay(world.game, world.player.pos+LEFT, FURNACE)
        perform(action, wanted)
    ahead(world, 'grass')
    perform('do', 'collect_sapling', tries=100)
    perform('place_plant', 'place_plant')
    plant = next(o for o in world.game.things if o.kind == SAPLING)
    for way in (UP,DOWN,RIGHT): lay(world.game, plant.pos+way, WATER)
    for way in (UP,DOWN): lay(world.game, world.player.pos+way, WATER)
    for _ in range(301):
        for o in world.game.things[:]:
            if o is not plant: remove(world.game, o)
        world.player.health = world.player.last_health = world.player.food = world.player.drink = 9
        perform('noop', None)
        plant = next(o for o in world.game.things if o.kind in (SAPLING,RIPE))
    assert plant.kind == RIPE
    perform('do', 'eat_plant')
    world.player.energy = 8
    perform('sleep', None)
    perform('noop', 'wake_up', tries=20)
    assert set(world.achievements) == set(ACHIEVEMENTS)

# ---- rules that are easy to lose, one by one

def lucky(world, actions, wanted):
    "A fork whose random stream lets `wanted` come true"
    for seed in range(400):
        fork = world.fork()
        fork.game.random.setstate(seeded(seed).getstate())
        start = fork.fork()
        for o in actions: fork.step(ACTIONS.index(o))
        if wanted(fork): return start
    raise AssertionError('no random stream lets it happen')

def test_a_dead_zombie_still_bites(blind_env):
    world = bare()
    ahead(world, 'zombie', health=1)
    both(inject(blind_env, world), world, ['do'])
    assert world.achievements == ('defeat_zombie',) and not world.game.things and world.player.health == 7

def test_a_dead_skeleton_may_still_shoot(blind_env):
    world = bare(PATH)
    ahead(world, 'skeleton', 3, health=0)
    ahead(world, 'stone', 4)
    start = lucky(world, ['noop'], lambda o: any(t.kind == ARROW for t in o.game.things))
    both(inject(blind_env, start), start, ['noop'])
    assert [KINDS[o.kind] for o in start.game.things] == ['arrow']

def test_a_dead_cow_draws_its_random_numbers_but_stays(blind_env):
    world = bare()
    cow = ahead(world, 'cow', health=1)
    pos,before = cow.pos,world.game.random.getstate()
    both(inject(blind_env, world), world, ['do'])
    assert not world.game.things and world.game.shown[pos] == GRASS and world.game.random.getstate() != before

@pytest.mark.parametrize('x,y,works', [(0,5,False), (5,0,False), (0,0,False), (1,1,True), (63,63,True), (63,5,True)])
def test_nothing_is_nearby_in_the_first_column_and_row(blind_env, x, y, works):
    world = bare()
    stand(world, x, y, LEFT if x else RIGHT)
    lay(world.game, cell(*(o-1 if o else o+1 for o in (x,y))), TABLE)
    world.player.items['wood'] = 1
    both(inject(blind_env, world), world, ['make_wood_pickaxe'])
    assert ('make_wood_pickaxe' in world.achievements) == works

def test_only_the_player_walks_into_lava(blind_env):
    world = bare(LAVA)
    for kind,way in (('cow',UP), ('zombie',DOWN), ('skeleton',RIGHT)):
        world.player.way = way
        ahead(world, kind, 2)
    where = [o.pos for o in world.game.things]
    both(inject(blind_env, world), world, ['noop']*8)
    assert [o.pos for o in world.game.things if o.kind != ARROW] == where
    both(inject(blind_env, world), world, ['move_left'])
    assert world.dead

@pytest.mark.parametrize('material,action,draws', [('tree','do',1), ('water','do',1), ('grass','do',1), ('stone','do',0), ('sand','do',0), ('grass','place_plant',0)])
def test_collecting_draws_one_number_even_where_it_cannot_fail(blind_env, material, action, draws):
    world = bare()
    ahead(world, material)
    expected = world.fork().game.random
    for _ in range(draws): expected.random()
    both(inject(blind_env, world), world, [action])
    assert world.game.random.getstate() == expected.getstate()

@pytest.mark.parametrize('age,eaten', [(0,False), (299,False), (300,False), (301,True)])
def test_only_a_ripe_plant_is_eaten_and_an_unripe_one_is_not_hurt(blind_env, age, eaten):
    world = bare()
    plant = ahead(world, 'ripe_plant' if age > 300 else 'sapling', state=age)
    world.player.food = 3
    both(inject(blind_env, world), world, ['do'])
    assert (plant.health, plant.state, world.player.food, 'eat_plant' in world.achievements) == (1, 1 if eaten else age+1, 7 if eaten else 3, eaten)

def test_food_beyond_nine_pays_for_the_hunger_of_the_turn(blind_env):
    world = bare()
    ahead(world, 'ripe_plant', state=400)
    world.player.food,world.player.hunger = 8,50
    both(inject(blind_env, world), world, ['do'])
    assert world.player.food == 9

@pytest.mark.parametrize('target,left', [('table','path'), ('furnace','path'), ('stone','stone'), ('tree','tree')])
def test_arrows_break_tables_and_furnaces(blind_env, target, left):
    world = bare()
    ahead(world, target, 3)
    ahead(world, 'arrow', 2, state=RIGHT)
    both(inject(blind_env, world), world, ['noop'])
    assert not world.game.things and KINDS[world.game.ground[world.player.pos+3]] == left

@pytest.mark.parametrize('material,over', [('water',True), ('lava',True), ('sand',True), ('stone',False), ('diamond',False)])
def test_arrows_fly_over_water_and_lava(blind_env, material, over):
    world = bare()
    ahead(world, material, 3)
    ahead(world, 'arrow', 2, state=RIGHT)
    both(inject(blind_env, world), world, ['noop'])
    assert [o.pos-world.player.pos for o in world.game.things] == ([3] if over else [])

def test_an_arrow_hits_whatever_it_meets(blind_env):
    for kind,health in (('cow',1), ('zombie',3), ('skeleton',1), ('sapling',0), ('arrow',0)):
        world = bare()
        stand(world, 20, 20)
        victim = ahead(world, kind, 9)
        ahead(world, 'arrow', 8, state=RIGHT)
        world.game.things.reverse() # the arrow acts first
        if kind == 'arrow': victim.state = LEFT
        both(inject(blind_env, world), world, ['noop'])
        assert victim.health == health, kind
    world = bare()
    ahead(world, 'arrow', 1, state=LEFT)
    both(inject(blind_env, world), world, ['noop'])
    assert world.player.health == 7 and not world.game.things

def test_an_arrow_dies_at_the_edge(blind_env):
    world = bare()
    stand(world, 60, 0)
    ahead(world, 'arrow', 1, state=RIGHT)
    both(inject(blind_env, world), world, ['noop']*2)
    assert column_row(world.game.things[0].pos) == (63,0)
    both(inject(blind_env, world), world, ['noop'])
    assert not world.game.things

@pytest.mark.parametrize('distance,wakes', [(17,True), (18,False)])
def test_what_is_18_steps_away_sleeps(blind_env, distance, wakes):
    world = bare()
    plant = ahead(world, 'sapling', distance)
    both(inject(blind_env, world), world, ['noop'])
    assert DISTANCE[plant.pos-world.player.pos] == distance and plant.state == wakes

def test_whether_something_sleeps_is_decided_after_the_player_moved(blind_env):
    world = bare()
    plant = ahead(world, 'sapling', 18)
    both(inject(blind_env, world), world, ['move_right'])
    assert plant.state == 1

def test_what_is_born_in_a_step_has_its_first_turn_in_the_next(blind_env):
    world = bare()
    world.player.items['sapling'] = 1
    both(inject(blind_env, world), world, ['place_plant'])
    assert world.game.things[0].state == 0
    both(inject(blind_env, world), world, ['noop'])
    assert world.game.things[0].state == 1

def test_chunks_are_balanced_in_the_order_of_first_use(blind_env):
    "The first chunk that draws takes the first number of the stream, so the order decides who is born"
    world = bare()
    world.game.step = 149
    for x,y in ((60,60), (2,2), (30,60)):
        put(world.game, COW, cell(x,y))
    assert [CHUNKS[o] for o in world.game.chunks[-3:]] != sorted(CHUNKS[o] for o in world.game.chunks[-3:])
    backwards = world.fork()
    backwards.game.chunks.reverse()
    for o in (world,backwards): both(inject(blind_env, o), o, ['noop'])
    assert world.state_hash() != backwards.state_hash()
    both(inject(blind_env, world), world, ['noop']*60)

def test_who_vanishes_is_picked_in_the_order_of_birth(blind_env):
    world = bare()
    world.game.step,spots = 9,[(50,50), (49,53), (55,50), (48,48)]
    for x,y in spots: put(world.game, COW, cell(x,y))
    start = lucky(world, ['noop'], lambda o: len(o.game.things) == 3)
    spy = start.fork()
    while spy.game.draw() >= .1: pass # chunks without creatures draw before, as the oracle confirms
    both(inject(blind_env, start), start, ['noop'])
    gone = (set(spots) - {column_row(o.pos) for o in start.game.things}).pop()
    assert gone == spots[below(spy.game.word, 4)]

def test_sleep_ends_when_hurt_but_only_rest_is_an_achievement(blind_env):
    world = bare()
    world.player.sleeping,world.player.energy = True,5
    ahead(world, 'zombie')
    both(inject(blind_env, world), world, ['noop']*2)
    assert not world.sleeping and world.player.health == 2 and world.achievements == ()
    world.player.sleeping,world.player.energy = True,9
    both(inject(blind_env, world), world, ['noop'])
    assert world.achievements == ('wake_up',)

# ---- the edge of the map

@pytest.mark.parametrize('x,y', [(0,0), (63,0), (0,63), (63,63), (0,31), (31,63)])
def test_life_at_the_edge_is_upstreams(blind_env, x, y):
    random,world = np.random.RandomState(x+y),World(seed=4)
    for _ in range(6):
        gifts(world, random)
        if world.game.shown[cell(x,y)] < COW: stand(world, x, y, int(random.choice([LEFT,RIGHT,UP,DOWN])))
        for dx,dy in ((1,1), (2,1), (1,2), (2,2)):
            pos = cell(abs(x-dx), abs(y-dy))
            if world.game.shown[pos] < COW:
                lay(world.game, pos, PATH)
                put(world.game, int(random.choice([ZOMBIE,SKELETON,COW,SAPLING])), pos)
        both(inject(blind_env, world), world, random.choice(MIX, 15).tolist())
        if world.done: world = World(seed=5)

# ---- frames

@pytest.mark.parametrize('seed', [3,14,27])
def test_a_day_and_a_night_of_upstreams_own_frames(env, seed):
    "`crafter-64`: game and pictures are those of an upstream that draws, grain included"
    random,world = np.random.RandomState(seed),World(seed=seed, rng='crafter-64')
    for start in (0, 140, 175, 230, 268):
        gifts(world, random)
        if start: paint(world, random)
        world.player.sleeping = start == 230
        world.game.step = start
        both(inject(env, world), world, random.choice(MIX, 25).tolist(), frames=True)
        if world.done: world = World(seed=seed+100, rng='crafter-64')

@pytest.mark.parametrize('size', [(64,64), (200,200), (180,90), (61,130), (18,18), (500,300)])
@pytest.mark.parametrize('step', [5,150,200])
def test_frames_of_any_size_are_upstreams(blind_env, size, step):
    "`pure`: the frame is what upstream's `render` shows of this state"
    random,world = np.random.RandomState(step),World(seed=9)
    gifts(world, random)
    paint(world, random)
    world.game.step = step
    before = world.state_hash()
    inject(blind_env, world)._size = np.array(size)
    assert np.array_equal(world.frame(size), blind_env.render())
    assert world.state_hash() == before

# ---- processes

PROCESS = '''
import sys
from synth_lab.world import World
for rng in ('pure', 'crafter-64'):
    world = World(seed=2, rng=rng)
    for i in range(300):
        if world.done: break
        world.step(i*7 % 17 if i < 150 else 6)
        if sys.argv[1] == 'draw': world.frame(100)
    print(world.step_count, world.state_hash())
'''

def test_five_processes_agree_whether_they_draw_or_not():
    runs = [subprocess.Popen([sys.executable, '-c', PROCESS, draw], env={**os.environ, 'PYTHONHASHSEED':str(i)}, stdout=subprocess.PIPE, text=True)
        for i,draw in enumerate(['draw','blind','draw','blind','draw'])]
    said = {o.communicate()[0] for o in runs}
    assert len(said) == 1 and len(said.pop().split()) == 4 and not any(o.returncode for o in runs)

# ---- difficulty

def test_normal_is_crafter_and_the_others_are_not():
    assert [World(seed=1, difficulty=o).state_hash() == UPSTREAM[1] for o in DIFFICULTIES] == [o == 'normal' for o in DIFFICULTIES]
