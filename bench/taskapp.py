"""Our task app against the predecessor's own, synth-ai 0.2.19: the same client, the same policy server; prints one JSON line

SYNTH_AI names its program, such as `/path/to/venv/bin/synth-ai`; tests/test_predecessor.py says how to install it. Both apps serve Crafter from a process of their own, write traces, and answer over
loopback HTTP with a structured trace, as an evaluation asks for it. Each plays the same 10 episodes of 10 turns, an episode at a time and in turns with the other, since more than one at a time
fails in the predecessor ("database is locked"); the policy server always answers with the same five actions. Starting up and the first episode are not counted.

wall_x, cpu_x, bytes_x: the predecessor's seconds of wall, seconds of its process's CPU, and bytes of the responses, each as a multiple of ours
wall_s, cpu_s, kb: ours, a whole run of 10 episodes; episodes, turns: what was played"""
import json, os, shutil, socket, subprocess, sys, tempfile, time
from contextlib import contextmanager
from pathlib import Path

import httpx, psutil

from synth_lab.mock import mock_process
from synth_lab.serve import serving_process
from synth_lab.taskclient import rollout_request

KEY = 'sk_env_of-the-bench-alone'
EPISODES, TURNS = 10, 10
PLAYS = ['move_right', 'move_right', 'move_down', 'move_left', 'do']

def free_port():
    with socket.create_server(('127.0.0.1', 0)) as s: return s.getsockname()[1]

def wait_for(url, child, seconds=300):
    "Until a server answers"
    end = time.monotonic()+seconds
    while time.monotonic() < end and child.poll() is None:
        try: return httpx.get(url).raise_for_status()
        except httpx.HTTPError: time.sleep(.5)
    raise SystemExit('the predecessor\'s task app does not start: see what it wrote above')

@contextmanager
def predecessor(program):
    "The predecessor's task app; yields (its URL, its process)"
    with tempfile.TemporaryDirectory() as folder:
        examples = next((Path(program).parent.parent/'lib').glob('*/site-packages/examples'), None) or sys.exit(f'{program} is not in an environment with synth-ai')
        shutil.copytree(examples, Path(folder)/'examples') # it finds apps below the working folder
        Path(folder, '.env').write_text(f'ENVIRONMENT_API_KEY={KEY}\n')
        port = free_port()
        keys = dict(ENVIRONMENT_API_KEY=KEY, GROQ_API_KEY='none', OPENAI_API_KEY='none', SYNTH_API_KEY='none') # it asks for each that is missing
        env = os.environ | keys | dict(TASKAPP_TRACING_ENABLED='1', SYNTH_TRACING_AUTO_YES='1', CI='true', SYNTH_TRACES_DB=f'{folder}/app.db', HOME=folder)
        child = subprocess.Popen([program, 'task-app', 'serve', 'grpo-crafter', '--port', str(port), '--env-file', '.env'], cwd=folder, env=env,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=sys.stderr if '-v' in sys.argv else subprocess.DEVNULL)
        try:
            wait_for(f'http://127.0.0.1:{port}/', child)
            yield f'http://127.0.0.1:{port}',psutil.Process(child.pid)
        finally:
            child.terminate()
            child.wait()

@contextmanager
def ours():
    "Our task app; yields (its URL, its process)"
    before = {o.pid for o in psutil.Process().children()}
    with tempfile.TemporaryDirectory() as lab, serving_process('synth_lab.taskapp:create_task_app', dict(key=KEY, lab=lab)) as url:
        [child] = [o for o in psutil.Process().children() if o.pid not in before]
        yield url.removesuffix('/v1'),child

def cpu(process):
    "Seconds of CPU that a process and those it started have taken"
    return sum(sum(o.cpu_times()[:2]) for o in [process, *process.children(recursive=True)])

def play(http, app, model, seed):
    "An episode: (seconds of wall, seconds of CPU, bytes, turns)"
    url,process = app
    policy = dict(policy_name='crafter-react', config=dict(model='mock', inference_url=f'{model}/chat/completions'))
    asked = rollout_request(seed, policy, TURNS, env=dict(env_name='crafter', config=dict(split='train', index=seed)))
    wall,spent = time.perf_counter(),cpu(process)
    response = http.post(f'{url}/rollout', json=asked, headers={'x-api-key':KEY}).raise_for_status()
    wall,spent = time.perf_counter()-wall,cpu(process)-spent
    return wall,spent,len(response.content),response.json()['metrics']['num_steps']

def main():
    program = os.environ.get('SYNTH_AI')
    if not program: sys.exit('bench/taskapp.py needs the predecessor: set SYNTH_AI to the `synth-ai` of a virtual environment with synth-ai 0.2.19')
    with mock_process(plays=PLAYS, dialect='synth') as model, predecessor(program) as old, ours() as new, httpx.Client(timeout=600) as http:
        for app in (old, new): play(http, app, model, EPISODES)
        rounds = [[play(http, app, model, seed) for app in (old, new)] for seed in range(EPISODES)]
    (a,b) = [[sum(o) for o in zip(*rows)] for rows in zip(*rounds)]
    assert a[3] == b[3] == EPISODES*TURNS, f'{a[3]} turns against {b[3]}'
    found = dict(wall_x=a[0]/b[0], cpu_x=a[1]/b[1], bytes_x=a[2]/b[2], wall_s=b[0], cpu_s=b[1], kb=b[2]/1024)
    print(json.dumps({k:round(v, 2) for k,v in found.items()} | dict(episodes=EPISODES, turns=TURNS)))

if __name__ == '__main__': main()
