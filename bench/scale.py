"""Workers on Ray against one process, and a run of a million turns that is asked the twelve questions of `howto/ask_your_traces`; prints one JSON line

Workers: a mock server in a process of its own answers each call after 50 ms. One process plays 16 episodes at once, two workers on Ray play 16 each, all with traces on; 20 turns an episode, on 8 worlds. Each
of ROUNDS rounds measures every figure once, one after the other; the line holds the medians. A rate is that of the middle half of a run's calls, so neither the start of the workers nor the end of the last
episodes is in it.

ray_x_one_process: calls a second of two workers by those of one process, at 16 episodes each: work that waits for the model; `calls_per_s` of both
ray_x_at_64: the same at 64 each, where one process is no longer waiting but busy, and so are two cores with two workers and the server
ray_cluster_s, ray_run_s: seconds until a local cluster is there; from the call of `rollout` to the first call of the model, on a cluster that is there

The million turns: 25,000 episodes of real games, sixty of the expert and sixty of chance, under new names and in other lengths of an episode, so that hardly two messages are the same; the thoughts
are 2 to 4 kB of prose, one try in thirty had to wait, one reply in fifty could not be used, and a judge said a word on each. Written by one `RunWriter`, 100 episodes at a time taking turns, sealed behind it,
merged and cleaned at the end. The queries are read from the notebook; each of the runs that they name is the one big run.

questions: seconds for all queries of a question, each the best of 3; `slowest_question_s` is the longest of the twelve
first_look_s: from opening the lab to the first answer, `SELECT count(*) FROM episodes`
open_episode_ms: the median episode of 20, opened whole: its calls with all their texts, messages, steps; best of 3
lines_gb, sealed_gb: bytes of lines that were written, by a million turns; bytes on disk once all is sealed, merged and cleaned
ingest_turns_s: turns written a second of the writer's time, sealing behind it included; seal_s: what was left to seal and to merge at the end"""
import ast, asyncio, json, os, re, shutil, tempfile, time
from itertools import islice
from pathlib import Path
from statistics import median

from traces import Games, clock

from synth_lab import labels, seal # they grow `Store`
from synth_lab.agent import Agent
from synth_lab.client import AsyncInferenceClient
from synth_lab.cluster import Ray, connect
from synth_lab.mock import mock_process
from synth_lab.rollout import rollout
from synth_lab.traces import Store

TURNS, AT_ONCE, RUN, ROUNDS = int(os.environ.get('TURNS', 1_000_000)), 100, 'big', 5
ASKED = Path(__file__).parent.parent/'nbs/howto/ask_your_traces.ipynb'
UNUSABLE = ['malformed', 'no_call', 'unknown_tool', 'invalid_action', 'truncated']
PRAISED = 'wood tree stone coal iron'.split()

def play(store, model, url, *what, **how):
    "A run of what answers at `url`"
    async def go():
        async with AsyncInferenceClient(base_url=url) as client: return await rollout(store, client, Agent(model), *what, **how)
    return asyncio.run(go())

# Workers

STEADY = """SELECT count(*)/2 / epoch(quantile_disc(started_at, .75) - quantile_disc(started_at, .25)) AS rate, epoch(min(started_at)) AS first,
    count(*) FILTER (verdict IS NULL) AS failed FROM calls"""

def rate(url, workers, at_once):
    "(Calls a second of `workers` on Ray, or of this process when there are none; seconds until the first call)"
    n = workers or 1
    with tempfile.TemporaryDirectory() as folder:
        store,began = Store(folder),time.time()
        play(store, 'mock', url, range(8), group_size=at_once*n//2, concurrency=at_once*n, length=10_000, max_turns=20, executor=Ray(workers) if workers else None)
        found = store.rows(STEADY)[0]
    assert not found['failed']
    return found['rate'],found['first']-began

def workers():
    "The figures of workers"
    began = time.perf_counter()
    connect(cores=2)
    cluster = time.perf_counter()-began
    with mock_process(latency=.05) as url:
        rate(url, 0, 16) # the worlds are made
        rounds = [{(n, k):rate(url, n, k) for k in (16, 64) for n in (0, 2)} for _ in range(ROUNDS)]
    calls = {o:median(r[o][0] for r in rounds) for o in rounds[0]}
    x = lambda k: median(r[2, k][0]/r[0, k][0] for r in rounds)
    return dict(ray_x_one_process=x(16), calls_per_s=[round(calls[n, 16]) for n in (0, 2)], ray_x_at_64=x(64), calls_per_s_at_64=[round(calls[n, 64]) for n in (0, 2)],
        ray_cluster_s=cluster, ray_run_s=median(r[2, k][1] for r in rounds for k in (16, 64)))

# A million turns

def record(folder):
    "Real games of two players: lists of what one turn after the other was, and how they ended"
    store = Store(folder)
    for model in ('expert', 'random'): play(store, model, 'local', range(30), group_size=2, run_id=model, seed=1)
    found = [store.episode(o['episode_id']) for o in store.rows('SELECT episode_id FROM episodes ORDER BY md5(episode_id)')]
    return [(o.row, [(c, json.loads(o.bodies[c['prompt_ids'][-1]])['content'], json.loads(o.bodies[c['output_id']])) for c in o.calls]) for o in found]

class Million(Games):
    "The games again and again, each time as another episode"
    def __init__(self, games):
        super().__init__()
        self.games,self.system,self.tools = games,dict(role='system', content=Agent('expert').system),Agent('expert').tools

    def episode(self, n):
        "The events of episode `n`, turn by turn"
        row,calls = self.games[n % len(self.games)]
        who = dict(episode_id=f'{RUN}:{n//2}:{n%2}', attempt=1)
        yield 'episode',who | dict(started_at='2026-01-31T12:00:00.000Z')
        for c,saw,output in calls: yield 'call',(who, n, c, saw, output)
        total = {k:sum(c[k] for c,*_ in calls) for k in ('input_tokens', 'output_tokens')}
        yield 'episode_end',who | total | {'status':'done', 'ended_by':row['ended_by'], 'turns':len(calls), 'steps_played':row['steps'], 'calls':len(calls), 'return':row['return'],
            'achievements':row['achievements'], 'unlock_steps':row['unlock_steps'], 'unusable':len(calls)//50, 'verdicts':row['verdicts'], 'cost_usd':.01*len(calls),
            'ended_at':'2026-01-31T12:50:00.000Z', 'wall_s':60.}

    def call(self, writer, who, n, c, saw, output):
        "Write one turn, and what a judge thinks of it"
        rng,thought = self.rng,self.think()
        steps = [o if rng.random() < .9 else o | dict(health=rng.randrange(1, 10)) for o in c['steps']]
        bad = rng.choice(UNUSABLE) if rng.random() < .02 else None
        tries = [dict(http_status=429, latency_ms=1., waited_s=0.), dict(http_status=200, latency_ms=900., waited_s=round(rng.uniform(0, 3), 2))][0 if rng.random() < .033 else 1:]
        said = dict(role='assistant', content=None, reasoning_content=thought, tool_calls=output['tool_calls'])
        usage = dict(prompt_tokens=c['input_tokens'], completion_tokens=len(thought)//4)
        raw = dict(id=f'chatcmpl-{rng.getrandbits(96):024x}', object='chat.completion', usage=usage, choices=[dict(index=0, finish_reason='tool_calls', message=said)])
        fields = {k:c[k] for k in ('turn', 'model', 'response_model', 'started_at', 'finish_reason', 'tool_name', 'arguments', 'actions', 'turn_reward', 'input_tokens')}
        writer.call([self.system, dict(role='user', content=saw.replace(' of 200', f' of {200+n}', 1))], self.tools, output, **who, **fields, call_id=f'call_{rng.getrandbits(72):018x}',
            latency_ms=round(rng.expovariate(1/900), 1), tries=tries, http_status=200, verdict=bad or 'ok', problem=bad and f'Your last reply was {bad}.', thought=thought,
            output_tokens=usage['completion_tokens'], cost_usd=.01, seed=rng.getrandbits(30), temperature=1., raw=raw, steps=steps)
        writer.write('reward', **who, scope='turn', turn=c['turn'], name='names_a_goal', value=float(any(o in thought for o in PRAISED)), source='names_a_goal')

    def counted(self):
        "How many episodes make the turns"
        turns,n = 0,0
        while turns < TURNS: turns,n = turns+len(self.games[n % len(self.games)][1]),n+1
        return n, turns

def fill(games, store):
    "Write the run; (turns, seconds of writing, bytes of lines)"
    n,turns = games.counted()
    planned = [dict(episode_id=f'{RUN}:{k//2}:{k%2}', seed=k//2, sample=k%2) for k in range(n)]
    writer,seconds = store.run(RUN, dict(model='Qwen/Qwen3-4B', endpoint='bench', split='train', difficulty='normal', rng='pure', length=200), planned),0.
    for first in range(0, n, AT_ONCE):
        began = time.perf_counter()
        group = [games.episode(k) for k in range(first, min(n, first+AT_ONCE))]
        while group: group = [g for g in group if go_on(games, writer, g)]
        writer.sync()
        seconds += time.perf_counter()-began
    writer.close()
    return turns,seconds,writer._written

def go_on(games, writer, events):
    "Write what comes next of an episode; False when that was all"
    for kind,said in islice(events, 1):
        games.call(writer, *said) if kind == 'call' else writer.write(kind, **said)
        return True
    return False

# The questions

def questions():
    "Number and title of each question of the notebook → its queries"
    found,title = {},None
    for cell in json.loads(ASKED.read_text())['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown': title = (re.findall(r'^## (\d+\. .*)', source, re.M) or [None if '\n## ' in source else title])[-1]
        elif title: found.setdefault(title, []).extend(queries(source))
    assert len(found) == 12 and all(found.values()), found
    return found

def queries(source):
    "What is asked of `lab.sql` in a cell"
    calls = [o for o in ast.walk(ast.parse(source)) if isinstance(o, ast.Call) and ast.unparse(o.func) == 'lab.sql']
    return [re.sub(r"(?<!<> )'(expert|random|student|one-epoch|eight-epochs|bad-day)'", f"'{RUN}'", o.args[0].value) for o in calls]

def asked(store):
    "Question → seconds"
    return {title:sum(clock(lambda: store.sql(q)) for q in found)/1e3 for title,found in questions().items()}

def million(folder):
    "The figures of the long run"
    games,store = Million(record(folder/'games')),Store(folder/'lab')
    turns,seconds,lines = fill(games, store)
    began = time.perf_counter()
    seal._SEALER.submit(int).result()
    store.seal(), store.gc()
    sealing = time.perf_counter()-began
    first = clock(lambda: Store(folder/'lab').rows('SELECT count(*) AS n FROM episodes'))/1e3
    ids = [o['episode_id'] for o in store.rows('SELECT episode_id FROM episodes ORDER BY md5(episode_id) LIMIT 20')]
    found,disk = asked(store),sum(p.stat().st_size for p in store.path.rglob('*') if p.is_file())
    return dict(turns=turns, slowest_question_s=max(found.values()), first_look_s=first, open_episode_ms=median(clock(lambda: store.episode(o)) for o in ids), lines_gb=lines/turns/1e3,
        sealed_gb=disk/turns/1e3, ingest_turns_s=turns/seconds, seal_s=sealing, questions={k:round(v, 2) for k,v in found.items()})

def main(folder):
    line = workers() | million(folder)
    print(json.dumps({k:round(v, 2) if isinstance(v, float) else v for k,v in line.items()}, ensure_ascii=False))

if __name__ == '__main__':
    folder = Path(os.environ.get('KEEP') or tempfile.mkdtemp())
    try: main(folder)
    finally: os.environ.get('KEEP') or shutil.rmtree(folder)
