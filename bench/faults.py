"""Episodes against a server that fails a fifth of its calls in every way there is, by a client that is killed (-9) three times; prints one JSON line

The client is a process of its own and is resumed after each kill, as somebody would who starts the same cell again. Afterwards the lines of the raw trace, read
without the library, have to tell the same as its tables.

survived: each planned episode has one final status, no turn is missing or there twice, every return and every mean is that of the raw lines
lost_calls: calls that the server saw and the trace does not hold: those under way at the kills, at most `concurrency` each
faults, kinds: calls that failed, and in how many different ways"""
import argparse, json, subprocess, sys, tempfile, time
from pathlib import Path

import httpx, orjson, pandas as pd

from synth_lab.agent import Agent
from synth_lab.client import AsyncInferenceClient
from synth_lab.mock import mock_process
from synth_lab.rollout import rollout_sync
from synth_lab.traces import Store

RUN, FINAL = 'faults', {'done', 'truncated', 'error', 'timeout', 'cancelled'}
SETTINGS = '[limits]\ntimeout = 5\nattempts = 8\nmax_wait = 1\n'

def client(folder, url, episodes, turns, concurrency, processes):
    "What the client's process does; a line for each turn"
    agent = Agent('mock', history=4, max_tokens=64)
    rollout_sync(Store(folder/'lab'), AsyncInferenceClient(base_url=url), agent, range(episodes), run_id=RUN, resume=True, length=10_000, max_turns=turns,
        concurrency=concurrency, processes=processes, max_failures=None, on_turn=lambda e: print(e.turn, flush=True))

def play(folder, arguments, stop):
    "Run the client's process; kill it after `stop` turns, if that is a number"
    command = [sys.executable, str(Path(__file__).absolute()), '--client', json.dumps(arguments)]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    turns = 0
    for _ in child.stdout:
        turns += 1
        if turns == stop: child.kill()
    code = child.wait()
    assert code == (0 if stop is None else -9), f'the client ended with code {code} after {turns} turns'

def raw(folder):
    "The events of the run as a DataFrame a kind, read from the lines as they are; half a line counts as torn"
    kinds,torn = {},0
    for path in sorted((folder/'lab'/'runs'/RUN/'live').glob('*.jsonl')):
        for line in path.read_bytes().split(b'\n')[:-1]:
            try: event = orjson.loads(line)
            except orjson.JSONDecodeError: torn += 1
            else: kinds.setdefault(event['kind'], []).append(event)
    return {k:pd.DataFrame(v) for k,v in kinds.items()},torn

def recount(events):
    "Return, achievements, turns and steps of each episode, from its calls"
    calls = events['call'].sort_values(['episode_id', 'attempt', 'turn'])
    calls = calls[calls.attempt == calls.groupby('episode_id').attempt.transform('max')]
    good = calls[calls.verdict.notna()]
    twice = int(good.duplicated(['episode_id', 'turn']).sum())
    steps = good[['episode_id', 'steps']].explode('steps').dropna()
    steps = pd.concat([steps.episode_id.reset_index(drop=True), pd.DataFrame(steps.steps.tolist())], axis=1)
    by = steps.groupby('episode_id')
    found = pd.DataFrame({'return':by.reward.sum().round(6), 'n_achievements':by.unlocked.agg(lambda o: len({a for u in o for a in u})), 'steps':by.size(), 'last':by.step.max()})
    return found.join(good.groupby('episode_id').turn.agg(['size', 'max']), how='outer').fillna(0),twice

def check(folder, episodes):
    "What is wrong between the tables and the raw lines: {what: how much of it}"
    events,torn = raw(folder)
    table = Store(folder/'lab').sql('SELECT * FROM episodes').set_index('episode_id')
    found,twice = recount(events)
    ok = table[table.status == 'done']
    same = found.loc[ok.index]
    wrong = dict(missing=episodes - table.index.nunique(), doubled=len(table) - table.index.nunique(), not_final=int((~table.status.isin(FINAL)).sum()),
        turns_twice=twice, turns_missing=int((found['size'] != found['max']).sum()), steps_missing=int((found.steps != found['last']).sum()),
        turns=int((ok.turns != same['size']).sum()), steps=int((ok.steps != same.steps).sum()),
        returns=int(((ok['return'] - same['return']).abs() > 1e-6).sum()), achievements=int((ok.n_achievements != same.n_achievements).sum()),
        scored_failures=int(table[~table.status.isin(['done', 'truncated'])]['return'].notna().sum()))
    means = {k:(table.loc[table.status == 'done', k].mean(), same[k].mean()) for k in ('return', 'n_achievements')}
    return {k:v for k,v in wrong.items() if v} | {k:v for k,v in means.items() if abs(v[0]-v[1]) > 1e-9},table,events,torn

def survive(folder, episodes=1000, turns=10, share=.2, kills=3, concurrency=64, processes=1):
    "Play, kill and resume in `folder`; what came of it"
    began = time.time()
    (folder/'settings.ini').write_text(SETTINGS)
    with mock_process(faults=share, wait=.02, slow=.05) as url:
        how = dict(url=url, episodes=episodes, turns=turns, concurrency=concurrency, processes=processes)
        for stop in [episodes*turns//(kills+1)]*kills + [None]: play(folder, how, stop)
        served = httpx.get(f'{url}/counts').json()
    wrong,table,events,torn = check(folder, episodes)
    tries = int(events['call'].tries.map(len).sum())
    return dict(survived=not wrong, wrong=wrong, episodes=episodes, statuses=table.status.value_counts().to_dict(), mean_return=round(table['return'].mean(), 4),
        calls=sum(served.values()), faults=sum(served.values()) - served['good'], kinds=len(served)-1, kills=kills, lost_calls=sum(served.values()) - tries,
        torn_lines=torn, attempts_begun_anew=int((table.attempt > 1).sum()), seconds=round(time.time()-began, 1))

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    for name,default in dict(episodes=1000, turns=10, kills=3, concurrency=64, processes=1).items(): parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--share', type=float, default=.2, help='of the calls that fail')
    parser.add_argument('--client', type=json.loads, help=argparse.SUPPRESS)
    asked = vars(parser.parse_args())
    if how := asked.pop('client'): client(Path.cwd(), **how)
    else:
        with tempfile.TemporaryDirectory() as folder: print(json.dumps(survive(Path(folder), **asked)))
