"""How far the student gets: fine-tuning, then RL of one, five and at most thirty minutes; prints one JSON line

All of it is numpy on one thread. The fine-tuning data are the best 60 of 83 episodes of the scripted expert (worlds 0–82), through rollout, filter and
file. RL plays the worlds 0–199, the long one 0–999, generated before its clock starts. What was learned plays fresh worlds, 200 steps each.

sft60: after fine-tuning
rl60, rl300: after so many CPU seconds of RL
rl_long: after at most 1,800; rl_long_minus_expert: world by world above the scripted expert with a memory
loop_steps_per_cpu_s: of the whole loop of RL in rl60 (128 hidden units; the others have 256): play, advantages, updates

A score is the mean of achievements over worlds and training seeds at temperature 1, with its 95 % interval over the worlds; `seeds` holds the mean of
each training seed and `sd` their spread; `half` is the same at temperature .5; `long` has episodes of 1,000 steps. Each comes with its Crafter score.

PARTS: of sft, rl60, rl300, long, expert; all by default. SEEDS: of the training, such as 0,1,2. BASE, WORLDS: the first of the fresh worlds, and how
many. KEEP: a folder for all that was made, so that parts can be run one by one and a run that was killed goes on; by default a temporary one"""
import json, os, sys, tempfile
from contextlib import redirect_stdout
from pathlib import Path

os.environ['OPENBLAS_NUM_THREADS'] = '1'
import numpy as np
import pandas as pd

from synth_lab.core import publish
from synth_lab.lab import Lab
from synth_lab.lockstep import play
from synth_lab.metrics import crafter_score, mean_ci
from synth_lab.policies import load_policy
from synth_lab.rl import Recipe, rl
from synth_lab.train import one_thread, sft
from synth_lab.world import ACHIEVEMENTS, DIFFICULTIES, genesis

BASE,WORLDS = (int(os.environ.get(k, v)) for k,v in (('BASE', 7000), ('WORLDS', 200)))
SEEDS = [int(o) for o in os.environ.get('SEEDS', '0,1,2').split(',')]
PARTS = os.environ.get('PARTS', 'sft,rl60,rl300,long,expert').split(',')
HELD_OUT = range(BASE, BASE+WORLDS)

FINE_TUNING = dict(epochs=60, val_split=0)
RL = dict(
    rl60=dict(hidden=128, cpu_seconds=60),
    rl300=dict(hidden=256, cpu_seconds=300, recipe=Recipe(lam=.85)),
    long=dict(hidden=256, cpu_seconds=1800, seeds=range(1000), recipe=Recipe(lam=.9, batch=1024, entropy=(.01, .0005))))

def kept(path, make):
    "What `make` returns, or what it returned the last time"
    if path.exists(): return json.loads(path.read_text())
    made = make()
    publish(path, json.dumps(made).encode())
    return made

def teach(keep):
    "The fine-tuning file of the best 60 of 83 episodes"
    lab,path = Lab(keep/'lab', endpoint='local'),keep/'teacher.jsonl'
    if path.exists(): return path
    lab.rollout_sync('expert', range(83), run_id='teacher', resume=True)
    e = lab.episodes.sort_values('n_achievements', ascending=False, kind='stable')
    lab.filter(runs='teacher', seeds=sorted(map(int, e.seed[:60]))).write(path)
    return path

def trained(keep, part, seed):
    "The id of a model, and the steps a CPU second its RL took"
    data,models = teach(keep),keep/'models'
    if part.startswith('sft'):
        hidden = int(part[3:] or 256)
        tune = lambda: dict(model=sft(data, models, hidden=hidden, seed=seed, job=f'sft{hidden}-{seed}', **FINE_TUNING).model)
        return kept(keep/'made'/f'sft{hidden}-{seed}.json', tune)
    how = dict(RL[part])
    start = trained(keep, f'sft{how.pop("hidden")}', seed)['model']
    def run():
        for s in how.get('seeds', range(200)): genesis(s, DIFFICULTIES['normal'])
        def tell(row):
            if not row['iteration']%20: print(part, seed, {k:round(row[k], 3) for k in ('iteration', 'steps', 'score', 'entropy', 'kl')}, file=sys.stderr)
        done = rl(start, models, seed=seed, dataset=data, job=f'{part}-{seed}', state=keep/'state'/f'{part}-{seed}', on_update=tell, **how)
        return dict(model=done.model, steps_per_cpu_s=done.metrics['steps']/done.metrics['cpu_seconds'])
    return kept(keep/'made'/f'{part}-{seed}.json', run)

@one_thread
def scores(keep, model, length, temperature):
    "Which achievements each held-out world saw, (worlds, 22)"
    def run():
        weights,rng,size = load_policy(model, keep/'models').weights,np.random.default_rng(0),20_000//length
        games = (play(weights, HELD_OUT[i:i+size], length, rng, temperature) for i in range(0, WORLDS, size))
        return np.concatenate([o.unlocked.any(0) for o in games]).astype(int).tolist()
    return np.array(kept(keep/'played'/f'{model.replace(":", "-")}-{BASE}-{WORLDS}-{length}-{temperature}.json', run))

def expert(keep, length, samples):
    "The same of the expert with a memory, the mean of some episodes in each world"
    def run():
        lab,run_id = Lab(keep/'lab', endpoint='local'),f'expert-{BASE}-{WORLDS}-{length}'
        lab.rollout_sync('expert', HELD_OUT, memory=True, run_id=run_id, length=length, group_size=samples, resume=True)
        e = lab.sql('SELECT seed, achievements FROM episodes WHERE run_id = ? ORDER BY seed, sample', run_id)
        return [np.mean([[a in o for a in ACHIEVEMENTS] for o in got], 0).tolist() for _,got in e.groupby('seed').achievements]
    return np.array(kept(keep/'played'/f'expert-{BASE}-{WORLDS}-{length}-{samples}.json', run))

def estimate(by_world):
    "Mean and 95 % interval over worlds"
    e = mean_ci(pd.Series(by_world))
    return dict(value=round(e.value, 3), lo=round(e.lo, 3), hi=round(e.hi, 3))

def report(hits):
    "What to say of (training seeds, worlds, 22)"
    got = hits.sum(-1)
    return estimate(got.mean(0)) | dict(seeds=got.mean(1).round(3).tolist(), sd=round(float(got.mean(1).std(ddof=1)), 3) if len(got) > 1 else None,
        crafter_score=round(crafter_score(hits.mean((0, 1))), 2))

def figure(keep, models):
    "All that is said of the models of a part"
    play_all = lambda length, t: np.array([scores(keep, m, length, t) for m in models])
    return report(play_all(200, 1.)) | dict(half=report(play_all(200, .5)), long=report(play_all(1000, 1.)))

def main(keep):
    said,names = {},dict(sft='sft60', rl60='rl60', rl300='rl300', long='rl_long')
    made = {p:[trained(keep, p, s) for s in SEEDS] for p in PARTS if p in names}
    for part,rows in made.items(): said[names[part]] = figure(keep, [o['model'] for o in rows])
    if 'expert' in PARTS:
        said['memory_expert'] = report(expert(keep, 200, 2)[None]) | dict(long=report(expert(keep, 1000, 1)[None]))
    if {'expert', 'long'} <= set(PARTS):
        ours = np.mean([scores(keep, o['model'], 200, 1.).sum(-1) for o in made['long']], 0)
        said['rl_long_minus_expert'] = estimate(ours - expert(keep, 200, 2).sum(-1))
    speeds = [o['steps_per_cpu_s'] for o in made.get('rl60', ())]
    if speeds: said['loop_steps_per_cpu_s'] = dict(value=round(np.mean(speeds)), least=round(min(speeds)), most=round(max(speeds)))
    return dict(worlds=[BASE, WORLDS], training_seeds=SEEDS) | said

if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr): line = main(Path(os.environ.get('KEEP') or folder).absolute())
    print(json.dumps(line))
