"""The world against upstream crafter 1.8.3, side by side in one process; prints one JSON line

Keys that end in _x say how many times faster than upstream, which draws 64×64 frames (step_x_upstream) or draws nothing (step_x_norender), or draws while our game
burns what the frames take from its random stream (step_x_crafter64). Each round plays whole days, so night and its grain have their share, and gives one
ratio for each key; the line holds the medians. Neither side may use numba."""
import json, sys
from statistics import median
from time import perf_counter

sys.modules['numba'] = None # opensimplex would use it where it happens to be installed
import crafter, numpy as np

from synth_lab.view import format, look
from synth_lab.world import World, genesis

ROUNDS, DAY, DAYS = 7, 300, 4 # a round: one day of upstream's game, four of ours

class Blind(crafter.Env):
    "Upstream without pictures"
    def _obs(self): return None

def timed(f, n=1):
    "Seconds of one of `n` calls"
    start = perf_counter()
    for _ in range(n): f()
    return (perf_counter()-start)/n

def best(f):
    "Seconds of a call where nothing else disturbs it: the best of five times five"
    return min(timed(f, 5) for _ in range(5))

def upstream_day(env, actions):
    "Seconds of a step of upstream"
    spent = 0
    for action in actions:
        env._player.inventory['health'] = 9
        start = perf_counter()
        env.step(action)
        spent += perf_counter()-start
    return spent/len(actions)

def our_day(world, actions):
    "Seconds of a step of ours"
    spent = 0
    for _ in range(DAYS):
        world.reset()
        for action in actions:
            world.player.health = 9
            start = perf_counter()
            world.step(action)
            spent += perf_counter()-start
    return spent/len(actions)/DAYS

def along(world, blind, actions):
    "Seconds of snapshot with restore, of a text and of a frame, the longest snapshot, and upstream's seconds of a frame, at 30 moments of a day"
    world.reset()
    seconds,longest,moments = np.zeros(4),0,0
    for action in actions:
        world.player.health = blind._player.inventory['health'] = 9
        world.step(action)
        blind.step(action)
        if world.step_count % 10: continue
        moments += 1
        longest = max(longest, len(world.snapshot()))
        seconds += [best(o) for o in (lambda: World.restore(world.snapshot()), lambda: format(look(world, DAY)), world.frame, blind.render)]
    return *(seconds/moments), longest

def one_round(seed, drawing, blind):
    "The figures of one seed"
    actions = np.random.RandomState(seed).randint(0, 17, DAY).tolist()
    drawing._seed = blind._seed = seed
    drawing._episode = blind._episode = 0
    their_reset = timed(blind.reset)
    genesis.cache_clear()
    cold = timed(lambda: World(seed))
    world,burning = World(seed),World(seed, rng='crafter-64')
    cached = timed(world.reset, 200)
    drawing.reset()
    drawn,ours,unseen,burnt = upstream_day(drawing, actions),our_day(world, actions),upstream_day(blind, actions),our_day(burning, actions)
    blind._episode = 0
    blind.reset()
    copied,text,frame,their_frame,longest = along(world, blind, actions)
    return dict(step_x_upstream=drawn/ours, step_x_norender=unseen/ours, step_x_crafter64=drawn/burnt, reset_cold_x=their_reset/cold, reset_cached_x=their_reset/cached,
        snapshot_restore_us=copied*1e6, snapshot_bytes=longest, text_us=text*1e6, frame_x=their_frame/frame, steps_per_s=1/ours)

def main():
    drawing,blind = crafter.Env(),Blind()
    rounds = [one_round(seed, drawing, blind) for seed in range(ROUNDS)]
    print(json.dumps({k:round(median(o[k] for o in rounds), 1) for k in rounds[0]}))

if __name__ == '__main__': main()
